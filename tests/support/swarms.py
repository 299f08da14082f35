"""Swarms of real processes for tests: a family's tiny checkpoint, the stock model beside it, and clients."""

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm import AutoDistributedModel
from swarm.client.hf import auto
from swarm.client.hf.swarm import ClientOptions
from swarm.client.session.limits import SessionLimits
from swarm.demo.local import Launch, LocalSwarm
from swarm.identity import Identity
from tests.model.rings import save_family
from tests.support import warm

REPOSITORY = Path(__file__).parents[2]
SPANS = ("0:1", "1:4", "4:6")
DEMO_SPANS = ("0:4", "4:8", "8:12")
DEMO_CHECKPOINT = REPOSITORY / "swarm" / "demo" / "checkpoint"
NETWORK = "local"


@dataclass(slots=True)
class World:
    """One checkpoint, the whole stock model of it, and a running swarm that serves it."""

    directory: Path
    full: PreTrainedModel
    swarm: LocalSwarm
    _closing: ExitStack

    def client(self, **options: Any) -> PreTrainedModel:
        """Join with a fresh client; it leaves when the world ends, if not before."""
        options = {"dtype": self.full.dtype, **options}
        return self._closing.enter_context(join(self.directory, self.swarm, **options))


def environment(home: Path) -> dict[str, str]:
    """Variables for children: they find the package, and no file of whoever runs the tests."""
    names = {f"XDG_{kind}_HOME": kind.lower() for kind in ("CACHE", "CONFIG", "DATA")}
    folders = {name: str(home / folder) for name, folder in names.items()}
    return {"PYTHONPATH": str(REPOSITORY), "XDG_STATE_HOME": f"{os.devnull}/none", **folders}  # no swarm meets another


@contextmanager
def world(
    directory: Path,
    home: Path,
    spans: Sequence[str] = SPANS,
    dtype: torch.dtype = torch.float32,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    identities: Mapping[str, Identity] | None = None,
    launch: Launch = warm.launch,
) -> Iterator[World]:
    """Run a swarm on a checkpoint. options: more arguments for every server. identities: by processes' names."""
    full = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    options = ("--dtype", str(dtype).removeprefix("torch."), *options)
    env = environment(home) | dict(env or {})
    started = {"env": env, "options": options, "network": NETWORK, "identities": identities, "launch": launch}
    with (
        LocalSwarm(directory, spans, **started) as swarm,
        ExitStack() as closing,
    ):
        yield World(directory, full, swarm, closing)


@contextmanager
def join(
    directory: Path, swarm: LocalSwarm, *, limits: SessionLimits | None = None, **options: Any
) -> Iterator[PreTrainedModel]:
    """A client of a swarm. limits: of its sessions."""
    with patch.object(auto, "ClientOptions", partial(ClientOptions, limits=limits or SessionLimits())):
        model = AutoDistributedModel.from_pretrained(
            directory, initial_peers=swarm.initial_peers, network=swarm.network, **{"audit": 0.0, **options}
        )
    try:
        yield model
    finally:
        model.close()
        gc.collect()


def make_checkpoint(name: str, directory: Path) -> Path:
    """Write a family's tiny checkpoint, in several files."""
    return save_family(name, directory)


def eventually(what: Callable[[], object], within_s: float, every_s: float = 0.02) -> Any:
    """Wait until `what()` is true and return it; fail with its last value after `within_s`."""
    deadline = time.monotonic() + within_s
    while not (value := what()):
        assert time.monotonic() < deadline, (
            f"not within {within_s} s: {getattr(what, '__name__', what)} gives {value!r}"
        )
        time.sleep(every_s)
    return value


def prompt(batch: int, tokens: int, seed: int = 1) -> torch.Tensor:
    """Random token ids without special ones, [batch, tokens]."""
    return torch.randint(3, 120, (batch, tokens), generator=torch.Generator().manual_seed(seed))
