"""What a server serves, and whether a request is for that."""

from base64 import b64decode
from dataclasses import dataclass

from swarm.activations import tier_of
from swarm.blocks import Blocks
from swarm.dht.records import Announcement, open_announcement
from swarm.errors import BadBlocks, RecordError
from swarm.identity import Identity
from swarm.model.span import Span
from swarm.protocol.messages import Open, Reroute
from swarm.protocol.tensors import Coding
from swarm.server.refusals import Declined


@dataclass(frozen=True, slots=True)
class Hosting:
    """What this server serves. coding: of sessions that ask for it; all servers take sessions without.

    identity: signs receipts; a server without one gives none.
    """

    root: str
    network: str
    span: Span
    coding: Coding | None = None
    identity: Identity | None = None

    def part(self, request: Open) -> Span | Declined:
        """Return the blocks that a session asks for, or why they are not served."""
        if request.root != self.root:
            return Declined("not_served", f"this server has the model {self.root[:16]}...")
        plain = self.span.numeric_class
        classes = dict.fromkeys((str(plain), str(plain.sent(self.coding))))
        if request.numeric_class not in classes:
            return Declined("not_served", f"this server computes in {' or '.join(classes)}")
        try:
            return self.span.part(Blocks(request.start, request.stop))
        except BadBlocks as error:
            return Declined("not_served", str(error))

    def following(
        self, request: Open | Reroute, stop: int, coding: Coding | None, now: float, late_s: float
    ) -> Announcement | Declined | None:
        """Read the record of the next hop, which must begin where this one stops; None if there is none.

        coding: the session's. now: seconds since 1970. late_s: for how long a record counts after it has expired.
        """
        if request.next_record is None:
            return None
        if request.relay:
            return Declined("bad_request", "outputs go to the next hop or to the client, not to both")
        try:
            data = b64decode(request.next_record, validate=True)
            record = open_announcement(data, now=now, network=self.network, late_s=late_s)
        except (RecordError, ValueError) as error:
            return Declined("bad_request", f"the next hop's record: {error}")
        is_near = tier_of(record.numeric_class) == tier_of(str(self.span.numeric_class))
        if record.root != self.root or not is_near or stop not in record.span:
            why = f"the next hop does not serve block {stop} of this model in a numeric class of this tier"
            return Declined("bad_request", why)
        if coding is not None and coding not in record.codings:  # it would end the channel, which others share
            return Declined("bad_request", f"the next hop does not take activations as {coding}")
        return record
