"""A bounded codec for tensors: everything is checked before a byte is interpreted, and nothing is copied to read it."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from swarm.errors import InvalidMessage

TENSOR_BYTES_MAX = 64 * 1024 * 1024
CHUNK_BYTES = 1 << 20  # what is long travels in messages of about so much, so that others are not kept waiting
RANK_MAX = 3
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorMeta(BaseModel):
    """What a tensor's bytes mean. Row-major, little-endian."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    dtype: Literal["float32", "float16", "bfloat16", "int64", "uint8"]
    shape: Annotated[
        tuple[Annotated[int, Field(ge=1, le=TENSOR_BYTES_MAX)], ...], Field(min_length=1, max_length=RANK_MAX)
    ]

    @property
    def n_bytes(self) -> int:
        """Bytes that a tensor of this kind takes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def meta_of(tensor: Tensor) -> TensorMeta:
    """Describe a tensor for the wire. It must be of a dtype in DTYPES, not empty and of rank 1 to RANK_MAX."""
    return TensorMeta(dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))  # type: ignore[arg-type]


def encode_tensor(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes, without a copy where it lies contiguous in the host's memory."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:  # numpy has no such type
        host = host.view(torch.int16)
    return memoryview(host.numpy()).cast("B")  # type: ignore[arg-type]


def decode_tensors(metas: Sequence[TensorMeta | None], payload: memoryview) -> tuple[Tensor | None, ...]:
    """Read tensors that lie one behind the other and fill `payload` exactly. Raises InvalidMessage.

    payload: writable, since the tensors share its memory.
    """
    tensors: list[Tensor | None] = []
    offset = 0
    for meta in metas:
        if meta is None:
            tensors.append(None)
            continue
        dtype, count = DTYPES[meta.dtype], math.prod(meta.shape)
        end = offset + count * dtype.itemsize
        if end > len(payload):
            raise InvalidMessage("tensor", f"{len(payload)} bytes where its shape says {end}")
        tensors.append(torch.frombuffer(payload, dtype=dtype, count=count, offset=offset).view(meta.shape))
        offset = end
    if offset != len(payload):
        raise InvalidMessage("tensor", f"{len(payload)} bytes where its shape says {offset}")
    return tuple(tensors)
