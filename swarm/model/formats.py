"""Checkpoints that are quantised: which formats spans and clients run, and which are refused by name.

Most formats are read here, layer by layer, without the package that made them (`swarm.model.stored`). Then the
checkpoint's config says nothing of them, and all else treats it as a plain one: its numeric class, the size of its
blocks, `--quantize`. `transformers` loads the others by itself.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from transformers import PretrainedConfig

from swarm.errors import UnsupportedCheckpoint
from swarm.model.classes import facts_of, method_of, quantisation_of
from swarm.model.stored import Stored, awq, bitsandbytes, bitsandbytes_kinds, gptq, packed_integers, part, scaled


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the documentation's table. method: as a config names it. runs: what a span and a client make of it."""

    method: str
    tensors: str
    runs: str
    why: str


def formats() -> tuple[Format, ...]:
    """Return what is known of each format. Others are refused by their names."""
    refused = "no: take the plain checkpoint"
    return (
        Format("gptq", "4, 8 or 2 bits, in any order of groups", "yes", "unpacked without loss"),
        Format("gptq", "3 bits, or Marlin's order", refused, "of another layout"),
        Format("awq", "4 bits, version `gemm`", "yes", "unpacked without loss"),
        Format("awq", "versions `gemv` and others", refused, "of another layout"),
        Format("compressed-tensors", "W4A16 and W8A16, packed", "yes", "unpacked without loss"),
        Format("compressed-tensors", "W8A8 and FP8", "yes", "unpacked without loss; activations stay exact"),
        Format("compressed-tensors", "NVFP4, sparse or rotated weights", refused, "of another layout"),
        Format("fp8", "e4m3 in blocks or whole tensors", "yes", "unpacked without loss, unless a GPU computes in FP8"),
        Format("bitsandbytes", "nf4, fp4 and int8, scales quantised or not", "yes", "unpacked; by its package on GPUs"),
        Format("mxfp4", "the experts of gpt_oss", "yes", "`transformers` unpacks it, unless a kernel computes in it"),
        Format("torchao", "all", refused, "its files need torchao's own classes"),
        Format("gguf", "all", "no: convert it to safetensors", "spans read safetensors block by block"),
    )


@dataclass(frozen=True, slots=True)
class Packing:
    """How a format stores a layer's weight.

    parts: the names of the tensors that a weight may be made of, behind the layer's and a dot. dtypes: of a tensor
    "weight" that is such a part, and no plain weight. read: makes a weight of its parts; it raises MalformedWeights.
    """

    method: str
    parts: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    read: Callable[[Mapping[str, Tensor]], Stored]
    group_size: int | None = None  # inputs that share a scale, of weights in codes of 4 bits; None: they are others

    def weight_of(self, name: str) -> str:
        """Return the name of the weight that a tensor is for; a plain tensor's own name."""
        layer, part = self._cut(name)
        return name if part is None else f"{layer}.weight"

    def part_of(self, name: str, dtype: torch.dtype | None = None) -> str | None:
        """Return which part of a weight a tensor is; None: it is a plain one. dtype: None where it is not known yet."""
        part = self._cut(name)[1]
        return None if part == "weight" and dtype is not None and dtype not in self.dtypes else part

    def _cut(self, name: str) -> tuple[str, str | None]:
        for each in self.parts:
            if name.endswith(f".{each}"):
                return name.removesuffix(f".{each}"), each
        return name, None


def packing_of(name: str, config: PretrainedConfig) -> Packing | None:
    """Return how a checkpoint's weights are stored; None: they are plain, or `transformers` reads them.

    Raises UnsupportedCheckpoint where neither can be.
    """
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        return None
    facts = facts_of(quantisation)
    method = method_of(facts)
    readers: dict[str, Callable[[dict[str, Any]], Packing]] = {
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "bitsandbytes": _bitsandbytes,
    }
    if method == "mxfp4":
        return None
    if method not in readers:
        runs = ", ".join(sorted({*readers, "mxfp4"}))
        raise UnsupportedCheckpoint(
            name, f"its weights are quantised by {method}, and spans run {runs}; take the plain checkpoint"
        )
    try:
        packing = readers[method](facts)
        return None if _is_computed_in(method, config) else packing
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(each) for each in first["loc"])
        why = f"{place} is {str(first['input'])[:80]!r}: {first['msg']}"
    except _Other as error:
        why = str(error)
    raise UnsupportedCheckpoint(
        name, f"its weights are quantised by {method} in a way that spans do not run ({why}); take the plain checkpoint"
    )


def _is_computed_in(method: str, config: PretrainedConfig) -> bool:
    """Whether a GPU here computes with weights as they are stored, by `transformers`."""
    if method == "fp8":
        return quantisation_of(config) is not None
    return method == "bitsandbytes" and torch.cuda.is_available() and find_spec("bitsandbytes") is not None


