"""The decisions of a session whose route does not stand, or whose step a hop refuses.

Pure: a case goes in, an action comes out.

A *case* is one recovery, from the first fault until the route stands. Its owner reports faults with `learned`, asks
`decide`, and carries out the action:

    Queue      wait for one of the client's few turns to ask full hops; other new sessions have them
    Attempt    plan hops without some processes, open them, replay the past (swarm.client.session.attempt)
    Wait       sleep, perhaps without holding anything on any hop, then ask again
    Fail       the session ends with this error

The rules, in the order in which `decide` tries them:

    a new session, other new sessions ask full hops                    -> Queue
    a hop with all of the past is busy for a moment                    -> Wait: others would need the past first
    no attempt has failed since the last fault                         -> Attempt
    no holder is left, the last one refused with a time
        a new session without a turn                                   -> Queue, holding nothing
        the time ends behind the step's deadline                       -> Fail with its refusal
        else                                                           -> Wait, holding nothing if the session is new or
                                                                          has held its room for long
    no holder is left, and there is patience                           -> Wait, twice as long each time
    no holder is left                                                  -> Fail

tests/client/test_recovery.py has a row for each rule.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

from swarm.client.session.limits import RecoveryLimits
from swarm.client.session.standing import Edge
from swarm.errors import EdgeDown, HopFailed, NoRoute, Refused, SwarmError

Fault: TypeAlias = HopFailed | Refused | EdgeDown


@dataclass(frozen=True, slots=True)
class Queue:
    """Wait for a turn among the client's new sessions, and hold nothing meanwhile. full: the refusal to fail with."""

    full: Refused | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """Try to make a route stand without these processes. ask_only: open it, and leave it again."""

    without: frozenset[str]
    ask_only: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Sleep. give_back: leave all hops first. for_room: hops lack room, so that fewer steps are to be in flight."""

    for_s: float
    give_back: bool = False
    for_room: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """End with this error."""

    error: SwarmError


Action: TypeAlias = Queue | Attempt | Wait | Fail


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a session waits. Times are the loop's, in seconds.

    deadline: of the step. holders_s: for a holder of blocks that no server announces. room_s: while the session holds
    its room and waits for more.
    """

    began: float
    deadline: float
    holders_s: float
    room_s: float

    def gives_back(self, full: Refused, now: float) -> bool:
        """Whether the session gives its room back while it waits for more: other sessions may wait for that."""
        return full.code == "no_room" and now - self.began > self.room_s


@dataclass(frozen=True, slots=True)
class Case:
    """One recovery.

    is_new: no step was answered yet. crowded: the client's other new sessions ask full hops. has_turn: to ask them.
    without: processes that failed or declined since the last wait. last: the last fault. busy: a hop that has all of
    the past, and takes no new neighbours for a moment; busy_times: how often one was. no_route: the error of an attempt
    that found no holder. stuck_at: when one first found none. asked: holders have failed, and are asked again. cut_off:
    no peer can be reached, so nothing is held against any; cut_off_at: the last time that it was so.
    """

    patience: Patience
    is_new: bool
    crowded: bool = False
    has_turn: bool = False
    without: frozenset[str] = frozenset()
    last: Fault | None = None
    busy: Refused | None = None
    busy_times: int = 0
    no_route: NoRoute | None = None
    stuck_at: float | None = None
    waits: int = 0
    cut_off: bool = False
    cut_off_at: float = 0.0
    asked: bool = False

    def learned(self, fault: Fault, process: str, *, has_past: bool, limits: RecoveryLimits) -> "Case":
        """Return the case with one more fault. process: at fault; unused for an edge. has_past: of that process."""
        if _is_busy_with_past(fault, has_past, limits):
            assert isinstance(fault, Refused)
            return replace(self, last=fault, busy=fault, busy_times=self.busy_times + 1)
        more = frozenset() if isinstance(fault, EdgeDown) else {process}
        return replace(self, last=fault, without=self.without | more)

    def bears_busy(self, limits: RecoveryLimits) -> bool:
        """Whether a busy hop with the past is waited for. One that never has time would hold the session for ever."""
        return self.busy_times < limits.busy_max

    def seen(self, *, cut_off: bool, now: float) -> "Case":
        """Return the case with the state of the client's own connection."""
        return replace(self, cut_off=cut_off, cut_off_at=now if cut_off else self.cut_off_at)

    def stuck(self, no_route: NoRoute, now: float) -> "Case":
        """Return the case when an attempt has found no holder."""
        asked = self.asked or bool(self.without) or no_route.passing
        return replace(self, no_route=no_route, stuck_at=now if self.stuck_at is None else self.stuck_at, asked=asked)

    def forgiven(self) -> "Case":
        """Return the case when the client has its connection back: its faults said nothing about hops."""
        return replace(self, without=frozenset())

    def done(self, action: Action) -> "Case":
        """Return the case after an action that has not ended it."""
        match action:
            case Queue():
                return replace(self, crowded=False, has_turn=True)
            case Wait() if self.no_route is None:
                return replace(self, busy=None)
            case Wait(for_room=True):
                return replace(self, without=frozenset(), no_route=None)
            case Wait():  # the pause is the longest after 16, and 2 ** waits stays a number
                return replace(self, without=frozenset(), no_route=None, waits=min(self.waits + 1, 16))
        return self


