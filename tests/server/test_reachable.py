"""What a server concludes from its dial-backs. Other nodes' findings are scripted."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from swarm.dht.dialback import Answer, DialledBack, Findings, Offer
from swarm.errors import TooBusy, Unreachable
from swarm.net.address import Tcp, ViaAnchor
from swarm.net.addresses import Change
from swarm.server import reachable
from swarm.server.reachable import Ask, Listening, Reachability, ReachLimits

SIGNED: Any = object()


async def signed() -> Any:
    """Announce a server."""
    return SIGNED


async def never() -> AsyncIterator[Change]:
    """Stay where it is."""
    await asyncio.Event().wait()
    yield Change(())


REACHED, P2P, NEITHER = Answer(answered=("1.2.3.4:31330",)), Answer(p2p=True), Answer()


class FakeNode:
    """Remembers what it is."""

    def __init__(self, neighbours: Sequence[str]) -> None:
        self.history = ""
        self._neighbours = tuple(neighbours)

    async def back(self) -> bool:
        return True

    def neighbours(self) -> tuple[str, ...]:
        return self._neighbours

    async def promote(self) -> None:
        self.history += "+"

    def demote(self) -> None:
        self.history += "-"

    def renew(self, why: str) -> None:
        self.history += "!"


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> list[Answer | Exception]:
    """What the next question gives; the test fills it."""
    script: list[Answer | Exception] = []

    async def ask(*_: object, **__: object) -> Findings:
        given = script.pop(0)
        if isinstance(given, Exception):
            raise given
        return Findings((DialledBack("helper", given),))

    monkeypatch.setattr(reachable, "ask_dial_back", ask)
    return script


def reachability(
    node: FakeNode,
    named: tuple[str, ...] = ("1.2.3.4:31330",),
    changed: Callable[[], AsyncIterator[Change]] = never,
    ask: Ask | None = None,
) -> Reachability:
    moorings = SimpleNamespace(anchors=(), on_change=None, offer=lambda anchors: None, renewals=0)
    moorings.renew = lambda: setattr(moorings, "renewals", moorings.renewals + 1)
    traversal: Any = SimpleNamespace(moorings=moorings, caller=SimpleNamespace(host="", port=0))
    fake: Any = node
    listening = Listening(named, Tcp("0.0.0.0", 31330), 31337)
    limits = ReachLimits(busy_s=0.0, busy_tries=3)
    return Reachability(fake, SIGNED, traversal, listening, changed(), limits=limits, ask=ask)


@pytest.mark.parametrize(
    ("given", "reached", "history"),
    [
        (REACHED, True, ""),  # its libp2p port is tried once it is online
        (NEITHER, False, ""),
        (Unreachable("a node", (), 0.0), True, ""),
    ],
)
async def test_a_server_is_online_if_reached_or_if_none_can_say(
    outcome: list[Answer | Exception], given: Answer | Exception, reached: bool, history: str
) -> None:
    node = FakeNode(["helper"])
    outcome.append(given)
    assert await reachability(node).find(signed) == reached
    assert node.history == history


@pytest.mark.parametrize(("busy", "reached", "left"), [(2, True, 0), (3, False, 1)])
async def test_busy_helpers_are_asked_again(
    outcome: list[Answer | Exception], busy: int, reached: bool, left: int
) -> None:
    outcome += [*[TooBusy("later")] * busy, REACHED]
    assert await reachability(FakeNode(["helper"])).find(signed) == reached
    assert len(outcome) == left


async def test_a_server_without_neighbours_serves_the_dht() -> None:
    node = FakeNode([])
    assert await reachability(node).find(signed)
    assert node.history == "+"


@pytest.mark.parametrize(
    ("given", "known", "history"),
    [
        (P2P, True, "+"),
        (NEITHER, True, "-"),
        (TooBusy("later"), False, ""),
        (Unreachable("a node", (), 0.0), False, ""),
    ],
)
async def test_a_server_serves_the_dht_while_its_libp2p_port_is_reached(
    outcome: list[Answer | Exception], given: Answer | Exception, known: bool, history: str
) -> None:
    node = FakeNode(["helper"])
    outcome.append(given)
    assert await reachability(node)._look(SIGNED) == known
    assert node.history == history


HERE, THERE = "192.0.2.7:31330", "192.0.2.8:31330"
MOVED = Change(("192.0.2.8",), gone=("192.0.2.7",))


@dataclass(slots=True)
class Journey:
    """A server without a named address, which goes from HERE to THERE when it is told to."""

    change: Change = MOVED
    at: str = HERE
    going: asyncio.Event = field(default_factory=asyncio.Event)
    announced: list[tuple[str, ...]] = field(default_factory=list)
    node: FakeNode = field(default_factory=lambda: FakeNode(["helper"]))

    async def changes(self) -> AsyncIterator[Change]:
        await self.going.wait()
        self.at = THERE
        yield self.change
        await asyncio.Event().wait()

    @contextmanager
    def server(self, named: tuple[str, ...] = (), ask: Ask | None = None) -> Iterator[Reachability]:
        """The server, which watches for changes within the block."""
        with patch.object(reachable, "dialled_at", lambda _: (self.at,)):
            reach = reachability(self.node, named, self.changes, ask)
            watching = asyncio.create_task(reach.watch())
            reach.on_change = lambda: self.announced.append(reach.addresses)
            yield reach
            watching.cancel()

    async def go(self) -> None:
        """Move, and let the server notice it."""
        self.going.set()
        await until(lambda: self.announced)


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not what():
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("change", "history"),
    [
        (MOVED, "!"),
        (Change(("192.0.2.8",), 60.0), "!"),
        (Change(("192.0.2.8",)), ""),  # another way out, beside the one before
    ],
)
async def test_connections_are_made_anew_only_where_they_have_died(change: Change, history: str) -> None:
    journey = Journey(change)
    with journey.server() as reach:
        assert reach.addresses == (HERE,)
        await journey.go()
        assert (journey.announced, journey.node.history) == ([(THERE,)], history)
        reach._hidden = True
        moorings: Any = reach._traversal.moorings
        reach._moved(change)
        assert moorings.renewals == len(history)


async def test_a_move_while_the_server_loads_is_noticed(outcome: list[Answer | Exception]) -> None:
    journey, found = Journey(), Answer(answered=(THERE,))
    with journey.server() as reach:
        await journey.go()
        assert reach.offer() is None, "it takes no connections yet"
        outcome.append(found)
        assert await reach.find(signed)
        assert reach.addresses == (THERE,)


async def test_findings_about_the_place_before_do_not_count() -> None:
    journey, asked = Journey(), list[str]()

    async def ask(*_: object, **__: object) -> Findings:
        asked.append(journey.at)
        if len(asked) == 1:
            await journey.go()
            return Findings((DialledBack("helper", Answer(answered=(HERE,))),))
        return Findings((DialledBack("helper", Answer(answered=(journey.at,))),))

    with journey.server(ask=ask) as reach:
        assert not await reach.find(signed)
        await asyncio.wait_for(reach.news(), 1)
        assert await reach.find(signed)
        assert (asked, reach.addresses) == ([HERE, THERE], (THERE,))


async def test_a_named_address_stays_when_the_machine_moves() -> None:
    journey = Journey()
    with journey.server(named=("my.example.org:31330",)) as reach:
        await journey.go()
        assert journey.announced == [("my.example.org:31330",)]
        assert reach.addresses == ("my.example.org:31330",)


@pytest.mark.virtual_clock
async def test_ports_are_tried_again_as_soon_as_the_machine_has_moved(outcome: list[Answer | Exception]) -> None:
    journey, loop = Journey(), asyncio.get_running_loop()
    outcome += [REACHED, NEITHER]
    with journey.server() as reach:
        running = asyncio.create_task(reach.run(lambda: {"a": "record"}))  # type: ignore[arg-type, return-value]
        await asyncio.sleep(10)
        assert len(outcome) == 1
        began = loop.time()
        journey.going.set()
        while outcome:
            await asyncio.sleep(0.1)
        running.cancel()
    assert loop.time() - began < 1


class FakeMoorings:
    """Is moored wherever the test says."""

    def __init__(self) -> None:
        self.anchors: tuple[Any, ...] = ()
        self.on_change: Callable[[], None] = lambda: None
        self.offered = 0

    def offer(self, anchors: Sequence[ViaAnchor]) -> None:
        self.offered += len(anchors)
        if self.offered == len(anchors):
            self.become(*anchors)

    def become(self, *anchors: Any) -> None:
        self.anchors = anchors
        self.on_change()

    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.virtual_clock
async def test_a_hidden_server_without_anchors_asks_until_it_has_some() -> None:
    loop, asked, moorings = asyncio.get_running_loop(), list[float](), FakeMoorings()
    offer = Offer(public_key="ab" * 32, channel_key="cd" * 32, addresses=("1.2.3.4:1", "5.6.7.8:1"))

    async def ask(*_: object, **__: object) -> Findings:
        asked.append(loop.time() - began)
        return Findings((DialledBack("helper", Answer(anchor=offer)),))

    fake: Any = FakeNode(["helper"])
    traversal: Any = SimpleNamespace(moorings=moorings, caller=SimpleNamespace(host="", port=0))
    listening = Listening(("1.2.3.4:31330",), Tcp("0.0.0.0", 31330), 31337)
    reach = Reachability(fake, SIGNED, traversal, listening, never(), ask=ask)
    began, record = loop.time(), object()
    assert await reach.find(signed)
    running = asyncio.create_task(reach.run(lambda: record))  # type: ignore[arg-type, return-value]
    both = moorings.anchors
    for at_s, anchors in ((100, both[:1]), (200, ()), (212, both), (700, ())):
        await asyncio.sleep(began + at_s - loop.time())
        moorings.become(*anchors)
    await asyncio.sleep(1.0)
    running.cancel()
    await reach.close()
    assert asked == pytest.approx([0, 1, 100, 200, 205, 210, 510, 700])
