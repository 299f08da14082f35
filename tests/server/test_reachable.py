"""What a server concludes from its dial-backs. Other nodes' findings are scripted."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.dht.dialback import Answer, DialledBack, Findings
from swarm.errors import TooBusy, Unreachable
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


def reachability(node: FakeNode) -> Reachability:
    moorings = SimpleNamespace(anchors=(), on_change=None, offer=lambda anchors: None)
    traversal: Any = SimpleNamespace(moorings=moorings, caller=SimpleNamespace(host="", port=0))
    fake: Any = node
    listening = Listening(("1.2.3.4:31330",), 31330, 31337)
    return Reachability(fake, SIGNED, traversal, listening, limits=ReachLimits(busy_s=0.0, busy_tries=3))


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
