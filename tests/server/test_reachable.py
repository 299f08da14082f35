"""What a server concludes from its dial-backs. Other nodes' findings are scripted."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.dht.dialback import Answer, DialledBack, Findings, Offer
from swarm.errors import TooBusy, Unreachable
from swarm.net.address import Tcp, ViaAnchor
from swarm.net.addresses import Change, changes
from swarm.server import reachable
from swarm.server.reachable import Listening, Reachability, ReachLimits

SIGNED: Any = None
REACHED, P2P, NEITHER = Answer(answered=("1.2.3.4:31330",)), Answer(p2p=True), Answer()


class FakeNode:
    """Remembers what it is."""

    def __init__(self, neighbours: Sequence[str]) -> None:
        self.history = ""
        self._neighbours = tuple(neighbours)

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
    node: FakeNode, named: tuple[str, ...] = ("1.2.3.4:31330",), changed: Callable[[], AsyncIterator[Change]] = changes
) -> Reachability:
    moorings = SimpleNamespace(anchors=(), on_change=None, offer=lambda anchors: None, renewals=0)
    moorings.renew = lambda: setattr(moorings, "renewals", moorings.renewals + 1)
    traversal: Any = SimpleNamespace(moorings=moorings, caller=SimpleNamespace(host="", port=0))
    fake: Any = node
    listening = Listening(named, Tcp("0.0.0.0", 31330), 31337)
    return Reachability(
        fake, SIGNED, traversal, listening, limits=ReachLimits(busy_s=0.0, busy_tries=3), changed=changed
    )


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
    assert await reachability(node).find(SIGNED) == reached
    assert node.history == history


@pytest.mark.parametrize(("busy", "reached", "left"), [(2, True, 0), (3, False, 1)])
async def test_busy_helpers_are_asked_again(
    outcome: list[Answer | Exception], busy: int, reached: bool, left: int
) -> None:
    outcome += [*[TooBusy("later")] * busy, REACHED]
    assert await reachability(FakeNode(["helper"])).find(SIGNED) == reached
    assert len(outcome) == left


async def test_a_server_without_neighbours_serves_the_dht() -> None:
    node = FakeNode([])
    assert await reachability(node).find(SIGNED)
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


@pytest.mark.parametrize("slept_s", [0.0, 60.0])
async def test_a_server_announces_its_new_addresses_and_looks_again(
    outcome: list[Answer | Exception], monkeypatch: pytest.MonkeyPatch, slept_s: float
) -> None:
    own, announced = ["192.0.2.7"], asyncio.Event()

    async def changed() -> AsyncIterator[Change]:
        own[0] = "192.0.2.8"
        yield Change(("192.0.2.8",), slept_s)
        await asyncio.Event().wait()

    monkeypatch.setattr(reachable, "dialled_at", lambda at: (f"{own[0]}:{at.port}",))
    reach = reachability(FakeNode(["helper"]), (), changed)
    assert reach.addresses == ("192.0.2.7:31330",)
    reach.on_change = announced.set
    outcome.append(REACHED)
    running = asyncio.create_task(reach.run(lambda: SIGNED))
    await asyncio.wait_for(announced.wait(), 2)
    running.cancel()
    assert reach.addresses == ("192.0.2.8:31330",)


async def test_a_hidden_server_that_has_moved_moors_anew(outcome: list[Answer | Exception]) -> None:
    async def changed() -> AsyncIterator[Change]:
        yield Change(("192.0.2.8",), 60.0)
        await asyncio.Event().wait()

    node = FakeNode(["helper"])
    reach = reachability(node, ("1.2.3.4:31330",), changed)
    reach._hidden = True
    announced = asyncio.Event()
    reach.on_change = announced.set
    running = asyncio.create_task(reach.run(lambda: SIGNED))
    await asyncio.wait_for(announced.wait(), 2)
    running.cancel()
    assert (reach._traversal.moorings.renewals, node.history) == (1, "!")


@pytest.mark.virtual_clock
async def test_ports_are_tried_again_as_soon_as_the_machine_has_moved(outcome: list[Answer | Exception]) -> None:
    moved, loop = asyncio.Event(), asyncio.get_running_loop()

    async def changed() -> AsyncIterator[Change]:
        await moved.wait()
        yield Change(("192.0.2.8",))
        await asyncio.Event().wait()

    outcome += [REACHED, NEITHER]
    reach = reachability(FakeNode(["helper"]), changed=changed)
    running = asyncio.create_task(reach.run(lambda: {"a": "record"}))  # type: ignore[arg-type, return-value]
    await asyncio.sleep(10)
    assert len(outcome) == 1
    began = loop.time()
    moved.set()
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

    async def never() -> AsyncIterator[Change]:
        await asyncio.Event().wait()
        yield Change(())

    fake: Any = FakeNode(["helper"])
    traversal: Any = SimpleNamespace(moorings=moorings, caller=SimpleNamespace(host="", port=0))
    listening = Listening(("1.2.3.4:31330",), Tcp("0.0.0.0", 31330), 31337)
    reach = Reachability(fake, SIGNED, traversal, listening, changed=never, ask=ask)
    began, record = loop.time(), object()
    assert await reach.find(SIGNED)
    running = asyncio.create_task(reach.run(lambda: record))  # type: ignore[arg-type, return-value]
    both = moorings.anchors
    for at_s, anchors in ((100, both[:1]), (200, ()), (212, both), (700, ())):
        await asyncio.sleep(began + at_s - loop.time())
        moorings.become(*anchors)
    await asyncio.sleep(1.0)
    running.cancel()
    await reach.close()
    assert asked == pytest.approx([0, 1, 100, 200, 205, 210, 510, 700])
