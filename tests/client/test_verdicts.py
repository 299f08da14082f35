"""The table of verdicts: a row for each rule. No clock, no network; the loop is there for replies that are awaited."""

from dataclasses import asdict, replace

import pytest
import torch

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.session.leg import Leg
from swarm.client.session.standing import Layout
from swarm.client.session.verdicts import (
    DuePiece,
    Ended,
    LetGo,
    RefuseReplies,
    RefuseStep,
    View,
    is_sound,
    judge,
    wrong_coding,
    wrong_output,
    wrong_piece,
    wrong_relay,
)
from swarm.errors import EdgeDown, HopFailed, Refused
from swarm.protocol import messages as wire
from swarm.protocol.outbox import Outbox
from swarm.protocol.tensors import meta_of
from tests.client.test_route import planned, server

SESSION = "0" * 32
HOPS = planned(Blocks(0, 6), [server(0, 2), server(2, 4), server(4, 6)]).hops
FIRST, MIDDLE, LAST = range(3)
EDGES = [(HOPS[index].process, HOPS[index + 1].process) for index in (FIRST, MIDDLE)]


def failed(blame):
    return wire.Failed(session=SESSION, epoch=1, blame=blame, why="it said so")


def refused(code="no_room", step=None, retry_after_ms=1500):
    return wire.Refused(session=SESSION, epoch=1, code=code, step=step, why="full", retry_after_ms=retry_after_ms)


def hop_failed(index, why):
    return HopFailed(HOPS[index].peer_id, str(HOPS[index].blocks), why)


def refusal(index, code="no_room", retry_after_s=1.5):
    return Refused(HOPS[index].peer_id, str(HOPS[index].blocks), code, "full", retry_after_s)


