"""The blocks for multi-token prediction that some checkpoints carry behind their last block (DeepSeek-V3, section 2.2).

From the final hidden state of a position and the embedding of the token behind it, such a block predicts the token
behind that one. `transformers` has the layers as `MtpModel`. They are small beside the model: a client can hold them.
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from swarm.errors import BadConfiguration, UnsupportedCheckpoint
from swarm.model.checkpoint import Checkpoint
from swarm.model.hollow import beyond_blocks, class_for, skeleton, text_config
from swarm.model.loading import quiet, read_verified
from swarm.model.reading import Held
from swarm.model.unpacking import Keeping


def load_mtp(checkpoint: Checkpoint, ends: PreTrainedModel) -> MtpModel:
    """Fetch, verify and load the blocks, in the dtype and on the device of `ends`, with which they share both ends.

    Raises BadConfiguration for a model without them, and ChecksumMismatch, DownloadFailed or UnsupportedCheckpoint.
    """
    pattern = beyond_blocks(checkpoint.config)
    if pattern is None:
        raise BadConfiguration("draft", f"{checkpoint.model!r} has no blocks for multi-token prediction")
    if checkpoint.index is not None and not any(pattern.search(name) for name in checkpoint.index.weight_map):
        raise UnsupportedCheckpoint(checkpoint.model, "it has no weights for multi-token prediction")
    with quiet(), torch.inference_mode(mode=False):
        tensors = read_verified(checkpoint, lambda name: pattern.search(name) is not None, Keeping(ends.dtype))
        try:
            model = _loaded(checkpoint, ends, tensors)
        except (RuntimeError, ValueError, KeyError, AttributeError, StopIteration) as error:
            why = f"its blocks for multi-token prediction do not load: {error}"
            raise UnsupportedCheckpoint(checkpoint.model, why) from error
        model.tie_with_main_model(ends)
        placed: Any = model.eval()
        placed.to(ends.device)
    return model


def _loaded(checkpoint: Checkpoint, ends: PreTrainedModel, tensors: dict[str, Held]) -> MtpModel:
    """As `MtpModel.from_pretrained`, which reads the files by itself."""
    whole = skeleton(class_for(checkpoint.config), checkpoint.config)  # the layers are of its last block's class
    with torch.device("meta"):
        model = MtpModel(whole, text_config(checkpoint.config).num_mtp_layers)
    conversions: Any = model.get_weight_conversions(whole)
    options = LoadStateDictConfig(weight_mapping=conversions, device_map={"": torch.device("cpu")}, dtype=ends.dtype)
    loading: Any = convert_and_load_state_dict_in_model(model=model, state_dict=tensors, load_config=options)
    report = loading[0]
    model._adjust_missing_and_unexpected_keys(report)
    if report.missing_keys or report.mismatched_keys:
        raise ValueError(f"tensors are missing or misshapen: {sorted(map(str, report.missing_keys))[:3]}")
    return model
