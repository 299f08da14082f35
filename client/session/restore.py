"""Makes a session's route stand again: carries out what `recovery` decides, one action after the other."""

import asyncio
from collections import defaultdict
from collections.abc import Collection

import structlog

from swarm.client.planning.promise import Crossing
from swarm.client.session import recovery
from swarm.client.session.attempt import Attempt, ClientsPast, Finder
from swarm.client.session.circuit import Circuit, Shared
from swarm.client.session.plan import SessionPlan
from swarm.client.session.recovery import Avoid, Block, Case, Defer, Fail, Fault, Patience, Queue, Wait
from swarm.client.session.steps import Steps
from swarm.errors import EdgeDown, HopFailed, NoRoute, Refused, SessionClosed

_log = structlog.get_logger("swarm.session")


class Restorer:
    """One session's recoveries. Under the session's lock: one at a time."""

    def __init__(self, circuit: Circuit, shared: Shared, finder: Finder, plan: SessionPlan, steps: Steps) -> None:
        self.blocks = finder.blocks
        self.repairs = 0  # how often the route was made to stand
        self.batch, self.positions_soon = plan.batch, plan.positions_soon  # that hops are to have room for
        self._circuit = circuit
        self._shared = shared
        self._finder = finder
        self._plan = plan
        self._steps = steps
        self._late: set[str] = set()  # processes that did not connect in time
        self._spent: defaultdict[str, float] = defaultdict(float)  # seconds of a recovery, by phase
        self._loop = asyncio.get_running_loop()

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """The repairs that brought blocks into another numeric class, in order."""
        return self._finder.crossings

    async def restore(self, deadline: float) -> None:
        """Return when the route stands. deadline: of the step, in the loop's time.

        Raises NoRoute; in a new session also the fault of the only holder.
        """
        if not self._circuit.is_standing:
            await self._recover(deadline)

    async def _recover(self, deadline: float) -> None:
        is_new = not self._steps.answered
        case = Case(
            self.patience(self._loop.time(), deadline),
            is_new=is_new,
            crowded=is_new and self._shared.turns.locked(),
        )
        self._spent.clear()
        turn, crossed = _Turn(self._shared.turns), len(self.crossings)
        try:
            while not self._circuit.is_standing:
                case = await self._round(case, turn)
        finally:
            turn.give_back()
        self.repairs += 1
        route = [f"{hop.peer_id} {hop.blocks}" for hop in self._circuit.layout.hops]
        took = {"seconds": self._loop.time() - case.patience.began, **self._spent}
        rounded = {phase: round(s, 3) for phase, s in took.items()}
        _log.info("route stands", session=self._circuit.session[:8], route=route, **rounded)
        for crossing in self.crossings[crossed:]:
            _log.warning("repaired in another numeric class", session=self._circuit.session[:8], why=str(crossing))

    async def replace(self, processes: Collection[str], deadline: float) -> bool:
        """Move to other hops. Returns False, and nothing has changed, if no others can take over."""
        for process in processes:
            self._shared.avoidance.declined(process, self._shared.limits.recovery.declined_s)
        try:
            await self._attempt(processes, ask_only=self._shared.avoidance.cut_off)
        except NoRoute:
            return False
        await self.restore(deadline)
        return True

    async def wait(self, action: Wait) -> None:
        """Sleep as an action says."""
        if action.give_back:
            self._circuit.leave()
        await asyncio.sleep(action.for_s)
        if action.for_room:
            self._steps.slow_down()

    def patience(self, began: float, deadline: float) -> Patience:
        """Return how long the session waits from when it began to, in a step with this deadline."""
        # Two sessions that wait for each other's room must not both give way at once.
        room_s = self._shared.limits.recovery.held_s * (1 + int(self._circuit.session[:8], 16) / 2**32)
        return Patience(began, deadline, self._plan.wait_for_blocks_s, room_s)

    async def _round(self, case: Case, turn: "_Turn") -> Case:
        """Take in the faults since the last round, then act until an attempt was made."""
        if self._circuit.is_closed:
            raise SessionClosed("it was closed")
        case = self._learn(case)
        limits, avoidance = self._shared.limits.recovery, self._shared.avoidance
        while True:
            case = case.seen(cut_off=avoidance.cut_off, now=self._loop.time())
            action = recovery.decide(case, self._loop.time(), limits)
            if isinstance(action, recovery.Attempt):
                break
            case = await self._act(action, case, turn)
        try:
            await self._attempt(action.without, ask_only=action.ask_only)
        except NoRoute as no_route:
            case = await self._without_holders(case, no_route, turn)
        if case.cut_off and not avoidance.cut_off:  # then the faults say nothing about hops
            self._circuit.regained()
            case = case.forgiven()
        return case

    async def _without_holders(self, case: Case, no_route: NoRoute, turn: "_Turn") -> Case:
        """Wait until another attempt may find a route. Raises what the session ends with."""
        case = case.stuck(no_route, self._loop.time())
        while case.no_route is not None:
            action = recovery.decide(case, self._loop.time(), self._shared.limits.recovery)
            assert not isinstance(action, recovery.Attempt)
            case = await self._act(action, case, turn)
        return case

    async def _act(self, action: Queue | Wait | Fail, case: Case, turn: "_Turn") -> Case:
        match action:
            case Fail(error):
                raise error from None
            case Queue(full):
                if full is not None:
                    self._circuit.leave()
                first_s = self._shared.limits.recovery.wait_first_s
                await turn.take(full, None if full is None else case.patience.deadline - first_s)
            case Wait():
                await self.wait(action)
        return case.done(action)

    async def _attempt(self, without: Collection[str], *, ask_only: bool) -> None:
        """Make one attempt; faults that arise meanwhile are reported. Raises NoRoute."""
        attempt = Attempt(self._circuit, self._shared, self._finder, self._late, self._spent, self._plan.expansion)
        terms = self._plan.terms(self.batch, self.positions_soon, is_first=not self.repairs)
        standing, past = None, ClientsPast(self._steps.answered, self._steps.past, self._steps.skipped)
        try:
            standing = await attempt.run(without, terms, past, ask_only=ask_only)
        except* (HopFailed, Refused, EdgeDown) as faults:
            for fault in faults.exceptions:
                assert isinstance(fault, HopFailed | Refused | EdgeDown)
                if not self._circuit.knows(fault):
                    self._circuit.report(fault)
        if standing is None or self._circuit.is_broken:
            return
        self._circuit.standing = standing
        self._finder.stands(standing.layout.hops, past.stop if past.pieces else 0)
        for leg in standing.layout.legs:
            leg.asked = False
        if terms.prefix is not None and standing.held:
            self._steps.begin(terms.prefix.ids[: min(standing.held, len(terms.prefix.ids) - 1)])

    def _learn(self, case: Case) -> Case:
        """Take in the faults, and tell the client's other sessions."""
        limits = self._shared.limits.recovery
        for fault in self._circuit.take_faults():
            process, has_past, reconnected = "", False, False
            if isinstance(fault, EdgeDown):
                reconnected = self._circuit.reconnects(fault.edge)
            else:
                process = self._circuit.layout.process_of(fault.peer)
                has_past = case.bears_busy(limits) and self._circuit.layout.is_whole(fault.peer)
            verdict = recovery.blame(fault, process, has_past=has_past, was_reconnected=reconnected, limits=limits)
            self._note(fault, verdict)
            case = case.learned(fault, process, has_past=has_past, limits=limits)
        return case

    def _note(self, fault: Fault, verdict: Avoid | Defer | Block | None) -> None:
        _log.info("route broken", session=self._circuit.session[:8], why=str(fault))
        match verdict:
            case Avoid(process):
                self._shared.avoidance.failed(process)
            case Defer(process, for_s):
                self._shared.avoidance.declined(process, for_s)
            case Block(edge):
                self._shared.avoidance.block(edge)


class _Turn:
    """A turn among the client's new sessions, taken at most once."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._has = False

    async def take(self, full: Refused | None, until: float | None) -> None:
        """Wait for it, in order. Raises `full` if that takes too long. until: in the loop's time."""
        try:
            async with asyncio.timeout_at(until):
                await self._turns.acquire()
        except TimeoutError:
            assert full is not None
            raise full from None
        self._has = True

    def give_back(self) -> None:
        """Let the next session have it."""
        if self._has:
            self._turns.release()
            self._has = False
