"""The recovery table: a row for each rule. No loop, no clock, no network."""

from dataclasses import replace

import pytest

from swarm.client.session.limits import RecoveryLimits
from swarm.client.session.recovery import (
    Attempt,
    Avoid,
    Block,
    Case,
    Defer,
    Fail,
    MoveAway,
    Patience,
    Queue,
    RefusedStep,
    Renew,
    Wait,
    after_refusal,
    blame,
    decide,
)
from swarm.errors import EdgeDown, HopFailed, NoRoute, Refused

LIMITS = RecoveryLimits()
BEGAN, DEADLINE = 100.0, 200.0
NOBODY = NoRoute("model", (4, 5), "their holders have failed")
ADRIFT = NoRoute("model", (4, 5), "no anchor leads to them", passing=True)
BROKEN = HopFailed("a", "0:4", "the connection ended")
EDGE = EdgeDown(("a", "b"), "nothing comes through", blocked=True)


def refused(code="no_room", retry_after_s=2.0):
    return Refused("b", "4:8", code, "full", retry_after_s)


def case(**facts):
    patience = facts.pop("patience", Patience(BEGAN, DEADLINE, holders_s=0.0, room_s=7.0))
    stuck_at, asked = facts.pop("stuck_at", BEGAN), facts.pop("asked", False)
    given = Case(**({"patience": patience, "is_new": False} | facts))
    if given.no_route is not None:
        given = replace(given, asked=asked).stuck(given.no_route, stuck_at)
    return given


PATIENT = Patience(BEGAN, DEADLINE, holders_s=60.0, room_s=7.0)
PAUSE_S = LIMITS.wait_first_s
DECISIONS = {
    "a fault: try without the process": (case(last=BROKEN, without=frozenset("a")), Attempt(frozenset("a"), False)),
    "a fault of an edge: try with the same hops": (case(last=EDGE), Attempt(frozenset(), False)),
    "cut off: only ask": (case(last=BROKEN, cut_off=True), Attempt(frozenset(), True)),
    "a new session: try": (case(is_new=True), Attempt(frozenset(), False)),
    "a new session in a crowd: queue": (case(is_new=True, crowded=True), Queue(None)),
    "an old session in a crowd: try": (case(crowded=True), Attempt(frozenset(), False)),
    "a new session in a crowd, with its turn: try": (
        case(is_new=True, crowded=True, has_turn=True),
        Attempt(frozenset(), False),
    ),
    "busy with the past: wait, holding on": (case(busy=refused("busy", 0.7)), Wait(0.7, for_room=True)),
    "busy with the past, no time given: wait the least": (
        case(busy=refused("busy", None)),
        Wait(LIMITS.ask_s, for_room=True),
    ),
    "busy with the past, a new session: hold on": (case(is_new=True, busy=refused("busy")), Wait(1.0, for_room=True)),
    "no holder, full: wait, holding on": (case(no_route=NOBODY, last=refused()), Wait(1.0, for_room=True)),
    "no holder, full soon again: wait the least": (
        case(no_route=NOBODY, last=refused(retry_after_s=0.1)),
        Wait(LIMITS.ask_s, for_room=True),
    ),
    "no holder, full, held long: give back": (
        case(no_route=NOBODY, last=refused(), patience=Patience(BEGAN - 8.0, DEADLINE, 0.0, 7.0)),
        Wait(1.0, give_back=True, for_room=True),
    ),
    "no holder, busy, held long: hold on": (
        case(no_route=NOBODY, last=refused("busy"), patience=Patience(BEGAN - 8.0, DEADLINE, 0.0, 7.0)),
        Wait(1.0, for_room=True),
    ),
    "no holder, full, new: queue": (case(is_new=True, no_route=NOBODY, last=refused()), Queue(refused())),
    "no holder, full, new, with its turn: hold nothing": (
        case(is_new=True, has_turn=True, no_route=NOBODY, last=refused()),
        Wait(1.0, give_back=True, for_room=True),
    ),
    "no holder, full, the deadline is near: its refusal": (
        case(no_route=NOBODY, last=refused(), patience=Patience(BEGAN, BEGAN + 1.0, 60.0, 7.0)),
        Fail(refused()),
    ),
    "no holder, a hop leaves: no holder": (
        case(no_route=NOBODY, last=refused("draining", None)),
        Fail(NoRoute("model", (4, 5), f"no server can take over: {NOBODY.why} ({refused('draining', None)})")),
    ),
    "no holder, some failed: ask them again": (
        case(no_route=NOBODY, last=BROKEN, without=frozenset("a")),
        Wait(PAUSE_S),
    ),
    "no holder, the user is patient: wait": (case(no_route=NOBODY, patience=PATIENT), Wait(PAUSE_S)),
    "no holder, the third time: wait longer": (
        case(no_route=NOBODY, patience=PATIENT, waits=2),
        Wait(4 * PAUSE_S),
    ),
    "no holder, the hundredth time: wait the most": (
        case(no_route=NOBODY, patience=PATIENT, waits=16),
        Wait(LIMITS.wait_most_s),
    ),
    "no holder, was cut off lately: ask again": (
        case(no_route=NOBODY, last=BROKEN, cut_off_at=BEGAN - 1.0, patience=Patience(BEGAN - 99.0, DEADLINE, 0.0, 7.0)),
        Wait(PAUSE_S),
    ),
    "no holder, the search took long: ask them again": (
        case(
            no_route=NOBODY,
            last=BROKEN,
            without=frozenset("a"),
            patience=Patience(BEGAN - LIMITS.holders_s - 1.0, DEADLINE, 0.0, 7.0),
        ),
        Wait(PAUSE_S),
    ),
    "no holder, an anchor is missing: wait": (case(no_route=ADRIFT), Wait(PAUSE_S)),
    "no holder, some had failed before the last wait: ask again": (
        case(no_route=NOBODY, last=BROKEN, asked=True),
        Wait(PAUSE_S),
    ),
    "no holder, asked for long: no holder can take over": (
        case(
            no_route=NOBODY,
            last=BROKEN,
            without=frozenset("a"),
            stuck_at=BEGAN - LIMITS.holders_s - 1.0,
        ),
        Fail(NoRoute("model", (4, 5), f"no server can take over: {NOBODY.why} ({BROKEN})")),
    ),
    "no holder, no fault: no route": (case(no_route=NOBODY), Fail(NOBODY)),
    "no holder, new, a fault: the fault of the only holder": (
        case(is_new=True, no_route=NOBODY, last=BROKEN),
        Fail(BROKEN),
    ),
    "no holder, new, an edge: no route": (case(is_new=True, no_route=NOBODY, last=EDGE), Fail(NOBODY)),
}


