"""A draft head on disk: a folder with `draft.json` and `draft.safetensors`, bound to the root of its model.

`draft.json` says which model, which sizes, and the SHA-256 of the weights. All of it is checked against the model and
against the size of the file before a tensor is read, because a draft may come from anyone.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from torch import Tensor

from swarm.errors import BadConfiguration, ChecksumMismatch
from swarm.limits import limit
from swarm.model.drafthead import DraftHead, HeadShape
from swarm.model.manifest import Digest, write_atomically
from swarm.model.reading import MalformedWeights, read_tensors
from swarm.model.writing import Layout, Piece, write_tensors


@dataclass(frozen=True, slots=True)
class DraftFileLimits:
    """What a draft's files may hold."""

    config_bytes_max: int = limit(65_536, "bytes", "a larger draft.json is refused")
    weight_bytes_max: int = limit(4 << 30, "bytes", "a larger draft is refused, before anything is read")
    header_bytes_max: int = limit(65_536, "bytes", "beside its weights, a file has no more")


class DraftConfig(BaseModel):
    """`draft.json`. root: of the model that it guesses for. model: its name, for people. sha256: of the weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    root: Digest
    model: Annotated[str, StringConstraints(max_length=200)]
    shape: HeadShape
    sha256: Digest


def is_draft(folder: Path) -> bool:
    """Whether a folder holds a draft head."""
    return _config_of(folder).is_file()


def save_draft(head: DraftHead, folder: Path, *, root: str, model: str) -> None:
    """Write a head's weights in bfloat16, and then the config that makes the folder a draft. Raises OSError."""
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in head.state_dict().items()}
    layouts = {name: Layout(tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = _weights_of(folder)
    partial = path.with_name(f".{path.name}")
    with partial.open("wb") as file:
        digest = write_tensors(file, {"format": "pt"}, [Piece(layouts, lambda: list(weights.values()))])
    config = DraftConfig(root=root, model=model[:200], shape=head.shape, sha256=digest)
    partial.replace(path)
    write_atomically(_config_of(folder), config.model_dump_json(indent=1) + "\n")


def load_draft_head(
    folder: Path,
    *,
    root: str,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    limits: DraftFileLimits = DraftFileLimits(),
) -> DraftHead:
    """Check and load a head. root: of the model. sizes: of its hidden states and of its embeddings.

    Raises BadConfiguration for a draft of another model or one that is damaged.
    """
    config = _config(folder, limits)
    if config.root != root:
        why = f"it is of another model, {config.model!r} with root {config.root}; this one has {root}"
        raise _bad(folder, f"{why}. Make one with swarm-draft")
    shape = config.shape
    if (shape.hidden_size, shape.embedding_size) != sizes:
        raise _bad(folder, f"its states have {shape.hidden_size} numbers, and the model's {sizes[0]}")
    expected = shape.tensors
    most = sum(math.prod(each) for each in expected.values()) * 2
    try:
        size = _weights_of(folder).stat().st_size
        if most > limits.weight_bytes_max or not most <= size <= most + limits.header_bytes_max:
            raise _bad(folder, f"its weights have {size:,} bytes, and their sizes make {most:,}")
        weights = read_tensors(_weights_of(folder), config.sha256, lambda _: True)
    except OSError as error:
        raise _bad(folder, f"its weights cannot be read: {error.strerror}") from None
    except ChecksumMismatch:
        raise _bad(folder, "its weights are damaged: their SHA-256 is not that of draft.json") from None
    except MalformedWeights as error:
        raise _bad(folder, f"its weights are malformed: {error}") from None
    _check(folder, weights, expected)
    with torch.device("meta"):
        head = DraftHead(shape)
    head.load_state_dict({name: weights[name].to(device, dtype) for name in expected}, assign=True)
    return head.requires_grad_(requires_grad=False).eval()


def _config(folder: Path, limits: DraftFileLimits) -> DraftConfig:
    try:
        with _config_of(folder).open("rb") as file:
            data = file.read(limits.config_bytes_max + 1)
        if len(data) > limits.config_bytes_max:
            raise _bad(folder, f"its draft.json is larger than {limits.config_bytes_max} bytes")
        return DraftConfig.model_validate_json(data)
    except OSError as error:
        raise _bad(folder, f"its draft.json cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _bad(folder, f"its draft.json is malformed{f' at {where}' if where else ''}: {first['msg']}") from None


def _check(folder: Path, weights: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if found != expected:
        odd = sorted(set(found.items()) ^ set(expected.items()))[0]
        raise _bad(folder, f"its weights do not fit its sizes: {odd[0][:100]!r}")
    if not all(weights[name].dtype == torch.bfloat16 and bool(weights[name].isfinite().all()) for name in expected):
        raise _bad(folder, "its weights are not all finite numbers in bfloat16")


def _config_of(folder: Path) -> Path:
    return folder / "draft.json"


def _weights_of(folder: Path) -> Path:
    return folder / "draft.safetensors"


def _bad(folder: Path, why: str) -> BadConfiguration:
    return BadConfiguration("draft", f"{str(folder)!r} cannot be used: {why}")
