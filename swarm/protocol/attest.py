"""The two messages about receipts: a client asks at a session's end, and a hop answers with its signature.

    client -- Attest --> hop -- Attested(statement, signature) --> client

`swarm.protocol.receipts` has the statement's meaning. A client asks only hops whose Hello says that they know this.
"""

from typing import Annotated, Literal

from pydantic import Field

from swarm.protocol.base import Epoch, Message, SessionId, Text

StatementText = Annotated[str, Field(max_length=1024)]
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class Attest(Message):
    """Asks a hop for the receipt of a session that was opened with `receipt`."""

    kind: Literal["attest"] = "attest"
    session: SessionId
    epoch: Epoch


class Attested(Message):
    """A hop's receipt. Without a statement it gives none: why says the reason."""

    kind: Literal["attested"] = "attested"
    session: SessionId
    epoch: Epoch
    statement: StatementText | None = None
    signature: Signature | None = None
    why: Text = ""