def same(one, other):
    """Errors are equal only to themselves: compare what they say."""
    if isinstance(one, Fail | Queue) and type(one) is type(other):
        left, right = (each.error if isinstance(each, Fail) else each.full for each in (one, other))
        return type(left) is type(right) and str(left) == str(right)
    return one == other


@pytest.mark.parametrize("name", DECISIONS)
def test_each_case_has_its_action(name):
    given, action = DECISIONS[name]
    assert same(decide(given, BEGAN, LIMITS), action)


def test_a_wait_for_blocks_may_have_any_number_of_pauses():
    given = case(no_route=NOBODY, patience=PATIENT)
    for _ in range(1200):  # 2.0 ** 1200 would be no number
        action = decide(given, BEGAN, LIMITS)
        given = given.done(action).stuck(NOBODY, BEGAN)
    assert action == Wait(LIMITS.wait_most_s)


def test_a_wait_ends_before_the_deadline_or_fails():
    full = case(no_route=NOBODY, last=refused())
    assert isinstance(decide(full, DEADLINE - 1.01, LIMITS), Wait)
    assert isinstance(decide(full, DEADLINE - 1.0, LIMITS), Fail)


def test_patience_counts_from_when_the_connection_was_back():
    back = case(no_route=NOBODY, without=frozenset("a"), cut_off_at=BEGAN + 50.0)
    assert isinstance(decide(back, BEGAN + 50.0 + LIMITS.holders_s - 0.1, LIMITS), Wait)
    assert isinstance(decide(back, BEGAN + 50.0 + LIMITS.holders_s + 0.1, LIMITS), Fail)


def learn(given, fault, process="a", has_past=False):
    return given.learned(fault, process, has_past=has_past, limits=LIMITS)


def test_faults_add_up_until_the_next_wait_for_a_holder():
    given = learn(learn(case(), BROKEN, "a"), refused(), "b")
    assert given.without == {"a", "b"}
    assert given.last.peer == "b"
    stuck = given.stuck(NOBODY, BEGAN)
    assert stuck.asked
    assert stuck.done(Wait(1.0, for_room=True)) == replace(stuck, without=frozenset(), no_route=None)
    assert stuck.done(Wait(1.0)) == replace(stuck, without=frozenset(), no_route=None, waits=1)


def test_waits_may_be_as_many_as_the_user_is_patient():
    given = case(no_route=NOBODY, patience=Patience(BEGAN, DEADLINE, holders_s=1e9, room_s=7.0))
    for number in range(3000):
        action = decide(given, BEGAN + number, LIMITS)
        given = given.done(action).stuck(NOBODY, BEGAN)
    assert action == Wait(LIMITS.wait_most_s)


def test_an_edge_takes_no_process_away():
    assert learn(case(), EDGE).without == frozenset()


def test_busy_hop_with_the_past_is_waited_for_and_kept():
    busy = learn(learn(case(), BROKEN), refused("busy"), "b", has_past=True)
    assert busy.busy is busy.last
    assert busy.without == {"a"}
    assert busy.done(Wait(1.0, for_room=True)) == replace(busy, busy=None)


def test_a_hop_that_is_always_busy_is_replaced_in_the_end():
    busy = case()
    for _ in range(LIMITS.busy_max):
        assert busy.bears_busy(LIMITS)
        busy = learn(busy, refused("busy"), "b", has_past=True).done(Wait(1.0, for_room=True))
    assert not busy.bears_busy(LIMITS)
    assert learn(busy, refused("busy"), "b", has_past=False).without == {"b"}


