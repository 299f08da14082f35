"""The numeric class of a span: known from the config before anything is loaded, and from the model once it is."""

import copy
from typing import Any

from torch import dtype as Dtype
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from swarm.activations import NumericClass
from swarm.model.integer import IntegerFormat, has_integers


def numeric_class_of(config: PretrainedConfig, dtype: Dtype, quantize: str | None = None) -> NumericClass:
    """Return dtype and quantisation of a span, before it is loaded: spans of different classes compute differently.

    quantize: what its weights become while they are loaded, as "int8".
    """
    name = str(dtype).removeprefix("torch.")
    if quantize is not None:
        return NumericClass(name, weights=quantize)
    quantization = getattr(config, "quantization_config", None)
    if quantization is None or is_dequantised(quantization):
        return NumericClass(name)
    facts = quantization if isinstance(quantization, dict) else quantization.to_dict()
    bits = [f"{width}bit" for width in (4, 8) if facts.get(f"load_in_{width}bit") or facts.get("bits") == width]
    method = facts.get("quant_method", "quantized")
    return NumericClass(name, weights="-".join([str(getattr(method, "value", method)), *bits]))


def class_of_model(model: PreTrainedModel, dtype: Dtype) -> NumericClass:
    """Return the numeric class of a loaded model."""
    return numeric_class_of(model.config, dtype, IntegerFormat.name if has_integers(model) else None)


def is_dequantised(quantization: Any) -> bool:  # noqa: ANN401 - a dictionary, or any of `transformers`' own
    """Whether `transformers` turns such weights into plain ones where it loads them on this machine.

    It does so for FP8 and MXFP4 where no GPU has kernels for them.
    """
    try:
        quantizer = AutoHfQuantizer.from_config(copy.deepcopy(quantization), pre_quantized=True)
        quantizer.validate_environment()
    except Exception:  # noqa: BLE001 - a package is missing, or the method unknown: loading says so
        return False
    return bool(getattr(quantizer.quantization_config, "dequantize", False))
