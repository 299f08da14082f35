"""Audits a share of a client's sessions when they have ended, one after the other, and leaves wrong servers out.

    draw -> open a session -> opened      one of fifty sessions keeps what its hops answer
    its end -> inquest -> replays         on routes of other servers
    verdict -> ledger -> sessions         without the servers that are wrong
            -> evidence                   against these, where the caller keeps any

The user does not wait for an audit. A replay is a session of its own, with the audited one's positions, and in steps
that look like that one's (`swarm.client.auditing.replaying`).
"""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import structlog
from torch import Tensor, cat

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.client.auditing.bounds import are_comparable, bounds_of, distance
from swarm.client.auditing.collect import CollectLimits, Way, collected
from swarm.client.auditing.edges import Edge
from swarm.client.auditing.evidence import Evidence
from swarm.client.auditing.inquest import Ask, Outputs, Replay, Verdict, inquest, processes_of
from swarm.client.auditing.ledger import Audits, Ledger
from swarm.client.auditing.replaying import Shape, computed, opening, shape_of
from swarm.client.planning.promise import Held
from swarm.client.planning.route import Hop, classes_of
from swarm.client.planning.router import Router
from swarm.client.session.plan import Planner, SessionPlan
from swarm.client.session.session import First, Session
from swarm.client.session.sessions import Sessions
from swarm.client.session.transcript import Testimony
from swarm.errors import HopFailed, NoRoute, Refused, StepTimeout, SwarmError
from swarm.limits import limit
from swarm.protocol.tensors import Coding

_log = structlog.get_logger("swarm.audits")


@dataclass(frozen=True, slots=True)
class AuditLimits:
    """How much a client audits."""

    share: float = limit(0.02, "of sessions", "are audited; servers compute their positions once more")
    waiting_max: int = limit(4, "sessions", "wait for their audit; more that end meanwhile are not audited")
    positions_max: int = limit(8192, "positions", "of all rows; longer sessions are not audited")
    steps: int = limit(8, "positions", "of a replay come one by one at most, behind its prompt; the number is drawn")
    tries_max: int = limit(2, "routes", "tried for a replay, where servers that were drawn for it fail")
    replays_max: int = limit(256, "replays", "of one audit; after a dispute, the session's servers are avoided then")
    audit_s: float = limit(600.0, "s", "after which an audit begins no further replay")
    holders_s: float = limit(2.0, "s", "a hop of a replay that fails is asked again for so long; no user waits")
    doubted_s: float = limit(600.0, "s", "a server that may be wrong is left out for so long")
    collect: CollectLimits = field(default_factory=CollectLimits)


@dataclass(frozen=True, slots=True)
class Case:
    """A session that has ended. first: a process whose place others take first, where not all can be replaced.

    edges: what its hops signed.
    """

    testimony: Testimony
    blocks: Blocks
    plan: SessionPlan
    first: str | None = None
    edges: tuple[Edge, ...] = ()


