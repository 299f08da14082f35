"""Audits the servers of one model, one after the other, through sessions of its own: for the page of a whole swarm.

    draw a server -> a route through it -> a session of fresh text -> inquest -> findings

The server is drawn among those that answer, each with the same chance; half of the draws are among doubted ones, if
there are any. The hops beside it are drawn, too. So neither claims nor guesses say which server is audited next.
"""

import asyncio
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import structlog
from torch import Tensor

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.auditing.auditor import AuditLimits, Auditor, Case, fixed
from swarm.client.auditing.docket import Docket, DocketLimits, Findings, peers_of
from swarm.client.auditing.edges import edges_of, statements_of
from swarm.client.auditing.evidence import Evidence
from swarm.client.auditing.inquest import Ask
from swarm.client.planning.preferences import Preferences
from swarm.client.planning.route import Hop, process_of
from swarm.client.planning.router import Router, Wanted
from swarm.client.session.membership import Member
from swarm.client.session.plan import SessionPlan
from swarm.client.session.session import First, Session
from swarm.dht.records import SignedAnnouncement
from swarm.errors import SwarmError
from swarm.limits import limit

_log = structlog.get_logger("swarm.audits")


@dataclass(frozen=True, slots=True)
class PatrolLimits:
    """The size of an audit of the swarm, which is what servers pay for it."""

    prompt: tuple[int, int] = limit((16, 64), "positions", "of the prompt of an audit's session, drawn between these")
    steps: tuple[int, int] = limit((40, 80), "steps", "of one position behind it, drawn between these")
    step_s: float = limit(30.0, "s", "a route that takes longer for one step is not audited")
    session_s: float = limit(60.0, "s", "of an audit's session; a slower one is audited for its first answers")
    audits: AuditLimits = field(default_factory=lambda: AuditLimits(replays_max=64, audit_s=120.0))
    docket: DocketLimits = field(default_factory=DocketLimits)


class Patrol:
    """Audits servers of one model."""

    def __init__(
        self,
        wanted: Wanted,
        text: Callable[[int], Tensor],
        positions_max: int,
        limits: PatrolLimits = PatrolLimits(),
        draws: random.Random | None = None,
        evidence: Callable[[Evidence], object] | None = None,
    ) -> None:
        """text: embeds so many positions of a fresh text, [1, positions, hidden_size]; servers must not know it.

        positions_max: that users' sessions of the model ask for. Audits do so, too, or servers could tell them.
        draws: of servers, routes and lengths; servers must not know it. evidence: as an Auditor's.
        """
        self._wanted, self._text, self._limits = wanted, text, limits
        self._positions_max = positions_max
        self._draws = draws or random.SystemRandom()
        self._evidence = evidence
        self._docket = Docket(limits.docket, self._draws)

    @property
    def doubted(self) -> frozenset[str]:
        """The ids of peers that are in doubt: one or another of them was wrong, and none has agreed with them since."""
        return self._docket.doubted

    async def audit(self, member: Member, answering: Collection[str], left_out: Collection[str] = ()) -> Findings:
        """Audit a server that is drawn, as a client that has just joined. Raises SwarmError where it cannot.

        answering: peer ids of servers that answer; records of others are no hops. left_out: those that are wrong.
        """
        allowed = frozenset(answering) - frozenset(left_out)
        preferences = Preferences(allowed_peers=allowed, quality="any")
        router = Router(self._wanted, member.directory, member.sessions.avoidance, preferences)
        auditor = Auditor(
            router,
            member.sessions,
            self._limits.audits,
            draws=self._draws,
            ledger=self._docket.ledger,
            evidence=self._evidence,
        )
        servers = (await router.surveys.read()).servers
        able = {process_of(each.announcement): each for each in servers if _can_serve(each, allowed)}
        drawn = able.get(self._docket.draw(tuple(able)) or "")
        if drawn is None:
            return Findings(why="no server that answers serves the model")
        try:
            case = await self._case(auditor, member, drawn)
        except (SwarmError, TimeoutError) as error:
            return Findings(drawn.announcement.peer_id, why=str(error) or "its session takes too long")
        if case is None:
            return Findings(drawn.announcement.peer_id, why="hops changed before they answered")
        false = self._docket.compare(case.edges)
        verdict = await auditor.audit(case)
        if not (verdict.accuses or verdict.cleared):
            return Findings(drawn.announcement.peer_id, why="no other server has its blocks")
        findings = self._docket.take(drawn.announcement.peer_id, verdict)
        unsteady_ones = findings.wrong - peers_of(verdict.wrong)
        await auditor.collect(case, frozenset(each for each in verdict.suspected if peers_of({each}) & unsteady_ones))
        gone = findings.wrong | false
        return replace(findings, wrong=gone, agreed=findings.agreed - gone, doubted=findings.doubted - gone)

    async def _case(self, auditor: Auditor, member: Member, drawn: SignedAnnouncement) -> Case | None:
        """Have a session through a server. None where it told no outputs. Raises SwarmError."""
        prompt, steps = (self._draws.randint(*between) for between in (self._limits.prompt, self._limits.steps))
        steps = min(steps, self._positions_max - prompt)
        target, blocks = Hop(drawn, drawn.announcement.span), Blocks(0, self._wanted.n_blocks)
        plan = SessionPlan(
            root=self._wanted.root,
            positions_max=self._positions_max,
            rollback_max=0,
            step_timeout_s=self._limits.step_s,
            wait_for_blocks_s=0.0,
            coding=self._wanted.coding,
            audited=True,
            receipt=True,
        ).sized(1, prompt, member.sessions.limits.chunks)
        hops = await auditor.drawn_route(Ask((target,)), blocks, ((blocks, target.numeric_class),), plan)
        hidden = self._text(prompt + steps)
        first = First(Activations(hidden[:, :prompt]), want=1)
        session = await member.sessions.open(plan, blocks, fixed(hops), first=first)
        try:
            async with asyncio.timeout(self._limits.session_s):
                await _converse(session, hidden, first)
            answers = await session.inlet.receipts(self._limits.audits.collect.receipt_s)
        except (SwarmError, TimeoutError):  # who breaks a session off is audited for what was told until then
            if session.testimony() is None:
                raise
            answers = ()
        finally:
            await session.close()
        testimony = session.testimony()
        if testimony is None:
            return None
        if testimony.has_moved or not answers:
            return Case(testimony, blocks, plan, first=target.process)
        statements = statements_of(testimony.route, answers, session.id, plan.root)
        edges = edges_of(testimony.route, statements, testimony, plan.coding)
        return Case(testimony, blocks, plan, first=target.process, edges=tuple(edges))


async def _converse(session: Session, hidden: Tensor, first: First) -> None:
    """Have the session compute these positions, as a user's would: a prompt, then one position at a time."""
    await session.step(first.activations, want=first.want)
    for at in range(first.activations.tokens, hidden.shape[1]):
        await session.step(Activations(hidden[:, at : at + 1]), want=1)


def _can_serve(server: SignedAnnouncement, allowed: Collection[str]) -> bool:
    record = server.announcement
    return record.state == "online" and record.peer_id in allowed and bool(record.addresses or record.anchors)