@pytest.mark.parametrize(
    ("fault", "has_past"),
    [
        (refused("busy"), False),
        (refused("busy", LIMITS.held_s + 1.0), True),
        (refused("no_room"), True),
    ],
    ids=["it has no past", "it is busy for long", "it has no room"],
)
def test_other_refusals_take_the_process_away(fault, has_past):
    declined = learn(case(), fault, "b", has_past=has_past)
    assert declined.busy is None
    assert declined.without == {"b"}


def test_a_turn_is_taken_once():
    queued = case(is_new=True, crowded=True).done(Queue(None))
    assert (queued.crowded, queued.has_turn) == (False, True)


def test_a_connection_that_is_back_forgives_all():
    lost = learn(case(), BROKEN).seen(cut_off=True, now=130.0)
    assert (lost.cut_off, lost.cut_off_at) == (True, 130.0)
    found = lost.seen(cut_off=False, now=140.0)
    assert (found.cut_off, found.cut_off_at) == (False, 130.0)
    assert found.forgiven().without == frozenset()


BLAMES = {
    "a failure": (BROKEN, {}, Avoid("a")),
    "a refusal with a time": (refused("no_room", 3.0), {}, Defer("a", 3.0)),
    "a refusal without a time": (refused("draining", None), {}, Defer("a", LIMITS.declined_s)),
    "a busy hop with the past": (refused("busy"), {"has_past": True}, None),
    "a busy hop without the past": (refused("busy"), {}, Defer("a", 2.0)),
    "a blocked edge": (EDGE, {}, Block(("a", "b"))),
    "an edge that broke": (EdgeDown(("a", "b"), "it ended", blocked=False), {}, None),
    "an edge that broke again": (
        EdgeDown(("a", "b"), "it ended", blocked=False),
        {"was_reconnected": True},
        Block(("a", "b")),
    ),
}


@pytest.mark.parametrize("name", BLAMES)
def test_each_fault_has_its_blame(name):
    fault, facts, expected = BLAMES[name]
    assert blame(fault, "a", **({"has_past": False, "was_reconnected": False} | facts), limits=LIMITS) == expected


STEP = RefusedStep(Patience(BEGAN, DEADLINE, holders_s=0.0, room_s=7.0))
SOON, LATE = BEGAN + 1.0, DEADLINE - LIMITS.late_s + 0.1
REFUSALS = {
    "the grant is over": (STEP, refused("grant_over", None), SOON, Renew()),
    "the grant is over again": (
        replace(STEP, renewed=True),
        refused("grant_over", None),
        SOON,
        MoveAway(frozenset("b")),
    ),
    "impossible": (STEP, refused("bad_request", None), SOON, MoveAway(frozenset("b"))),
    "impossible, and no other hop": (replace(STEP, alone=True), refused("bad_request", None), SOON, Fail),
    "impossible, says a second hop": (replace(STEP, unable=frozenset("a")), refused("bad_request", None), SOON, Fail),
    "never room, says a second hop": (
        replace(STEP, unable=frozenset("a")),
        refused("no_room", None),
        SOON,
        MoveAway(frozenset("ab")),
    ),
    "too late, and it is not": (STEP, refused("too_late", None), SOON, MoveAway(frozenset("b"))),
    "too late, and it is not, says a second hop": (
        replace(STEP, unable=frozenset("a")),
        refused("too_late", None),
        SOON,
        MoveAway(frozenset("ab")),
    ),
    "impossible, shortly before the deadline": (STEP, refused("bad_request", None), LATE, MoveAway(frozenset("b"))),
    "too late": (STEP, refused("too_late", None), LATE, Fail),
    "no room": (STEP, refused(), SOON, Wait(LIMITS.room_s, for_room=True)),
    "no room for a moment": (STEP, refused(retry_after_s=0.3), SOON, Wait(0.3, for_room=True)),
    "no room again": (replace(STEP, waited=True), refused(), SOON, MoveAway(frozenset("b"))),
    "no room again, and no other hop": (
        replace(STEP, waited=True, alone=True),
        refused(),
        SOON,
        Wait(2.0, for_room=True),
    ),
    "no room, held long": (STEP, refused(), BEGAN + 8.0, Wait(LIMITS.room_s, give_back=True, for_room=True)),
    "busy, held long": (STEP, refused("busy"), BEGAN + 8.0, Wait(LIMITS.room_s, for_room=True)),
    "no room before the deadline": (STEP, refused(), DEADLINE - 0.5, Fail),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_each_refused_step_has_its_action(name):
    step, refusal, now, expected = REFUSALS[name]
    action = after_refusal(step, refusal, "b", now, LIMITS)
    if expected is Fail:
        assert action == Fail(refusal)
    else:
        assert action == expected


def test_a_refused_step_remembers_its_actions():
    assert STEP.done(Renew(), refused("grant_over", None)).renewed
    waited = STEP.stays_alone().done(Wait(1.0), refused())
    assert (waited.waited, waited.alone) == (True, False)
    assert STEP.done(MoveAway(frozenset("ab")), refused("bad_request", None)).unable == {"a", "b"}
    assert STEP.done(MoveAway(frozenset("b")), refused()).unable == frozenset()
