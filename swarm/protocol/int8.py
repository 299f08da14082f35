"""The wire coding "int8": hidden states in 8.5 bits a number, instead of 16 or 32.

The last dimension is cut into blocks of 32 numbers; a row's last block may be shorter. A block has one scale, which is
its largest magnitude in 16 bits, and a whole number from -127 to 127 for each of its numbers:

    code = round(number / (scale / 127))        number' = code * (scale / 127), rounded to the tensor's dtype

    scales, all rows' blocks in order, 2 bytes each: float16 of a float16 tensor, else bfloat16
    codes, all numbers in order, 1 byte each

Two facts keep repairs exact. A position's bytes depend on its own numbers alone, so a past that is sent again in other
pieces has the same bytes. And numbers that were decoded encode to the bytes that they came from, so a relay changes
nothing: the largest code of a block is always 127, which decodes to the scale itself, and the rounding of the others
stays below half a step. Blocks too small for that are zero. Numbers that are infinite or none give a scale that is
neither, and decode to no numbers: the checks of plain activations refuse them.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the bytes of a coded tensor are. width: numbers in a row, which is the last dimension."""

    shape: tuple[int, ...]
    block: int = 32  # numbers that share a scale

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.shape[-1]

    @property
    def blocks(self) -> int:
        """Blocks in a row."""
        return -(-self.width // self.block)

    @property
    def padding(self) -> int:
        """Numbers that the last block of a row lacks."""
        return self.blocks * self.block - self.width

    @property
    def n_scales(self) -> int:
        """Blocks of all rows."""
        return math.prod(self.shape[:-1]) * self.blocks

    @property
    def n_bytes(self) -> int:
        """Bytes of scales and codes."""
        return 2 * self.n_scales + math.prod(self.shape)


def encode_int8(tensor: "Tensor") -> memoryview:
    """Return the bytes of a floating tensor of any shape, on any device."""
    import torch  # noqa: PLC0415 - a process that only shakes hands and pings does without

    layout = Layout(tuple(tensor.shape))
    host = tensor.detach().cpu()
    numbers = _in_blocks(host.float().reshape(-1, layout.width), layout)
    scale_dtype, smallest = _scales_of(host.dtype)
    largest = numbers.abs().amax(dim=-1)
    scales = largest.masked_fill(largest < smallest, 0.0).to(scale_dtype)
    steps = scales.float() / 127
    # a scale that is no number compares false, and leaves codes of zero
    per_step = torch.where(steps > 0, 1 / steps, 0.0)
    codes = (numbers * per_step[..., None]).round_().to(torch.int8)
    flat = codes.view(-1, layout.blocks * layout.block)[:, : layout.width].reshape(-1)
    coded = torch.cat((scales.reshape(-1).view(torch.uint8), flat.view(torch.uint8)))
    return memoryview(coded.numpy()).cast("B")  # type: ignore[arg-type]


def decode_int8(coded: memoryview, dtype: "torch.dtype", shape: tuple[int, ...]) -> "Tensor":
    """Return the tensor that these bytes are of. coded: exactly `Layout(shape).n_bytes`, writable."""
    import torch  # noqa: PLC0415 - see above

    layout = Layout(shape)
    assert len(coded) == layout.n_bytes
    scales = torch.frombuffer(coded, dtype=_scales_of(dtype)[0], count=layout.n_scales)
    codes = torch.frombuffer(coded, dtype=torch.int8, offset=2 * layout.n_scales)
    numbers = _in_blocks(codes.view(-1, layout.width).float(), layout)
    numbers *= (scales.float() / 127).view(-1, layout.blocks)[..., None]
    rows = numbers.view(-1, layout.blocks * layout.block)[:, : layout.width]
    return rows.to(dtype).reshape(shape)


def _in_blocks(rows: "Tensor", layout: Layout) -> "Tensor":
    """Return rows as [rows, blocks, block], with zeros behind the last number."""
    import torch  # noqa: PLC0415 - see above

    if layout.padding:
        rows = torch.nn.functional.pad(rows, (0, layout.padding))
    return rows.view(-1, layout.blocks, layout.block)


def _scales_of(dtype: "torch.dtype") -> "tuple[torch.dtype, float]":
    """Return the dtype of a tensor's scales, and the largest magnitude below which a block is zero.

    With less, a step or a product of it would be no normal number, and numbers would not encode to their bytes again.
    """
    import torch  # noqa: PLC0415 - see above

    return (torch.float16, 2.0**-14) if dtype is torch.float16 else (torch.bfloat16, 2.0**-119)
