"""The order of the gates: of several reasons to refuse a message the first one wins."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.protocol.inbox import Again, Forgotten
from swarm.protocol.messages import Open, Rebuild, Step
from swarm.protocol.replay import Twice
from swarm.protocol.tensors import meta_of
from swarm.server.accounts import Accounts
from swarm.server.gates import REBUILD_GATES, STEP_GATES, Facts, Gate, Gates, Stop, Stray
from swarm.server.holdings import Holdings, Memory
from swarm.server.limits import HostedLimits, MemoryLimits
from swarm.server.pool import Pool
from swarm.server.refusals import Declined
from swarm.server.session import Answer, HostedSession

OWNER, STRANGER = "1" * 46, "2" * 46
NAME, WIDTH, NOW = "0" * 32, 8, 100.0
AFTER_STEP = 20
LIMITS = HostedLimits()
SPAN = SimpleNamespace(blocks=Blocks(0, 1), hidden_size=WIDTH, traits=SimpleNamespace(positions_max=None))


def session(**changes: object) -> HostedSession:
    """One that its owner has opened, behind AFTER_STEP, with two rows of three positions."""
    names = {"root": "a" * 64, "numeric_class": "float32", "start": 0, "stop": 1}
    request = Open(
        **names, session=NAME, epoch=1, positions_max=10, rollback_max=1, after_step=AFTER_STEP, lifetime_s=60
    ).model_copy(update=changes)
    owner = SimpleNamespace(peer=OWNER, unsent_bytes=0, is_paused=False)
    hosted = HostedSession(request, owner, SPAN, holdings(), LIMITS, NOW)
    hosted.rows, hosted.length = 2, 3
    return hosted


def indebted() -> Accounts:
    accounts = Accounts()
    accounts.of(OWNER).steps.owe(NOW + 1000.0, 1e9)
    return accounts


def holdings(**limits: int) -> Holdings:
    request = Open(
        session=NAME, epoch=1, root="a" * 64, numeric_class="x", start=0, stop=1, positions_max=9, rollback_max=0
    )
    return Holdings(Memory.of(Pool(900), limits=MemoryLimits(**limits)), request, OWNER, 1.0)


@dataclass
class Case:
    """A session and a message for it, in which everything is wrong until it is made good."""

    hosted: HostedSession = field(default_factory=lambda: session(rebuild=True, tokens_max=1))
    peer: str = STRANGER
    now: float = NOW + 1000.0
    accounts: Accounts = field(default_factory=indebted)
    hidden: Tensor = field(default_factory=lambda: torch.zeros(3))
    message: dict[str, object] = field(default_factory=dict)

    def stopped_by(self, gates: tuple[Gate, ...], kind: type[Step | Rebuild]) -> tuple[str, Stop] | None:
        """Return the name of the first gate that stops the message, and why."""
        names = {"session": NAME, "epoch": 1, "hidden": meta_of(self.hidden)}
        activations = Activations(self.hidden)
        facts = Facts(
            SimpleNamespace(peer=self.peer),
            kind.model_validate({**names, **self.message}),
            activations,
            self.now,
            self.accounts,
            LIMITS,
        )
        for gate in gates:
            if (stop := gate.check(self.hosted, facts)) is not None:
                return gate.name, stop
        return None


def from_owner(case: Case) -> None:
    case.peer = OWNER


def not_long_past(case: Case) -> None:
    case.message["step"] = 100


def all_read(case: Case) -> None:
    case.hosted.peers.owner = SimpleNamespace(peer=OWNER, unsent_bytes=0)


def in_time(case: Case) -> None:
    case.now = NOW
    case.message["budget_ms"] = 1000


def with_credit(case: Case) -> None:
    case.accounts = Accounts()


def in_order(case: Case) -> None:
    whole, case.message["step"] = session(tokens_max=1), AFTER_STEP + 1
    case.hosted.receiver = whole.receiver


def three_dimensions(case: Case) -> None:
    case.hidden = torch.zeros(3, 4, WIDTH)


def same_rows(case: Case) -> None:
    case.hidden = torch.zeros(2, 4, WIDTH)


def fitting_positions(case: Case) -> None:
    case.message |= {"keep": 3, "want": 1}


def more_tokens(case: Case) -> None:
    case.hosted.seat = replace(case.hosted.seat, grant=replace(case.hosted.seat.grant, tokens=None))


def more_memory(case: Case) -> None:
    case.hosted.holdings = holdings()


STEPS: dict[str, Callable[[Case], None]] = {
    "seat": from_owner,
    "repeated": not_long_past,
    "unread": all_read,
    "time": in_time,
    "account": with_credit,
    "order": in_order,
    "tensors": three_dimensions,
    "rows": same_rows,
    "positions": fitting_positions,
    "tokens": more_tokens,
    "memory": more_memory,
}


def wrong_step() -> Case:
    case = Case(message={"step": 1, "keep": 1, "budget_ms": 0, "want": 9})
    case.hosted.peers.owner = SimpleNamespace(peer=OWNER, unsent_bytes=LIMITS.unread_bytes_max + 1)
    case.hosted.holdings = holdings(input_bytes_max=0, window_bytes_max=0)
    return case


def test_the_gates_of_steps_are_these_in_this_order():
    assert [gate.name for gate in STEP_GATES] == list(STEPS)


@pytest.mark.parametrize("repaired", range(len(STEPS) + 1))
def test_the_first_gate_that_a_step_fails_stops_it(repaired):
    case = wrong_step()
    for repair in list(STEPS.values())[:repaired]:
        repair(case)
    stopped = case.stopped_by(STEP_GATES, Step)
    assert (stopped and stopped[0]) == [*STEPS, None][repaired]


def whole_piece(case: Case) -> None:
    case.message |= {"start": 0, "total": 4}


def window_only(case: Case) -> None:
    case.hosted.holdings = holdings(input_bytes_max=0)


PIECES: dict[str, Callable[[Case], None]] = {
    "seat": from_owner,
    "twice": lambda case: case.message.update(start=3),
    "time": in_time,
    "debt": with_credit,
    "tensors": same_rows,
    "place": whole_piece,
    "window": window_only,
    "tokens": more_tokens,
    "memory": more_memory,
}


def test_the_gates_of_pieces_are_these_in_this_order():
    assert [gate.name for gate in REBUILD_GATES] == list(PIECES)


@pytest.mark.parametrize("repaired", range(len(PIECES) + 1))
def test_the_first_gate_that_a_piece_fails_stops_it(repaired):
    case = wrong_step()
    case.message = {"start": 0, "total": 99, "hops": 1}
    if repaired <= 1:  # what was accepted before comes again
        case.hosted.receiver = session().receiver
    for repair in list(PIECES.values())[:repaired]:
        repair(case)
    stopped = case.stopped_by(REBUILD_GATES, Rebuild)
    assert (stopped and stopped[0]) == [*PIECES, None][repaired]


def test_each_kind_of_stop_says_what_follows():
    case = Case(session(), now=NOW, accounts=Accounts(), hidden=torch.zeros(2, 1, WIDTH))
    case.message = {"step": AFTER_STEP + 1, "keep": 3, "budget_ms": 9, "want": 1}
    assert isinstance(case.stopped_by(STEP_GATES, Step)[1], Stray)
    case.peer = OWNER
    assert case.stopped_by(STEP_GATES, Step) is None
    answer = Answer(SimpleNamespace(step=AFTER_STEP + 1), None)
    case.hosted.inbox.accept(AFTER_STEP + 1)
    assert case.stopped_by(STEP_GATES, Step) == (
        "repeated",
        Declined("out_of_order", f"step {AFTER_STEP + 1} is still being computed"),
    )
    case.hosted.inbox.computed(AFTER_STEP + 1, answer, 0, lambda _: True)
    assert case.stopped_by(STEP_GATES, Step) == ("unread", Again(answer, in_journal=False))
    case.message["step"] = AFTER_STEP
    name, forgotten = case.stopped_by(STEP_GATES, Step)
    assert (name, type(forgotten)) == ("repeated", Forgotten)
    case.message = {"start": 0, "total": 4, "hops": 1}
    assert isinstance(case.stopped_by(REBUILD_GATES, Rebuild)[1], Twice)


def test_another_check_takes_a_gates_place_in_both_lists():
    closed = Declined("busy", "closed")
    gates = Gates().replaced("seat", lambda *_: closed)
    case = Case()
    case.message = {"step": 1, "keep": 0, "budget_ms": 0, "want": 0}
    assert case.stopped_by(gates.step, Step) == ("seat", closed)
    case.message = {"start": 0, "total": 1, "hops": 1}
    assert case.stopped_by(gates.rebuild, Rebuild) == ("seat", closed)


def test_a_step_counts_as_many_tokens_as_its_bytes_are_worth():
    message = Step.model_validate({"session": NAME, "epoch": 1, "step": 1, "keep": 0, "budget_ms": 1, "want": 1})
    for shape, tokens in (((2, 3, 64), 6), ((1, 6400, 1), 100), ((1, 1, 4096), 1)):
        activations = Activations(torch.zeros(shape, dtype=torch.uint8))
        assert Facts(None, message, activations, NOW, None, LIMITS, 64).n_tokens == tokens