SAYS = f"it said so (says {HOPS[FIRST].peer_id})"
ROWS = {
    "its connection has ended": (Ended("reset"), MIDDLE, {}, hop_failed(MIDDLE, "the connection ended: reset")),
    "it cannot reach the next hop": (failed("next"), FIRST, {}, EdgeDown(EDGES[0], SAYS, blocked=False)),
    "it cannot reach the next hop, and opens": (
        failed("next"),
        FIRST,
        {"awaits": True},
        EdgeDown(EDGES[0], SAYS, blocked=True),
    ),
    "it blames the next hop, and the client relays": (
        failed("next"),
        FIRST,
        {"relayed": {FIRST}},
        hop_failed(FIRST, "it said so"),
    ),
    "it blames the next hop, and another edge is relayed": (
        failed("next"),
        FIRST,
        {"relayed": {MIDDLE}},
        EdgeDown(EDGES[0], SAYS, blocked=False),
    ),
    "it blames the next hop, and is the last": (failed("next"), LAST, {}, hop_failed(LAST, "it said so")),
    "it blames itself": (failed("self"), FIRST, {}, hop_failed(FIRST, "it said so")),
    "it ends a session that had no step for long": (failed("self"), MIDDLE, {"is_idle": True}, LetGo()),
    "it cannot reach the next hop, in an idle session": (
        failed("next"),
        FIRST,
        {"is_idle": True},
        EdgeDown(EDGES[0], SAYS, blocked=False),
    ),
    "its connection has ended, in an idle session": (
        Ended("reset"),
        MIDDLE,
        {"is_idle": True},
        hop_failed(MIDDLE, "the connection ended: reset"),
    ),
    "it calls another hop's activations bad": (
        refused("bad_activations", step=3),
        MIDDLE,
        {"step_waits": True},
        EdgeDown(EDGES[0], "full", blocked=False),
    ),
    "it calls a past bad that another hop has sent": (
        refused("bad_activations"),
        LAST,
        {"stands": False, "awaits": True},
        EdgeDown(EDGES[1], "full", blocked=False),
    ),
    "it calls relayed activations bad": (
        refused("bad_activations", step=3),
        MIDDLE,
        {"relayed": {FIRST}, "step_waits": True},
        hop_failed(MIDDLE, "it refuses sound activations: full"),
    ),
    "it calls activations bad, and another edge is relayed": (
        refused("bad_activations", step=3),
        MIDDLE,
        {"relayed": {MIDDLE}},
        EdgeDown(EDGES[0], "full", blocked=False),
    ),
    "the first hop calls the client's activations bad": (
        refused("bad_activations", step=3),
        FIRST,
        {"step_waits": True},
        RefuseStep(3, refusal(FIRST, "bad_activations")),
    ),
    "it declines what an attempt asks": (
        refused(),
        MIDDLE,
        {"stands": False, "awaits": True},
        RefuseReplies(refusal(MIDDLE)),
    ),
    "it declines for good": (
        refused("draining", retry_after_ms=None),
        MIDDLE,
        {"stands": False, "awaits": True},
        RefuseReplies(refusal(MIDDLE, "draining", None)),
    ),
    "it declines at once": (
        refused(retry_after_ms=0),
        MIDDLE,
        {"stands": False, "awaits": True},
        RefuseReplies(refusal(MIDDLE, retry_after_s=0.0)),
    ),
    "it refuses the session while it stands": (
        refused("no_room"),
        MIDDLE,
        {},
        hop_failed(MIDDLE, "it has lost the session: full"),
    ),
    "it calls a piece of the past malformed that nobody has asked for": (
        refused("bad_request"),
        MIDDLE,
        {},
        EdgeDown(EDGES[0], "full", blocked=False),
    ),
    "the first hop does": (refused("bad_request"), FIRST, {}, hop_failed(FIRST, "it has lost the session: full")),
    "it calls another hop's step malformed": (
        refused("bad_request", step=3),
        LAST,
        {"step_waits": True},
        EdgeDown(EDGES[1], "full", blocked=False),
    ),
    "it calls a step malformed that the client has relayed": (
        refused("bad_request", step=3),
        LAST,
        {"step_waits": True, "relayed": {MIDDLE}},
        RefuseStep(3, refusal(LAST, "bad_request")),
    ),
    "the first hop calls the client's step malformed": (
        refused("bad_request", step=3),
        FIRST,
        {"step_waits": True},
        RefuseStep(3, refusal(FIRST, "bad_request")),
    ),
    "it does not know the session, and an attempt runs": (
        refused("not_yours"),
        MIDDLE,
        {"stands": False},
        hop_failed(MIDDLE, "it has lost the session: full"),
    ),
    "it refuses a part of the past": (refused("busy"), MIDDLE, {"stands": False}, refusal(MIDDLE, "busy")),
    "it refuses the parts behind that one": (refused("bad_request"), MIDDLE, {"stands": False}, None),
    "it refuses a step in flight": (refused(step=3), LAST, {"step_waits": True}, RefuseStep(3, refusal(LAST))),
    "it refuses the session's first message": (
        refused(step=0),
        LAST,
        {"step_waits": True},
        RefuseStep(0, refusal(LAST)),
    ),
    "it refuses a step that has an outcome": (refused(step=3), LAST, {}, None),
    "it lacks the step before": (refused("out_of_order", step=3), LAST, {"step_waits": True}, None),
    "it expects the step from another peer": (refused("not_yours", step=3), LAST, {"step_waits": True}, None),
}


def facts(verdict):
    """Errors are equal only to themselves: compare what they say."""
    return None if verdict is None else (type(verdict), asdict(verdict))


@pytest.mark.parametrize("name", ROWS)
async def test_each_fact_has_its_verdict(name):
    fact, index, given, expected = ROWS[name]
    legs = tuple(Leg(hop) for hop in HOPS)
    if given.get("awaits"):
        legs[index].expect(wire.Opened)
    layout = Layout(1, legs, frozenset(given.get("relayed", ())))
    flags = {key: value for key, value in given.items() if key in {"stands", "is_idle", "step_waits"}}
    assert facts(judge(fact, View(layout, index, **flags))) == facts(expected)


def put(want=2, shape=(1, 5, 4)):
    """A ticket of a step of these activations."""
    return Outbox(SESSION).put(Activations(torch.zeros(shape)), keep=0, rows=None, want=want, budget_ms=1)


def taken_back():
    """A ticket of a step that left and was guessed wrong."""
    outbox = Outbox(SESSION)
    ticket = outbox.put(Activations(torch.zeros(1, 5, 4)), keep=0, rows=None, want=2, budget_ms=1)
    outbox.due()
    outbox.truncate(0)
    return ticket


def answer(*shape, fill=1.0, dtype=torch.float32):
    return Activations(torch.full(shape, fill, dtype=dtype))


