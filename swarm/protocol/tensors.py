"""A bounded codec for tensors: everything is checked before a byte is interpreted, and nothing is copied to read it.

torch is imported where a tensor is touched, and not before: a process that only shakes hands and pings does without.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from swarm.activations import Activations
from swarm.errors import InvalidMessage
from swarm.protocol.int8 import Layout, decode_int8, encode_int8

if TYPE_CHECKING:
    from torch import Tensor

TENSOR_BYTES_MAX = 64 * 1024 * 1024
CHUNK_BYTES = 1 << 20  # long tensors travel in messages of about so much, so that other messages need not wait
RANK_MAX = 3
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "uint8": 1}  # the dtypes that travel

Coding = Literal["int8"]
"""How hidden states travel where that is not as they are: the part `wire` of a numeric class."""


def coding_of(name: str) -> Coding | None:
    """Return the coding of this name; None for "", which is none. Raises ValueError for others."""
    if name == "int8":
        return "int8"
    if name:
        raise ValueError(f"{name!r} is no coding of activations: there is 'int8'")
    return None


class TensorMeta(BaseModel):
    """The meaning of a tensor's bytes. Row-major, little-endian. coding: None where they are the tensor's own."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    dtype: Literal["float32", "float16", "bfloat16", "int64", "uint8"]
    shape: Annotated[
        tuple[Annotated[int, Field(ge=1, le=TENSOR_BYTES_MAX)], ...],
        Field(min_length=1, max_length=RANK_MAX, fail_fast=True),
    ]
    coding: Coding | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes that a tensor of this kind takes in memory."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def sent_bytes(self) -> int:
        """Bytes that it takes in a frame."""
        return self.n_bytes if self.coding is None else Layout(self.shape).n_bytes


def meta_of(tensor: "Tensor", coding: Coding | None = None) -> TensorMeta:
    """Describe a tensor for the wire. It must be of a dtype in ITEM_BYTES, not empty and of rank 1 to RANK_MAX."""
    return TensorMeta(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), coding=coding)  # type: ignore[arg-type]


class Metas(NamedTuple):
    """The description of activations: the fields that messages with activations share."""

    hidden: TensorMeta
    positions: TensorMeta | None
    mask: TensorMeta | None


def metas_of(activations: Activations, coding: Coding | None = None) -> Metas:
    """Describe activations for the wire. coding: of the hidden states."""
    positions, mask = activations.positions, activations.mask
    return Metas(
        meta_of(activations.hidden, coding),
        None if positions is None else meta_of(positions),
        None if mask is None else meta_of(mask),
    )


def encode_tensor(tensor: "Tensor", coding: Coding | None = None) -> memoryview:
    """Return the tensor's bytes, without a copy where it lies contiguous in the host's memory and is not coded."""
    import torch  # noqa: PLC0415 - see above

    if coding is not None:
        return encode_int8(tensor)
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:  # numpy has no such type
        host = host.view(torch.int16)
    return memoryview(host.numpy()).cast("B")  # type: ignore[arg-type]


def decode_tensors(metas: Sequence[TensorMeta | None], payload: memoryview) -> "tuple[Tensor | None, ...]":
    """Read tensors that lie one behind the other and fill `payload` exactly. Raises InvalidMessage.

    payload: writable, since the tensors share its memory, but for those that are decoded.
    """
    import torch  # noqa: PLC0415 - see above

    tensors: list[Tensor | None] = []
    offset = 0
    for meta in metas:
        if meta is None:
            tensors.append(None)
            continue
        count = math.prod(meta.shape)
        end = offset + (meta.n_bytes if meta.coding is None else meta.sent_bytes)
        if end > len(payload):
            raise InvalidMessage("tensor", f"{len(payload)} bytes where its shape says {end}")
        dtype: torch.dtype = getattr(torch, meta.dtype)
        if meta.coding is None:
            tensors.append(torch.frombuffer(payload, dtype=dtype, count=count, offset=offset).view(meta.shape))
        else:
            _check_coded(meta)
            tensors.append(decode_int8(payload[offset:end], dtype, meta.shape))
        offset = end
    if offset != len(payload):
        raise InvalidMessage("tensor", f"{len(payload)} bytes where its shape says {offset}")
    return tuple(tensors)


def _check_coded(meta: TensorMeta) -> None:
    """Raise InvalidMessage for a tensor that no peer codes, or that is too large once it is decoded."""
    if meta.dtype in {"int64", "uint8"}:
        raise InvalidMessage("tensor", f"{meta.dtype} does not travel as {meta.coding}")
    if meta.n_bytes > TENSOR_BYTES_MAX:
        raise InvalidMessage("tensor", f"{meta.n_bytes} bytes once it is decoded")
    layout, numbers = Layout(meta.shape), math.prod(meta.shape)
    padded = layout.n_scales * layout.block
    if padded > max(2 * numbers, 1 << 18):  # of hidden states that are narrower than any model's
        raise InvalidMessage("tensor", f"{padded} numbers to decode where {numbers} are sent")
