"""Compares the receipts of a route's hops: what one has sent on is what the next one was given. Pure.

    client's positions == inputs of hop 0      outputs of hop i == inputs of hop i + 1

An edge whose ends sign different digests has a hop that signs something else than it sent or got, and nothing says
which of the two. The client knows what it sent itself: there the hop alone is in doubt.

A hop that computes rightly may sign what is not so. So its outputs, or its other digest, say nothing for it: an end of
an edge is a process and what it signed, such as its inputs.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swarm.client.auditing.collect import first_positions
from swarm.client.planning.route import Hop
from swarm.client.session.transcript import Testimony
from swarm.protocol.attest import Attested
from swarm.protocol.receipts import Receipt, Statement, Tally, as_received
from swarm.protocol.tensors import Coding


def statements_of(
    hops: Sequence[Hop], answers: Sequence[Attested | None], session: str, root: str
) -> list[Statement | None]:
    """Return what hops signed about their own blocks in this session; None where one has not."""
    return [
        None if answer is None else _statement(hop, answer, session, root)
        for hop, answer in zip(hops, answers, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Edge:
    """Two hops, or the client and a hop. ends: of the hops. agrees: whether they signed the same digest."""

    ends: frozenset[str]
    agrees: bool


def edges_of(
    hops: Sequence[Hop], statements: Sequence[Statement | None], testimony: Testimony, coding: Coding | None
) -> list[Edge]:
    """Return the edges whose ends have signed digests of the same positions.

    statements: of the hops, in order. testimony: of the session, which was never repaired.
    """
    found = [
        Edge(frozenset({_end(hops[at], "outputs"), _end(hops[at + 1], "inputs")}), one.outputs == other.inputs)
        for at, (one, other) in enumerate(pairwise(statements))
        if one is not None and other is not None and one.told == one.length
    ]
    given = first_positions(testimony, testimony.length)
    tally = Tally(coding)
    tally.add(0, given.with_hidden(as_received(given.hidden, coding)), None)
    first = statements[0]
    if first is not None and not tally.lost:
        found.append(Edge(frozenset({_end(hops[0], "inputs")}), first.inputs == tally.inputs))
    return found


def processes_at(ends: Collection[str]) -> frozenset[str]:
    """Return the processes of ends."""
    return frozenset(end.rpartition("#")[0] for end in ends)


def _end(hop: Hop, signed: str) -> str:
    return f"{hop.process}#{signed}"


def _statement(hop: Hop, answer: Attested, session: str, root: str) -> Statement | None:
    if answer.statement is None or answer.signature is None:
        return None
    try:
        said = Receipt.read(answer.statement, answer.signature).statement
    except ValueError:
        return None
    own = (hop.peer_id, session, root, hop.blocks.start, hop.blocks.stop)
    return said if (said.peer_id, said.session, said.root, said.start, said.stop) == own else None