def without_quantisation(config: PretrainedConfig) -> None:
    """Let a config, and the text part of one, say nothing of quantised weights."""
    for each in (config, config.get_text_config(decoder=True)):
        if hasattr(each, "quantization_config"):
            del each.quantization_config


def refuse_gguf(model: str, names: Collection[str]) -> None:
    """Raise UnsupportedCheckpoint where files are GGUF, and none is safetensors."""
    if any(name.endswith(".gguf") for name in names) and not any(name.endswith(".safetensors") for name in names):
        why = "its weights are GGUF, and spans read safetensors; take the model's own checkpoint, or convert this one"
        raise UnsupportedCheckpoint(model, f"{why} (docs/quantisation.md)")


class _Other(ValueError):
    """A layout that is not read here."""


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Gptq(_Facts):
    bits: Literal[2, 4, 8]
    group_size: int = Field(default=-1, ge=-1)
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    is_marlin_format: Literal[False] = False


def _gptq(facts: dict[str, Any]) -> Packing:
    read = _Gptq.model_validate(facts)
    second = read.checkpoint_format == "gptq_v2"
    weight = partial(gptq, bits=read.bits, group_size=read.group_size, is_second_version=second)
    return Packing(
        "gptq", ("qweight", "qzeros", "scales", "g_idx"), frozenset(), weight, _four(read.bits, read.group_size)
    )


class _Awq(_Facts):
    bits: Literal[4]
    group_size: int = Field(ge=-1)
    version: Literal["gemm", "GEMM"] = "gemm"


def _awq(facts: dict[str, Any]) -> Packing:
    read = _Awq.model_validate(facts)
    weight = partial(awq, group_size=read.group_size)
    return Packing("awq", ("qweight", "qzeros", "scales"), frozenset(), weight, _four(read.bits, read.group_size))


class _Weights(_Facts):
    num_bits: Literal[4, 8]
    type: Literal["int", "float"]
    block_structure: tuple[int, int] | None = None
    group_size: int | None = None


class _Group(_Facts):
    weights: _Weights
    format: str | None = None


class _CompressedTensors(_Facts):
    format: str
    config_groups: dict[str, _Group] = Field(min_length=1, max_length=64)
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def _compressed_tensors(facts: dict[str, Any]) -> Packing:
    read = _CompressedTensors.model_validate(facts)
    plain = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"}
    used = {read.format} if read.format != "mixed-precision" else {str(g.format) for g in read.config_groups.values()}
    if not used <= plain:
        raise _Other(f"format is {', '.join(sorted(used - plain))[:80]!r}")
    if read.sparsity_config and read.sparsity_config.get("format") != "dense":
        raise _Other("weights are sparse")
    if read.transform_config and read.transform_config.get("config_groups"):
        raise _Other("weights are rotated")
    blocks = {each.weights.block_structure for each in read.config_groups.values()} - {None}
    if len(blocks) > 1:
        raise _Other("blocks are of several sizes")
    block = next(iter(blocks), None)

    def weight(tensors: Mapping[str, Tensor]) -> Stored:
        if "weight_packed" in tensors:
            return packed_integers(tensors)
        numbers, scales = part(tensors, "weight"), part(tensors, "weight_scale")
        return scaled(numbers, scales, block if scales.dim() == 2 and 1 not in scales.shape else None, _zeros(tensors))

    names = "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx", "weight"
    dtypes = frozenset({torch.int8, torch.float8_e4m3fn, torch.float8_e5m2})
    schemes = {(each.weights.num_bits, each.weights.group_size) for each in read.config_groups.values()}
    bits, group_size = schemes.pop()
    four = _four(bits, group_size or -1) if used == {"pack-quantized"} and not schemes else None
    return Packing("compressed-tensors", names, dtypes, weight, four)


def _four(bits: int, group_size: int) -> int | None:
    return group_size if bits == 4 and group_size > 0 else None


def _zeros(tensors: Mapping[str, Tensor]) -> Tensor | None:
    zeros = tensors.get("weight_zero_point")
    return None if zeros is None or not zeros.count_nonzero() else zeros


class _Fp8(_Facts):
    weight_block_size: tuple[int, int] | None = None


def _fp8(facts: dict[str, Any]) -> Packing:
    block = _Fp8.model_validate(facts).weight_block_size

    def weight(tensors: Mapping[str, Tensor]) -> Stored:
        return scaled(part(tensors, "weight"), part(tensors, "weight_scale_inv"), block)

    dtypes = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
    return Packing("fp8", ("weight", "weight_scale_inv"), dtypes, weight)


def _bitsandbytes(_facts: dict[str, Any]) -> Packing:
    of_four = "absmax", "quant_map", "nested_absmax", "nested_quant_map", *bitsandbytes_kinds()
    parts = "weight", "SCB", *(f"weight.{each}" for each in of_four)
    return Packing("bitsandbytes", parts, frozenset({torch.int8, torch.uint8}), bitsandbytes)
