"""Collects evidence against a server that an audit has shown as wrong: it is asked once more, alone, and signs.

    the session's positions -> other hops compute up to the server's blocks -> inputs
    inputs -> the server, in a session of its blocks alone -> outputs and its receipt
    inputs -> other holders of the blocks -> outputs to compare with

The receipt of a whole route would bind activations that went from hop to hop, which the client has never seen. Of a
session of one hop it has all. To the server it looks like the end of a route whose edges the client relays.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import structlog
from torch import Tensor, cat

from swarm.activations import Activations, NumericClass
from swarm.blocks import Blocks
from swarm.client.auditing.bounds import are_comparable, bounds_of, distance
from swarm.client.auditing.evidence import BadEvidence, Evidence
from swarm.client.auditing.inquest import Ask
from swarm.client.planning.promise import Held
from swarm.client.planning.route import Hop, classes_of
from swarm.client.session.plan import SessionPlan
from swarm.client.session.session import Session
from swarm.client.session.transcript import Testimony
from swarm.errors import NoRoute
from swarm.limits import limit
from swarm.protocol.attest import Attested
from swarm.protocol.journal import cut_off, rebuild_messages
from swarm.protocol.receipts import Receipt, as_received

_log = structlog.get_logger("swarm.audits")


@dataclass(frozen=True, slots=True)
class CollectLimits:
    """How far a client goes to get evidence."""

    positions_max: int = limit(128, "positions", "of a session that is to be evidence; the first ones of the audited")
    steps: int = limit(32, "positions", "of these come one by one, the others as a prompt before")
    tries_max: int = limit(4, "sessions", "with a server that is wrong at times; then there is no evidence")
    all_s: float = limit(120.0, "s", "against all wrong servers of an audit, then no more is asked for")
    receipt_s: float = limit(5.0, "s", "a server that sends no receipt for so long gives none")


@dataclass(frozen=True, slots=True)
class Way:
    """How sessions of an audit come about. route: draws hops for blocks. opened: opens a session on hops."""

    route: Callable[[Ask, Blocks, Held, SessionPlan], Awaitable[tuple[Hop, ...]]]
    opened: Callable[[SessionPlan, Blocks, tuple[Hop, ...]], Awaitable[Session]]


async def collected(
    hop: Hop,
    testimony: Testimony,
    blocks: Blocks,
    plan: SessionPlan,
    without: frozenset[str],
    way: Way,
    limits: CollectLimits = CollectLimits(),
) -> Evidence | None:
    """Ask a server once more for what it was wrong in. Returns None where that shows nothing. Raises SwarmError.

    testimony, blocks, plan: of the audited session. without: processes that compute no inputs.
    """
    given = first_positions(testimony, limits.positions_max)
    held = classes_of(testimony.route)
    plan = replace(plan, receipt=True)
    if hop.blocks.start > blocks.start:
        before = Blocks(blocks.start, hop.blocks.start)
        route = await way.route(Ask(without=without), before, held, plan)
        given = given.with_hidden((await _asked(way, route, before, plan, given, limits))[0])
    route = await way.route(Ask(without=without), hop.blocks, held, plan)
    if not are_comparable(classes_of(route), classes_of((hop,))):
        raise NoRoute(plan.root, tuple(hop.blocks), "other servers' weights are rounded otherwise")
    right, _ = await _asked(way, route, hop.blocks, plan, given, limits)
    bounds = bounds_of({NumericClass.parse(each.numeric_class).sent(plan.coding) for each in (hop, *route)})
    for _ in range(limits.tries_max):
        told, answer = await _asked(way, (hop,), hop.blocks, plan, given, limits)
        if answer is None or answer.statement is None or answer.signature is None:
            _log.info("no evidence: the server signs nothing", peer=hop.peer_id, why=answer and answer.why)
            return None
        if bounds.allow(distance(told.flatten(0, 1), right.flatten(0, 1))):
            continue
        inputs = given.with_hidden(as_received(given.hidden, plan.coding))
        try:
            evidence = Evidence.of(Receipt.read(answer.statement, answer.signature), inputs, told)
        except (BadEvidence, ValueError) as error:
            _log.warning("no evidence: the server signs something else", peer=hop.peer_id, why=str(error))
            return None
        said, computes = evidence.receipt.statement, str(NumericClass.parse(hop.numeric_class).sent(plan.coding))
        signed = said.peer_id, said.root, said.numeric_class, said.start, said.stop
        if signed != (hop.peer_id, plan.root, computes, *_ends(hop.blocks)):
            _log.warning("no evidence: the receipt is of another computation", peer=hop.peer_id)
            return None
        return evidence
    _log.info("no evidence: the server was right now", peer=hop.peer_id)
    return None


def first_positions(testimony: Testimony, most: int) -> Activations:
    """Return the first positions that a session's first hop was given, as the client had them."""
    pieces = cut_off(testimony.past, most)
    messages = rebuild_messages("0" * 32, 0, pieces, 1, expansion=testimony.expansion)
    parts = [activations for _, activations in messages]
    beside = (
        None if parts[0].positions is None else cat([_some(each.positions) for each in parts], dim=1),
        None if parts[0].mask is None else cat([_some(each.mask) for each in parts], dim=1),
    )
    return Activations(cat([each.hidden for each in parts], dim=1), *beside)


async def _asked(
    way: Way, route: tuple[Hop, ...], blocks: Blocks, plan: SessionPlan, given: Activations, limits: CollectLimits
) -> tuple[Tensor, Attested | None]:
    """Have a route compute all positions. Returns all outputs, and the receipt of the last hop."""
    session = await way.opened(plan, blocks, route)
    try:
        prompt = max(1, given.tokens - limits.steps)
        outputs = [await session.step(given.part(0, prompt))]
        for at in range(prompt, given.tokens):
            outputs.append(await session.step(given.part(at, at + 1)))
        answers = await session.inlet.receipts(limits.receipt_s)
        return cat(outputs, dim=1), answers[-1]
    finally:
        await session.close()


def _some(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # pieces of one past all have it, or none
    return tensor


def _ends(blocks: Blocks) -> tuple[int, int]:
    return blocks.start, blocks.stop
