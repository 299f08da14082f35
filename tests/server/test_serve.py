"""The life of `swarm-serve` around its server: from one span to the next, and while the swarm cannot be reached."""

import asyncio
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.commands import Stop
from swarm.dht.directory import Directory
from swarm.dht.store import MemoryStore
from swarm.errors import RecordError, SwarmError, Unreachable
from swarm.identity import Identity
from swarm.net.address import Tcp
from swarm.net.endpoint import Endpoint
from swarm.net.listener import Listener
from swarm.net.noise import ChannelKey
from swarm.server.announcer import Announcer
from swarm.server.arguments import SpanArguments
from swarm.server.claims import Claims
from swarm.server.loader import Loaded, Loader
from swarm.server.reachable import Listening, Reachability
from swarm.server.serve import _Host
from swarm.server.server import ServerOptions
from tests.dht.support import announcement
from tests.server.sites import FIRST, NETWORK, SECOND
from tests.server.sites import Loaded as LoadedOnce
from tests.server.test_reachable import FakeNode, never, reachability
from tests.support.ways import unhidden


class Noting(Loader):
    """Loads, and looks which of the spans before are still there."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spans: list[weakref.ref[Any]] = []
        self.held: list[list[Blocks]] = []

    def load_now(self, blocks: Blocks) -> Loaded:
        self.held.append([span.blocks for ref in self.spans if (span := ref()) is not None])
        loaded = super().load_now(blocks)
        self.spans.append(weakref.ref(loaded.span))
        return loaded


class Goals:
    """The choices of a server: its first span, those that it moves to, and then its end."""

    def __init__(self, stop: Stop, *spans: Blocks) -> None:
        self._stop, self._spans = stop, list(spans)

    async def first(self, *_: object) -> Blocks:
        return self._spans.pop(0)

    async def goal(self) -> Blocks:
        if not self._spans:
            self._stop.ask(asyncio.current_task())
            await asyncio.Event().wait()
        return self._spans.pop(0)

    async def close(self) -> None:
        pass


@pytest.fixture
async def host(loaded: LoadedOnce) -> _Host:
    """A server of FIRST that moves to SECOND and back, and ends. Its swarm is in memory."""
    identity, checkpoint, stop = Identity.generate(), loaded.checkpoint, Stop()
    me = Endpoint(identity, ChannelKey(), NETWORK)
    traversal = unhidden(me, Listener(me, "127.0.0.1", 0))
    store = MemoryStore.make(NETWORK, time.time)
    directory = Directory(store, identity=identity, network=NETWORK, clock=time.time)
    node: Any = FakeNode([])
    node.peer_id, node.addresses = identity.peer_id, ()
    listening = Listening((), Tcp("127.0.0.1", traversal.listener.address.port), 0)
    plain = SpanArguments(
        blocks="auto", num_blocks=3, device="cpu", dtype="float32", quantize="none", quantize_cache="off",
        threads=1, cache_tokens=200, cache_memory=None,
    )  # fmt: skip
    host = _Host.__new__(_Host)
    vars(host).update(
        _traversal=traversal,
        _reach=Reachability(node, me, traversal, listening, never()),
        _node=node,
        _ready=lambda _: None,
        _stop=stop,
        _drain_timeout_s=1.0,
        _metrics=None,
        _root_is_pinned=True,
        _loader=Noting(plain, checkpoint, loaded.spans[FIRST].device),
        _length=3,
        _claims=Claims(directory, checkpoint, me, NumericClass("float32"), ServerOptions(cache_tokens=0, threads=1)),
        _automatic=Goals(stop, FIRST, SECOND, FIRST),
    )
    return host


async def test_a_server_that_moves_lets_its_span_go_before_it_loads_the_next(host: _Host):
    async with asyncio.timeout(60):
        await host.run(None)
    assert host._loader.held == [[], [], []]


class Failing:
    """A directory that fails once, at its `at`-th announcement."""

    latest = None

    def __init__(self, at: int, error: SwarmError) -> None:
        self.states: list[str] = []
        self._at, self._error = at, error

    async def announce(self, announcement: Any) -> Any:
        self.states.append(announcement.state)
        if len(self.states) == self._at:
            raise self._error
        return SimpleNamespace(replicas=1, signed=announcement)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("error", [Unreachable("the swarm", (), 20.0), RecordError("size")], ids=["away", "too large"])
@pytest.mark.parametrize("at", [1, 2, 3])
async def test_a_server_outlives_an_announcement_that_fails(at: int, error: SwarmError):
    """The first one finds out how the server is reached, the second says that it is online, the third goes on so."""
    told: list[Any] = []
    server: Any = SimpleNamespace(
        announcement=lambda state: announcement(Identity(b"a" * 32), state=state),
        measure=lambda: asyncio.sleep(0),
        round_trips=SimpleNamespace(run=lambda *_: asyncio.Event().wait()),
    )
    directory: Any = Failing(at, error)
    host: Any = SimpleNamespace(_reach=reachability(FakeNode([])), _tell=told.append)
    living = asyncio.create_task(_Host._live(host, Announcer(directory, server.announcement), server, None))
    await asyncio.wait((living,), timeout=120.0)
    assert not living.done(), living.exception()
    assert told == [server]
    assert set(directory.states[-3:]) == {"online"}
    living.cancel()
