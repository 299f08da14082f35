"""The blocks for multi-token prediction that some checkpoints carry behind their last block (DeepSeek-V3, section 2.2).

From the final hidden state of a position and the embedding of the token behind it, such a block predicts the token
behind that one. `transformers` has the layers as `MtpModel`. They are small beside the model: a client can hold them.
"""

import re
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from swarm.errors import BadConfiguration, UnsupportedCheckpoint
from swarm.model.checkpoint import Checkpoint
from swarm.model.hollow import class_for, skeleton, text_config
from swarm.model.loading import fetched, quiet, staged
from swarm.model.ownership import own_weights


def n_mtp_blocks(checkpoint: Checkpoint) -> int:
    """Return how many such blocks the checkpoint's config names."""
    return int(getattr(text_config(checkpoint.config), "num_mtp_layers", None) or 0)


def load_mtp(checkpoint: Checkpoint, ends: PreTrainedModel) -> MtpModel:
    """Fetch, verify and load the blocks, in the dtype and on the device of `ends`, with which they share both ends.

    Raises BadConfiguration for a model without them, and ChecksumMismatch, DownloadFailed or UnsupportedCheckpoint.
    """
    count = n_mtp_blocks(checkpoint)
    if not count:
        raise BadConfiguration("draft", f"{checkpoint.model!r} has no blocks for multi-token prediction")
    whole = skeleton(class_for(checkpoint.config), checkpoint.config)  # the layers are of its last block's class
    first = text_config(checkpoint.config).num_hidden_layers
    # The family's own patterns know its released sizes alone.
    whole._keys_to_ignore_on_load_unexpected = [
        *(type(whole)._keys_to_ignore_on_load_unexpected or ()),
        *(rf"layers\.{block}\." for block in range(first, first + count)),
    ]
    whole.config.dtype = ends.dtype
    names = None
    if checkpoint.index is not None:
        pattern: re.Pattern[str] = MtpModel.get_mtp_weights_regex(whole)
        names = {name for name in checkpoint.index.weight_map if pattern.search(name)}
        if not names:
            raise UnsupportedCheckpoint(checkpoint.model, "it has no weights for multi-token prediction")
    paths = fetched(checkpoint, names)
    with staged(checkpoint, paths, names) as directory, quiet(), torch.inference_mode(mode=False):
        model = _loaded(checkpoint, whole, directory)
        own_weights(model.layers, {str(path.resolve()) for path in paths.values()})
    model.tie_with_main_model(ends)
    return model.to(ends.device).eval()


def _loaded(checkpoint: Checkpoint, whole: PreTrainedModel, directory: Path) -> MtpModel:
    whole.config.name_or_path = str(directory)
    try:
        model: MtpModel = MtpModel.from_pretrained(whole, device_map={"": torch.device("cpu")})
    except (RuntimeError, ValueError, KeyError, AttributeError, StopIteration, OSError) as error:
        why = f"its blocks for multi-token prediction do not load: {error}"
        raise UnsupportedCheckpoint(checkpoint.model, why) from error
    return model