def decide(case: Case, now: float, limits: RecoveryLimits) -> Action:
    """Return the next action; see the rules above."""
    if case.is_new and case.crowded and not case.has_turn:
        return Queue(None)
    if case.busy is not None:
        return _wait_for_room(case, case.busy, now, limits)
    if case.no_route is None:
        return Attempt(case.without, ask_only=case.cut_off)
    if isinstance(case.last, Refused) and case.last.retry_after_s is not None:
        if case.is_new and not case.has_turn:
            return Queue(case.last)
        return _wait_for_room(case, case.last, now, limits)
    # Processes that failed may have lost only a connection, or be about to be started again. Trying one after the other
    # takes long, and asks none of them again: so that time does not count.
    asked = case.asked or case.cut_off_at
    holders_s = max(case.patience.holders_s, limits.holders_s if asked else 0.0)
    assert case.stuck_at is not None
    since = case.patience.began if case.is_new else case.stuck_at  # a new session has nothing to lose
    if now - max(since, case.cut_off_at) < holders_s:
        return Wait(min(limits.wait_most_s, limits.wait_first_s * 2.0**case.waits))
    return Fail(_error(case, case.no_route))


def _wait_for_room(case: Case, full: Refused, now: float, limits: RecoveryLimits) -> Wait | Fail:
    """Wait before a full hop is asked again; its refusal says more than a timeout would.

    Sessions that wait for more room, and hold some, may wait for each other: so this one gives its own back in time.
    """
    for_s = min(limits.wait_most_s, max(limits.ask_s, full.retry_after_s or 0.0))
    if now + for_s >= case.patience.deadline:
        return Fail(full)
    new_and_refused = case.is_new and case.no_route is not None
    give_back = new_and_refused or case.patience.gives_back(full, now)
    return Wait(for_s, give_back=give_back, for_room=True)


def _error(case: Case, no_route: NoRoute) -> SwarmError:
    if case.last is None:
        return no_route
    if not case.is_new:
        return NoRoute(no_route.model, no_route.missing, f"no server can take over: {no_route.why} ({case.last})")
    return no_route if isinstance(case.last, EdgeDown) else case.last


def _is_busy_with_past(fault: Fault, has_past: bool, limits: RecoveryLimits) -> bool:
    """Whether a hop with all of the past is told of new neighbours too often: it is worth a short wait."""
    if not isinstance(fault, Refused) or fault.code != "busy":
        return False
    return has_past and (fault.retry_after_s or 0.0) <= limits.held_s


# Blame


@dataclass(frozen=True, slots=True)
class Avoid:
    """Leave out a process that failed, for a time that doubles."""

    process: str


@dataclass(frozen=True, slots=True)
class Defer:
    """Leave out a process that declined, for so long."""

    process: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Block:
    """Have the client relay an edge."""

    edge: Edge


def blame(
    fault: Fault, process: str, *, has_past: bool, was_reconnected: bool, limits: RecoveryLimits
) -> Avoid | Defer | Block | None:
    """Return the lesson of a fault for all sessions of this client; None if there is none.

    was_reconnected: the edge has broken before, and no step was answered since.
    """
    if isinstance(fault, EdgeDown):
        return Block(fault.edge) if fault.blocked or was_reconnected else None
    if isinstance(fault, HopFailed):
        return Avoid(process)
    if _is_busy_with_past(fault, has_past, limits):
        return None
    return Defer(process, fault.retry_after_s or limits.declined_s)


# Refused steps


@dataclass(frozen=True, slots=True)
class Renew:
    """Reroute along the same hops, which grants anew."""


@dataclass(frozen=True, slots=True)
class MoveAway:
    """Replace these processes."""

    processes: frozenset[str]


@dataclass(frozen=True, slots=True)
class RefusedStep:
    """One step that was refused, perhaps by several hops.

    unable: processes that called it impossible. alone: no other hop can take over from the last one that refused.
    """

    patience: Patience
    renewed: bool = False
    waited: bool = False
    unable: frozenset[str] = frozenset()
    alone: bool = False

    def stays_alone(self) -> "RefusedStep":
        """Return the case when no other hop can take over."""
        return replace(self, alone=True)

    def done(self, action: "Renew | MoveAway | Wait", refused: Refused) -> "RefusedStep":
        """Return the case after an action that succeeded."""
        match action:
            case Renew():
                return replace(self, renewed=True)
            case Wait():
                return replace(self, waited=True, alone=False)
            case MoveAway(processes) if refused.retry_after_s is None:
                return replace(self, unable=processes)
        return self


def after_refusal(
    step: RefusedStep, refused: Refused, process: str, now: float, limits: RecoveryLimits
) -> Renew | MoveAway | Wait | Fail:
    """Return the action after a hop, run by `process`, has refused a step.

    its grant is over, the first time                       -> Renew
    `too_late`, shortly before the step's deadline          -> Fail; earlier it is not believed
    impossible, says a second hop, not for room or time     -> Fail: it is the step's own fault
    impossible                                              -> MoveAway, else Fail
    no room, the first time                                 -> Wait
    no room, again                                          -> MoveAway, else Wait
    """
    if refused.code == "grant_over" and not step.renewed:
        return Renew()
    if refused.retry_after_s is None:
        unable = step.unable | {process}
        is_late = refused.code == "too_late" and now > step.patience.deadline - limits.late_s
        is_believed = is_late or (refused.code not in {"no_room", "too_late"} and len(unable) > 1)
        return Fail(refused) if is_believed or step.alone else MoveAway(unable)
    if step.waited and not step.alone:
        return MoveAway(frozenset({process}))
    for_s = refused.retry_after_s if step.waited else min(limits.room_s, refused.retry_after_s)
    if now + for_s >= step.patience.deadline:
        return Fail(refused)
    return Wait(for_s, give_back=step.patience.gives_back(refused, now), for_room=True)
