"""A server that chooses its span: claims, looks and the memory that it has, without a network."""

import asyncio
import math
import time
from collections.abc import Iterable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.commands import Stop
from swarm.dht.directory import Directory
from swarm.dht.records import Announcement
from swarm.dht.store import MemoryStore
from swarm.errors import Unreachable
from swarm.identity import Identity
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.loading import block_bytes, load_span
from swarm.server import measure
from swarm.server.automatic import Automatic, AutomaticLimits
from swarm.server.measure import blocks_that_fit
from swarm.server.proofs import Proofs
from swarm.server.serve import _Host
from tests.dht.support import NETWORK, ROOT, announcement
from tests.support.swarms import DEMO_CHECKPOINT

TWELVE = cast(Checkpoint, SimpleNamespace(root=ROOT, n_blocks=12))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore.make(NETWORK, time.time)


class Believing:
    """Takes every server for one that has proven to be there. Real calls are in test_proofs.py."""

    async def look(self, servers: Iterable[Announcement]) -> dict[str, float]:
        return {server.public_key: math.inf for server in servers}


class Newcomer:
    """A server that is about to start."""

    def __init__(self, store: MemoryStore, name: bytes, every_s: float = 0.0) -> None:
        self.identity = Identity(name * 32)
        self.directory = Directory(store, identity=self.identity, network=NETWORK, clock=time.time)
        key = self.identity.public_key.hex()
        self.automatic = Automatic(
            self.directory,
            TWELVE,
            key,
            NumericClass("float32"),
            every_s,
            Random(1),
            cast(Proofs, Believing()),
            AutomaticLimits(claim_s=0.01),
        )

    async def announce(self, blocks: Blocks, state: str = "joining", **more: Any) -> None:
        await self.directory.withdraw()
        start, stop = blocks.start, blocks.stop
        await self.directory.announce(announcement(self.identity, start, stop, state=state, automatic=True, **more))


async def test_servers_that_start_at_the_same_moment_cover_the_model(store: MemoryStore) -> None:
    newcomers = [Newcomer(store, name) for name in (b"a", b"b", b"c")]
    chosen = await asyncio.gather(*(newcomer.automatic.first(4, newcomer.announce) for newcomer in newcomers))
    assert sorted(str(blocks) for blocks in chosen) == ["0:4", "4:8", "8:12"]


async def test_a_server_learns_that_it_is_needed_elsewhere(store: MemoryStore) -> None:
    first, second = Newcomer(store, b"a", 0.01), Newcomer(store, b"b", 0.01)
    for newcomer in (first, second):
        await newcomer.announce(Blocks(0, 6), "online")
    goals = [asyncio.create_task(newcomer.automatic.goal()) for newcomer in (first, second)]
    done, pending = await asyncio.wait(goals, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    assert {task.result() for task in done} == {Blocks(6, 12)}
    for task in pending:
        task.cancel()


async def test_a_server_that_is_told_never_to_move_does_not(store: MemoryStore) -> None:
    for name in (b"a", b"b"):
        await Newcomer(store, name).announce(Blocks(0, 6), "online")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await Newcomer(store, b"a", 0.0).automatic.goal()


def test_the_size_of_a_block_is_known_before_any_weight_is_read() -> None:
    checkpoint = open_checkpoint(DEMO_CHECKPOINT)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_span(checkpoint, Blocks(3, 5), dtype=dtype)
        per_block = loaded.weight_bytes / 2
        assert per_block * 0.9 <= block_bytes(checkpoint, dtype) <= per_block


def test_weights_leave_room_for_the_kv_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "free_bytes", lambda device: 1000)
    assert blocks_that_fit(100, torch.device("cpu")) == 6
    assert blocks_that_fit(700, torch.device("cpu")) == 0


async def test_a_server_stays_where_it_is_while_the_directory_is_away():
    """It looks again, and moves when it can say so."""
    goals, made, states = [Blocks(0, 2), Blocks(2, 4)], [], []

    async def goal(_: Blocks) -> Blocks:
        return goals.pop(0)

    async def make(wanted: Blocks) -> None:
        made.append(wanted)
        if len(made) == 1:
            raise Unreachable("the swarm", (), 1.0)

    async def or_stopped(work):
        return await work

    async def drain(_: float) -> None:
        pass

    host = SimpleNamespace(
        _drain_timeout_s=1.0, _goal=goal, _or_stopped=or_stopped, _claims=SimpleNamespace(make=make), _stop=Stop()
    )
    server = SimpleNamespace(
        span=SimpleNamespace(blocks=Blocks(0, 4)), handler=SimpleNamespace(sessions={}, drain=drain)
    )
    assert await _Host._leave(host, server, SimpleNamespace(change=states.append)) == Blocks(2, 4)
    assert made == [Blocks(0, 2), Blocks(2, 4)]
    assert states == ["draining"]  # once: the first time it kept serving
