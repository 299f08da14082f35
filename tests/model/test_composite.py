"""Models with a vision tower: their text decoder is split, and the tower is neither loaded nor needed."""

from pathlib import Path

import pytest
from transformers import AutoConfig, PretrainedConfig

from tests.families import BASE, FAMILIES
from tests.model.rings import CUTS, Pair, difference, save_model, tokens

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = {"image_size": 28, "patch_size": 14}
DEPTHS = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
PROJECTOR = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}


def composite(model_type: str, vision: dict[str, int], **more: int) -> PretrainedConfig:
    text = {**BASE, **FAMILIES[f"{model_type}_text"]}
    return AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **more)


@pytest.mark.parametrize(
    "config",
    [
        composite("gemma3", {**TOWER, **IMAGES}, mm_tokens_per_image=4),
        pytest.param(composite("qwen3_5", DEPTHS), marks=pytest.mark.long),
        pytest.param(composite("llama4", {**TOWER, **IMAGES, **PROJECTOR}), marks=pytest.mark.long),
    ],
    ids=lambda config: config.model_type,
)
def test_the_text_decoder_of_a_composite_model_is_split(config: PretrainedConfig, tmp_path: Path) -> None:
    pair, ids = Pair.load(save_model(config, tmp_path)), tokens(2, 22)
    spans = pair.spans(*CUTS)
    ring, stock = pair.ring(spans), pair.stock()
    for start, stop in ((0, 9), (9, 10), (10, 21), (21, 22)):
        assert difference(ring.step(ids[:, start:stop]), stock.step(ids[:, start:stop])) == 0.0
    for model in (pair.ends, *(span.model for span in spans)):
        assert not [name for name, _ in model.named_parameters() if "vision" in name or "projector" in name]
