"""A half-made draft on disk: the model's final states of all windows, and how far training has come.

    OUT/work/plan.json             what is made: a rerun that asks for something else is refused
    OUT/work/states                bfloat16 [windows, positions, hidden_size], as far as they have come
    OUT/work/collected             how many windows that is
    OUT/work/training.safetensors  the head in float32, and its optimizers

Each is complete whenever the process may be killed. `states` is read where it lies: it may be larger than the memory.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from swarm.client.distilling.limits import DistilLimits
from swarm.errors import BadConfiguration
from swarm.model.drafthead import HeadShape
from swarm.model.manifest import Digest, write_atomically


class Plan(BaseModel):
    """What a draft is made of. texts: SHA-256 of the windows' tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    root: Digest
    texts: Digest
    windows: int
    positions: int
    shape: HeadShape
    vocabulary: int
    steps: int
    rows: int
    depths: int
    alone: float
    autocast: bool
    learning_rate: float
    seed: int

    @property
    def state_bytes(self) -> int:
        """Bytes of all states."""
        return 2 * self.windows * self.positions * self.shape.hidden_size


@dataclass(frozen=True, slots=True)
class Work:
    """The folder of one plan."""

    folder: Path
    plan: Plan

    @classmethod
    def begin(cls, folder: Path, plan: Plan, limits: DistilLimits = DistilLimits()) -> "Work":  # noqa: B008 - frozen
        """Go on in a folder, or begin there. Raises BadConfiguration where it has other work, or the disk no room."""
        path = folder / "plan.json"
        try:
            if path.exists():
                known = Plan.model_validate_json(path.read_bytes())
                if known != plan:
                    pairs = zip(known, plan, strict=True)
                    other = ", ".join(name for (name, was), (_, wanted) in pairs if was != wanted)
                    why = f"{str(folder)!r} has a half-made draft of other {other}; give those, or delete it"
                    raise BadConfiguration("out", why)
                return cls(folder, plan)
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < plan.state_bytes + limits.free_bytes_min:
                need = f"the states take {plan.state_bytes / 1e9:.1f} GB, and the disk has {free / 1e9:.1f} GB free"
                raise BadConfiguration("out", f"{need}; take fewer --tokens")
            (folder / "states").unlink(missing_ok=True)
            write_atomically(folder / "collected", "0")
            write_atomically(path, plan.model_dump_json(indent=1))
        except (OSError, ValidationError) as error:
            first = str(error).splitlines()[0]
            raise BadConfiguration("out", f"{str(folder)!r} cannot be used: {first}") from None
        return cls(folder, plan)

    @property
    def collected(self) -> int:
        """How many windows' states are there."""
        try:
            count = int((self.folder / "collected").read_text(encoding="utf-8"))
            held = (self.folder / "states").stat().st_size * self.plan.windows // self.plan.state_bytes
        except (OSError, ValueError):
            return 0
        return max(0, min(count, held))

    def add(self, states: Tensor) -> None:
        """Keep the states of the next windows, [windows, positions, hidden_size]. Raises OSError."""
        done = self.collected
        flat = states.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
        with (self.folder / "states").open("r+b" if (self.folder / "states").exists() else "wb") as file:
            file.seek(done * self.plan.state_bytes // self.plan.windows)
            file.write(flat.tobytes())
        write_atomically(self.folder / "collected", str(done + len(states)))

    def states(self) -> "States":
        """Return all states, when they are collected."""
        assert self.collected == self.plan.windows
        shape = (self.plan.windows, self.plan.positions, self.plan.shape.hidden_size)
        return States(np.memmap(self.folder / "states", dtype=np.int16, mode="r", shape=shape))

    @property
    def training(self) -> Path:
        """The file of the training's state."""
        return self.folder / "training.safetensors"

    def delete(self) -> None:
        """Delete the folder: the draft is made."""
        shutil.rmtree(self.folder)


@dataclass(frozen=True, slots=True)
class States:
    """The states of all windows."""

    numbers: np.memmap

    def of(self, which: Tensor) -> Tensor:
        """Return the states of some windows, bfloat16 [windows, positions, hidden_size]."""
        return torch.from_numpy(self.numbers[which.numpy()]).view(torch.bfloat16)
