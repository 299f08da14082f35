"""The numeric class of a span: known from the config before anything is loaded, and from the model once it is."""

import copy
from typing import Any

from torch import dtype as Dtype
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from swarm.activations import NumericClass
from swarm.model.integer import integers_of


def numeric_class_of(config: PretrainedConfig, dtype: Dtype, quantize: str | None = None) -> NumericClass:
    """Return dtype and quantisation of a span, before it is loaded: spans of different classes compute differently.

    quantize: what its weights become while they are loaded, as "int8" or "int4".
    """
    name = str(dtype).removeprefix("torch.")
    facts = quantisation_of(config)
    if quantize is not None or facts is None:
        return NumericClass(name, weights=quantize or "")
    bits = [f"{width}bit" for width in (4, 8) if facts.get(f"load_in_{width}bit") or facts.get("bits") == width]
    return NumericClass(name, weights="-".join([method_of(facts), *bits]))


def class_of_model(model: PreTrainedModel, dtype: Dtype) -> NumericClass:
    """Return the numeric class of a loaded model."""
    return numeric_class_of(model.config, dtype, integers_of(model))


def quantisation_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return how a checkpoint's weights are quantised once they are loaded here; None: they are plain.

    `transformers` turns FP8 and MXFP4 into plain weights where no GPU has kernels for them.
    """
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        return None
    facts = facts_of(quantisation)
    try:
        quantizer = AutoHfQuantizer.from_config(copy.deepcopy(quantisation), pre_quantized=True)
        quantizer.validate_environment()
    except Exception:  # noqa: BLE001 - a package is missing: loading says which
        return facts
    return None if getattr(quantizer.quantization_config, "dequantize", False) else facts


def facts_of(quantisation: Any) -> dict[str, Any]:  # noqa: ANN401 - a dictionary, or any of `transformers`' own
    """Return what a config says of quantised weights."""
    return quantisation if isinstance(quantisation, dict) else dict(quantisation.to_dict())


def method_of(facts: dict[str, Any]) -> str:
    """Return the name of the format, as "gptq"."""
    method = facts.get("quant_method", "bitsandbytes")  # the first of them did not say
    return str(getattr(method, "value", method))