OUTPUTS = {
    "what was wanted": (put(), answer(1, 2, 4), None),
    "nothing, as wanted": (put(want=0), None, None),
    "nothing of a step that was taken back": (taken_back(), None, None),
    "too little of such a step": (taken_back(), answer(1, 1, 4), "it answered (1, 1, 4) where (1, 2, 4) is due"),
    "nothing": (put(), None, "it answered None where (1, 2, 4) is due"),
    "more than wanted": (put(), answer(1, 5, 4), "it answered (1, 5, 4) where (1, 2, 4) is due"),
    "something, and nothing was wanted": (put(want=0), answer(1, 2, 4), "it answered (1, 2, 4) where None is due"),
    "no numbers": (put(), answer(1, 2, 4, fill=float("nan")), "its answer is of the wrong type"),
    "infinite ones": (put(), answer(1, 2, 4, fill=float("inf")), "its answer is of the wrong type"),
    "integers": (put(), answer(1, 2, 4, dtype=torch.int64, fill=1), "its answer is of the wrong type"),
}


@pytest.mark.parametrize(("asked", "sent"), [("int8", None), (None, "int8"), ("int8", "int8"), (None, None)])
def test_activations_in_another_coding_than_the_sessions_are_wrong(asked, sent):
    hidden = Activations(torch.zeros(1, 2, 4))
    ticket = Outbox(SESSION, coding=asked).put(hidden, keep=0, rows=None, want=2, budget_ms=1)
    meta = meta_of(hidden.hidden, sent)
    for said in (wrong_output(ticket, hidden, meta), wrong_coding(meta, asked)):
        assert said is None if asked == sent else f"sent as {sent}" in said


@pytest.mark.parametrize("name", OUTPUTS)
def test_each_output_has_its_verdict(name):
    ticket, activations, wrong = OUTPUTS[name]
    said = wrong_output(ticket, activations)
    assert said is None if wrong is None else said.startswith(wrong)


RELAYS = {
    "a step": (answer(1, 5, 4), put(), True),
    "a skipped step that was taken back": (None, taken_back(), True),
    "a skipped step that was not": (None, put(), False),
    "a step of another shape": (answer(1, 4, 4), put(), False),
    "a step without numbers": (answer(1, 5, 4, fill=float("nan")), put(), False),
}


@pytest.mark.parametrize("name", RELAYS)
def test_each_relayed_step_has_its_verdict(name):
    activations, ticket, is_sent = RELAYS[name]
    assert (wrong_relay(activations, ticket) is None) == is_sent


PIECES = {
    "the next one": (answer(2, 9, 4), {}, True),
    "one that came before": (answer(2, 9, 4), {"start": 3}, True),
    "the last one": (answer(2, 1, 4), {"start": 13}, True),
    "one behind the next": (answer(2, 8, 4), {"start": 6}, False),
    "one that goes on behind the end": (answer(2, 10, 4), {}, False),
    "of a longer past": (answer(2, 9, 4), {"total": 15}, False),
    "for more hops": (answer(2, 9, 4), {"hops": 3}, False),
    "of other rows": (answer(3, 9, 4), {}, False),
    "of another width": (answer(2, 9, 5), {}, False),
    "of no rows and columns": (answer(9, 4), {}, False),
    "without activations": (None, {}, False),
    "without numbers": (answer(2, 9, 4, fill=float("inf")), {}, False),
    "of integers": (answer(2, 9, 4, dtype=torch.int32, fill=1), {}, False),
}


@pytest.mark.parametrize("name", PIECES)
def test_each_relayed_piece_of_a_past_has_its_verdict(name):
    activations, differs, is_sent = PIECES[name]
    start, due = 5, DuePiece(start=13 if name == "the last one" else 5, total=14, hops=2, rows=2, width=4)
    told = {"start": start, "total": 14, "hops": 2, "hidden": meta_of(answer(2, 9, 4).hidden), **differs}
    piece = wire.Rebuild(session=SESSION, epoch=1, **told)
    assert (wrong_piece(piece, activations, due) is None) == is_sent
    assert (wrong_piece(piece, activations, replace(due, width=0)) is None) == (is_sent or name == "of another width")


@pytest.mark.parametrize(
    ("hidden", "sound"),
    [
        (torch.ones(3), True),
        (torch.ones(3, dtype=torch.bfloat16), True),
        (torch.full((3,), 3e38), True),  # their sum is infinite
        (torch.tensor([1.0, float("inf")]), False),
        (torch.tensor([1, 2]), False),
    ],
)
def test_sound_activations_are_finite_floats(hidden, sound):
    assert is_sound(Activations(hidden)) is sound
