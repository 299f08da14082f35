"""Weights as quantised checkpoints store them, and the numbers that they stand for.

Each function takes the tensors of one layer, by their names without the layer's, as they were read from a file: shapes
and dtypes are compared before anything is computed of them. Raises MalformedWeights where they do not fit together.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.model.reading import MalformedWeights

Tensors = Mapping[str, Tensor]


class Stored(ABC):
    """One layer's weight [out, in]."""

    shape: tuple[int, int]

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """Return some outputs' weights, float32 [stop - start, in]."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the whole weight. No more than 2^20 numbers are in float32 beside it."""
        weight = torch.empty(self.shape, dtype=dtype)
        step = max(1, (1 << 20) // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            weight[start : start + step] = self.rows(start, min(start + step, self.shape[0]))
        return weight


class Grid(Stored):
    """Integers with a scale and a zero point for each group of inputs: weight = (code - zero) * scale."""

    def __init__(self, codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None = None) -> None:
        """codes: uint8 [out, in]. zeros: int16, scales: any float, both [out, groups].

        groups: int [in], the group of each input; None: groups are of equal size, one behind the other.
        """
        n_outputs, n_inputs = codes.shape
        n_groups = scales.shape[1] if scales.dim() == 2 else 0
        require(n_groups > 0 and scales.shape[0] == n_outputs, "scales of another shape")
        require(scales.is_floating_point() and zeros.shape == scales.shape, "zero points of another shape")
        if groups is None:
            require(n_inputs % n_groups == 0, f"{n_inputs} inputs in {n_groups} groups")
        else:
            require(groups.shape == (n_inputs,) and not groups.is_floating_point(), "groups of another shape")
            lowest, highest = (int(edge) for edge in groups.aminmax())
            require(lowest >= 0 and highest < n_groups, "a group that has no scale")
            if n_inputs % n_groups == 0:
                plain = torch.arange(n_inputs) // (n_inputs // n_groups)
                groups = None if torch.equal(groups.long(), plain) else groups.long()
        self.shape = n_outputs, n_inputs
        self.codes, self.zeros, self.scales, self.groups = codes, zeros.to(torch.int16), scales.float(), groups

    @property
    def group_size(self) -> int | None:
        """Inputs of a group, where groups are of equal size and lie one behind the other."""
        return None if self.groups is not None else self.shape[1] // self.scales.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        """Return some outputs' weights, float32 [stop - start, in]."""
        zeros, scales = self.zeros[start:stop], self.scales[start:stop]
        if self.groups is None:
            steps = self.codes[start:stop].view(stop - start, scales.shape[1], -1) - zeros[..., None]
            return (steps * scales[..., None]).flatten(1)
        return (self.codes[start:stop] - zeros[:, self.groups]) * scales[:, self.groups]


@dataclass(frozen=True, slots=True)
class Scaled(Stored):
    """Numbers of 8 bits, integers or floats, with a scale for each of some blocks: weight = (number - zero) * scale."""

    numbers: Tensor  # [out, in]
    scales: Tensor  # float32 [n, m]
    block: tuple[int, int]  # outputs and inputs that share a scale
    zeros: Tensor | None = None  # as the scales

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        """[out, in]."""
        return self.numbers.shape[0], self.numbers.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        """Return some outputs' weights, float32 [stop - start, in]."""
        numbers = self.numbers[start:stop].float()
        if self.zeros is not None:
            numbers -= self._of_each(self.zeros.float(), start, stop)
        return numbers * self._of_each(self.scales, start, stop)

    def _of_each(self, values: Tensor, start: int, stop: int) -> Tensor:
        outputs = torch.arange(start, stop) // self.block[0]
        inputs = torch.arange(self.numbers.shape[1]) // self.block[1]
        return values[outputs][:, inputs]


@dataclass(frozen=True, slots=True)
class Looked(Stored):
    """Codes of 4 bits, of which each is looked up, in blocks with a scale: bitsandbytes' nf4 and fp4."""

    size: tuple[int, int]
    octets: Tensor  # uint8 [bytes]: two codes each, the first one in the high bits
    values: Tensor  # float32 [16]
    scales: Tensor  # float32 [blocks]
    block: int

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        """[out, in]."""
        return self.size

    def rows(self, start: int, stop: int) -> Tensor:
        """Return some outputs' weights, float32 [stop - start, in]."""
        places = torch.arange(start * self.size[1], stop * self.size[1])
        octets = self.octets[places // 2]
        codes = torch.where(places % 2 == 0, octets >> 4, octets & 15)
        weights = self.values[codes.long()] * self.scales[places // self.block]
        return weights.view(stop - start, self.size[1])


# Formats --------------------------------------------------------------------------------------------------------------


def gptq(tensors: Tensors, bits: int, group_size: int, *, is_second_version: bool) -> Grid:
    """Read a layer of GPTQ: inputs and zero points are packed in int32; the first version stores zero points less 1."""
    words, scales = _words(tensors, "qweight"), _floats(tensors, "scales")
    groups = tensors.get("g_idx")
    n_inputs = len(words) * 32 // bits if groups is None else len(groups)
    require(n_inputs > 0 and len(words) * 32 % n_inputs == 0, "inputs that do not fill their words")
    bits = len(words) * 32 // n_inputs  # some layers may have others than the rest
    require(bits in (2, 4, 8), f"weights of {bits} bits")
    zeros = unpacked(_words(tensors, "qzeros"), bits)[:, : words.shape[1]].to(torch.int16)
    if not is_second_version:
        zeros = (zeros + 1) & (2**bits - 1)
    if groups is None and 0 < group_size < n_inputs:
        groups = torch.arange(n_inputs) // group_size
    return Grid(unpacked(words.t(), bits), zeros.t(), scales.t(), groups)


def awq(tensors: Tensors, group_size: int) -> Grid:
    """Read a layer of AWQ, version "gemm": outputs are packed in int32, eight in an order of their own."""
    words, scales = _words(tensors, "qweight"), _floats(tensors, "scales")
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where output j of eight lies

    def ordered(packed: Tensor) -> Tensor:
        codes = unpacked(packed, 4)
        return codes.view(len(codes), -1, 8)[:, :, order].flatten(1)

    groups = torch.arange(len(words)) // group_size if 0 < group_size < len(words) else None
    zeros = ordered(_words(tensors, "qzeros")).to(torch.int16)
    return Grid(ordered(words).t().contiguous(), zeros.t(), scales.t(), groups)


def packed_integers(tensors: Tensors) -> Grid:
    """Read a layer of compressed-tensors, packed: integers of 4 or 8 bits, all plus 8 or 128."""
    words, scales = _words(tensors, "weight_packed"), _matrix(_floats(tensors, "weight_scale"))
    size = part(tensors, "weight_shape")
    require(size.numel() == 2 and not size.is_floating_point(), "a shape of other than two sizes")
    n_outputs, n_inputs = (int(each) for each in size.flatten())
    require(len(words) == n_outputs > 0 and n_inputs > 0, "packed weights of another shape")
    bits = next((bits for bits in (4, 8) if words.shape[1] == -(-n_inputs * bits // 32)), 0)
    require(bits > 0, "packed weights that are not of 4 or 8 bits")
    zeros = torch.full((1, 1), 2 ** (bits - 1), dtype=torch.int16)
    if (given := tensors.get("weight_zero_point")) is not None:
        if given.dtype == torch.int32:
            zeros = unpacked(given.t(), bits)[:, :n_outputs].t().to(torch.int16)
        else:
            zeros = zeros + _matrix(given).to(torch.int16)
    scales = scales.expand(n_outputs, -1) if len(scales) == 1 else scales
    if zeros.numel() == 1 or zeros.shape[0] == 1:
        zeros = zeros.expand(n_outputs, scales.shape[1]) if zeros.shape[1] in (1, scales.shape[1]) else zeros
    return Grid(unpacked(words, bits)[:, :n_inputs], zeros, scales, tensors.get("weight_g_idx"))


def scaled(numbers: Tensor, scales: Tensor, block: tuple[int, int] | None, zeros: Tensor | None = None) -> Scaled:
    """Read a layer of 8 bits. scales: one, or of each output, of its groups of inputs, or of each block."""
    require(numbers.dim() == 2 and scales.is_floating_point(), "a weight that is no matrix")
    n_outputs, n_inputs = numbers.shape
    scales = _matrix(scales)
    count, groups = scales.shape
    require(count > 0 and groups > 0, "no scales")
    if block is None or (count, groups) == (1, 1):
        require(n_outputs % count == 0 and n_inputs % groups == 0, "scales of another shape")
        block = n_outputs // count, n_inputs // groups
    require((count, groups) == (-(-n_outputs // block[0]), -(-n_inputs // block[1])), "scales of another shape")
    if zeros is not None:
        zeros = _matrix(zeros)
        require(zeros.shape == scales.shape, "zero points of another shape")
    return Scaled(numbers, scales.float(), block, zeros)


def bitsandbytes(tensors: Tensors) -> Stored:
    """Read a layer of bitsandbytes: int8 with a scale for each output, or 4 bits with a description in JSON."""
    if "SCB" in tensors:
        numbers, scales = part(tensors, "weight"), _floats(tensors, "SCB")
        return scaled(numbers, scales.reshape(-1, 1).float() / 127, (1, max(1, numbers.shape[-1])))
    kind = next((f"weight.{kind}" for kind in bitsandbytes_kinds() if f"weight.{kind}" in tensors), "")
    require(bool(kind), "neither scales nor a description")
    try:
        facts = json.loads(bytes(tensors[kind].flatten().tolist()))
        n_outputs, n_inputs = (int(each) for each in facts["shape"])
        block, inner = int(facts["blocksize"]), int(facts.get("nested_blocksize", 1))
        offset = float(facts.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MalformedWeights(f"a description of 4 bits that is malformed: {error}") from None
    octets, values = part(tensors, "weight").flatten(), _floats(tensors, "weight.quant_map")
    scales = part(tensors, "weight.absmax")
    require(min(n_outputs, n_inputs, block, inner) > 0, "sizes below 1")
    require(octets.dtype == torch.uint8 and len(octets) == -(-n_outputs * n_inputs // 2), "codes of another shape")
    require(values.shape == (16,) and len(scales) == -(-n_outputs * n_inputs // block), "scales of another shape")
    if (outer := tensors.get("weight.nested_absmax")) is not None:
        table = _floats(tensors, "weight.nested_quant_map").float()
        require(scales.dtype == torch.uint8 and table.shape == (256,), "scales that are not of 8 bits")
        require(len(outer) == -(-len(scales) // inner), "scales of scales of another shape")
        scales = table[scales.long()] * outer.float()[torch.arange(len(scales)) // inner] + offset
    require(scales.is_floating_point(), "scales that are no numbers")
    return Looked((n_outputs, n_inputs), octets, values.float(), scales.float(), block)


def bitsandbytes_kinds() -> tuple[str, ...]:
    """Return the names of the descriptions of 4 bits."""
    return "quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4"


# Parts ----------------------------------------------------------------------------------------------------------------


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, words] to uint8 [rows, words * 32 / bits], the low bits first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack([(octets >> at) & (2**bits - 1) for at in range(0, 8, bits)], dim=-1).flatten(-2)


def part(tensors: Tensors, name: str) -> Tensor:
    """Return one of a layer's tensors. Raises MalformedWeights where it is missing."""
    require(name in tensors, f"no {name}")
    return tensors[name]


def require(fits: bool, otherwise: str) -> None:
    """Raise MalformedWeights where a fact does not hold."""
    if not fits:
        raise MalformedWeights(f"a quantised layer has {otherwise}")


def _words(tensors: Tensors, name: str) -> Tensor:
    words = part(tensors, name)
    require(words.dtype == torch.int32 and words.dim() == 2 and words.numel() > 0, f"a {name} that is not int32")
    return words


def _floats(tensors: Tensors, name: str) -> Tensor:
    tensor = part(tensors, name)
    require(tensor.is_floating_point(), f"{name} that are no floats")
    return tensor


def _matrix(tensor: Tensor) -> Tensor:
    """Return one number as [1, 1], and a number for each output as [out, 1]."""
    require(tensor.dim() <= 2 and tensor.numel() > 0, "scales of another shape")
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, 1)