class Auditor:
    """Audits some of a client's sessions through one model, while it is entered."""

    def __init__(
        self,
        router: Router,
        sessions: Sessions,
        limits: AuditLimits = AuditLimits(),
        chance: Callable[[], float] = random.random,  # noqa: S311 - no server sees what is drawn
        draws: random.Random | None = None,
        ledger: Ledger | None = None,
        evidence: Callable[[Evidence], object] | None = None,
    ) -> None:
        """chance: returns a number in [0, 1) that says whether the next session is audited.

        draws: of the routes of replays; servers must not know it. ledger: of earlier audits, which goes on. evidence:
        keeps what shows a server as wrong to others.
        """
        self._router = router
        self._sessions = sessions
        self._limits = limits
        self._chance = chance
        self._draws = draws or random.SystemRandom()
        self._ledger = ledger or Ledger()
        self._evidence = evidence
        self._met: dict[str, Hop] = {}  # the hops of the latest audit, by their processes
        self._cases: asyncio.Queue[Case] = asyncio.Queue(limits.waiting_max)
        self._auditing: asyncio.Task[None] | None = None

    @property
    def audits(self) -> Audits:
        """What was found so far."""
        return self._ledger.audits

    def drawn(self, plan: SessionPlan) -> SessionPlan:
        """Return the plan of a session that is audited, or is not: servers cannot know which.

        All of them have receipts: a server could compute rightly in those that do.
        """
        return replace(plan, audited=self._chance() < self._limits.share, receipt=self._limits.share > 0)

    def opened(self, session: Session, blocks: Blocks, plan: SessionPlan) -> None:
        """Audit a session when it has ended, if it was drawn."""
        if plan.audited:
            session.ended.add_done_callback(lambda _: self._ended(session, blocks, plan))

    async def __aenter__(self) -> Self:
        if self._limits.share:
            self._auditing = asyncio.create_task(self._audit_all())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._auditing is not None:
            self._auditing.cancel()
            await asyncio.wait({self._auditing})

    def _ended(self, session: Session, blocks: Blocks, plan: SessionPlan) -> None:
        testimony = session.testimony()
        is_short = testimony is not None and testimony.length * testimony.rows <= self._limits.positions_max
        if testimony is None or not is_short or self._cases.full():
            self._ledger.skip()
        else:
            self._cases.put_nowait(Case(testimony, blocks, plan))

    async def _audit_all(self) -> None:
        while True:
            case = await self._cases.get()
            try:
                await self.audit(case)
            except Exception:  # noqa: BLE001 - the next ones must not end with it
                _log.exception("an audit has failed")

    async def audit(self, case: Case) -> Verdict:
        """Audit a session that has ended, now. Returns the verdict, with all that are known to be wrong since then."""
        found, self._met = await self._verdict(case)
        verdict = found.given(self._ledger.note(found))
        self._leave_out(verdict)
        await self.collect(case, verdict.wrong)
        return verdict

    def _leave_out(self, verdict: Verdict) -> None:
        """Leave wrong servers out for good, and those that may be wrong for a while."""
        sessions = self._sessions
        self._router.audited(verdict.cleared | verdict.alike, verdict.wrong | verdict.suspected)
        for process in sorted(verdict.wrong):
            _log.warning("server computes wrongly", peer=process.partition("/")[0])
            sessions.expel(process)
        for process in verdict.suspected:
            sessions.avoidance.declined(process, self._limits.doubted_s)

    async def collect(self, case: Case, wrong: frozenset[str]) -> None:
        """Get evidence against wrong processes that took part in the latest audit, where it can be had and is kept."""
        if self._evidence is None:
            return
        way, limits = Way(self.drawn_route, self._opened), self._limits.collect
        plan = self._plan(case, min(case.testimony.length, limits.positions_max))
        until = asyncio.get_running_loop().time() + limits.all_s
        for process in sorted(wrong & self._met.keys()):
            hop = self._met[process]
            try:
                async with asyncio.timeout_at(until):
                    found = await collected(hop, case.testimony, case.blocks, plan, wrong, way, limits)
            except (SwarmError, TimeoutError) as error:
                _log.info("no evidence", peer=hop.peer_id, why=str(error) or "it takes too long")
                continue
            if found is not None:
                self._evidence(found)

    async def _verdict(self, case: Case) -> tuple[Verdict, dict[str, Hop]]:
        """Carry out an inquest. Returns its verdict, and all hops that took part, by their processes."""
        claim = Replay(case.testimony.route, case.testimony.outputs)
        met = {hop.process: hop for hop in claim.route}

        def order(route: Sequence[Hop]) -> list[Hop]:
            drawn = self._draws.sample(route, len(route))
            return sorted(drawn, key=lambda hop: hop.process != case.first)

        singles = round(self._limits.steps ** self._draws.random())  # few most often, and no number is the last one
        shape, broken = shape_of(case.testimony, singles), set[str]()
        course = inquest(claim, _agreement(case.plan.coding), order=order)
        ask, replays, disagrees, now = next(course), 0, False, asyncio.get_running_loop().time
        until = now() + self._limits.audit_s
        while True:
            if replays >= self._limits.replays_max or now() > until:
                return Verdict(unclear=processes_of(claim.route) if disagrees else frozenset()), met
            replay = await self._replay(ask, case, shape, broken)
            replays += 1
            if replay is not None:
                met |= {hop.process: hop for hop in replay.route}
                disagrees = True  # else the inquest asks for no more
            try:
                ask = course.send(replay)
            except StopIteration as end:
                verdict: Verdict = end.value
                return verdict, met

    async def _replay(self, ask: Ask, case: Case, shape: Shape, broken: set[str]) -> Replay | None:
        """Compute a session's positions anew on a route that is asked for; None if there is none, or it fails.

        broken: peers that broke a replay off. They get no more single steps, or what they are wrong in would not show.
        """
        kept = {hop.peer_id for hop in ask.kept}
        for _ in range(self._limits.tries_max):
            try:
                return await self._replayed(ask, case, shape.without_singles() if kept & broken else shape)
            except SwarmError as error:
                _log.info("no audit on this route", why=str(error))
                if isinstance(error, StepTimeout | HopFailed | Refused) and error.peer in kept - broken:
                    broken.add(error.peer)
                    continue
            if processes_of(ask.kept) & set(self._sessions.avoidance.processes):
                break  # others in the place of the drawn ones would not help
        return None

    async def _replayed(self, ask: Ask, case: Case, shape: Shape) -> Replay:
        """Compute a session's positions anew on one route. Raises SwarmError."""
        testimony = case.testimony
        plan = self._plan(case, shape.prompt)
        held = classes_of(testimony.route)
        hops = await self.drawn_route(ask, case.blocks, held, plan)
        if not are_comparable(classes_of(hops), held):
            raise NoRoute(plan.root, tuple(case.blocks), "other servers' weights are rounded otherwise")
        first, singles = opening(testimony, shape)
        session = await self._opened(plan, case.blocks, hops, first)
        try:
            return Replay(hops, await computed(testimony, shape, first, singles, session))
        finally:
            await session.close()

    def _plan(self, case: Case, positions: int) -> SessionPlan:
        """Return the plan of a session whose first step has so many of a case's positions."""
        plan = replace(case.plan, audited=False, prefix=None, expansion=None, wait_for_blocks_s=0.0)
        return plan.sized(case.testimony.rows, positions, self._sessions.limits.chunks)

    async def _opened(
        self, plan: SessionPlan, blocks: Blocks, hops: tuple[Hop, ...], first: First | None = None
    ) -> Session:
        """Open a session on hops of which none is ever replaced. first: as in `Sessions.open`. Raises SwarmError."""
        recovery = replace(self._sessions.limits.recovery, holders_s=self._limits.holders_s)
        limits = replace(self._sessions.limits, recovery=recovery)
        return await self._sessions.open(plan, blocks, fixed(hops), limits, first)

    async def drawn_route(self, ask: Ask, blocks: Blocks, held: Held, plan: SessionPlan) -> tuple[Hop, ...]:
        """Return a route with the hops that are to be kept, and others that are drawn. Raises NoRoute or NetworkError.

        held: the numeric classes to compute in; others of their tier where those have no servers.
        """
        hops: list[Hop] = []
        needed, avoid = plan.batch * plan.positions_soon, {*ask.without, *processes_of(ask.kept)}
        at = blocks.start
        for kept in (*ask.kept, None):
            until = kept.blocks.start if kept is not None else blocks.stop
            if at < until:
                part = Blocks(at, until)
                found = await self._router.plan(
                    part, avoid, held, fresh=True, positions_needed=needed, draws=self._draws
                )
                hops += found.hops
            if kept is not None:
                hops.append(kept)
                at = kept.blocks.stop
        return tuple(hops)


def fixed(hops: tuple[Hop, ...]) -> Planner:
    """Return a planner for one route, of which nothing is ever replaced."""

    async def planner(missing: Blocks, avoid: Collection[str], held: Held, fresh: bool) -> tuple[Hop, ...]:
        del held, fresh
        if missing != Blocks(hops[0].blocks.start, hops[-1].blocks.stop) or processes_of(hops) & set(avoid):
            raise NoRoute("", tuple(missing), "an audit replaces no hop")
        return hops

    return planner


def _table(outputs: Outputs) -> Tensor:
    """Return outputs as [positions * rows, hidden_size]."""
    return cat([outputs[at] for at in sorted(outputs)])


def _agreement(coding: Coding | None) -> Callable[[Replay, Replay], bool]:
    """Return a test whether two routes' outputs are of the same computation. coding: the session's."""

    def agree(told: Replay, computed: Replay) -> bool:
        if told.outputs.keys() != computed.outputs.keys():
            return False
        hops = (*told.route, *computed.route)
        bounds = bounds_of({NumericClass.parse(hop.numeric_class).sent(coding) for hop in hops})
        return bounds.allow(distance(_table(told.outputs), _table(computed.outputs)))

    return agree
