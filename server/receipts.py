"""A server's receipts: its signature under the tally of a session (`swarm.protocol.receipts`)."""

from swarm.protocol.attest import Attest, Attested
from swarm.protocol.receipts import Receipt, Statement
from swarm.server.hosting import Hosting
from swarm.server.session import HostedSession


def attested(hosting: Hosting, session: HostedSession, request: Attest, now: float) -> Attested:
    """Answer the owner of a session, with a receipt or with the reason why there is none. now: seconds since 1970."""
    tally, span = session.history.tally, session.span
    why = ""
    if hosting.identity is None:
        why = "this server signs no receipts"
    elif tally is None:
        why = "the session was opened without"
    elif not tally.length:
        why = tally.lost or "the session has no positions"
    else:
        statement = Statement(
            peer=hosting.identity.public_key.hex(),
            session=session.id,
            root=hosting.root,
            numeric_class=str(span.numeric_class.sent(session.history.coding)),
            start=span.blocks.start,
            stop=span.blocks.stop,
            rows=tally.rows,
            length=tally.length,
            told=tally.told,
            inputs=tally.inputs,
            outputs=tally.outputs,
            issued=int(now),
        )
        receipt = Receipt.sign(statement, hosting.identity)
        return Attested(session=session.id, epoch=request.epoch, statement=receipt.text, signature=receipt.signature)
    return Attested(session=session.id, epoch=request.epoch, why=why)
