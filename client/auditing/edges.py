"""Compares the receipts of a route's hops: what one has sent on is what the next one was given. Pure.

    client's positions == inputs of hop 0      outputs of hop i == inputs of hop i + 1

An edge whose ends sign different digests has a hop that signs something else than it sent or got, and nothing says
which of the two. The client knows what it sent itself: there the hop alone is in doubt.
"""

from collections.abc import Sequence
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


def in_doubt(
    hops: Sequence[Hop], statements: Sequence[Statement | None], testimony: Testimony, coding: Coding | None
) -> list[frozenset[str]]:
    """Return the processes of each edge whose ends signed different digests. Of each, one signs what is not so.

    statements: of the hops, in order. testimony: of the session, which was never repaired.
    """
    found = [
        frozenset({hops[at].process, hops[at + 1].process})
        for at, (one, other) in enumerate(pairwise(statements))
        if one is not None and other is not None and one.told == one.length and one.outputs != other.inputs
    ]
    given = first_positions(testimony, testimony.length)
    tally = Tally(coding)
    tally.add(0, given.with_hidden(as_received(given.hidden, coding)), None)
    first = statements[0]
    if first is not None and not tally.lost and first.inputs != tally.inputs:
        found.append(frozenset({hops[0].process}))
    return found


def _statement(hop: Hop, answer: Attested, session: str, root: str) -> Statement | None:
    if answer.statement is None or answer.signature is None:
        return None
    try:
        said = Receipt.read(answer.statement, answer.signature).statement
    except ValueError:
        return None
    own = (hop.peer_id, session, root, hop.blocks.start, hop.blocks.stop)
    return said if (said.peer_id, said.session, said.root, said.start, said.stop) == own else None
