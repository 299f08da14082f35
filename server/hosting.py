"""What a server serves, and whether a request is for that."""

from base64 import b64decode
from dataclasses import dataclass, field

from swarm.blocks import Blocks
from swarm.dht.records import Announcement, open_announcement
from swarm.errors import BadBlocks, RecordError
from swarm.model.span import Span
from swarm.protocol.messages import Open, Reroute
from swarm.server.pool import Prices
from swarm.server.session import Declined

NEXT_RECORD_LATE_S = 24 * 3600.0  # a route that stands outlives the records that it was planned with


@dataclass(frozen=True, slots=True)
class Hosting:
    """What this server serves."""

    root: str
    network: str
    span: Span
    prices: Prices = field(default_factory=Prices)
    journal_bytes_max: int = 1 << 30  # of host memory, for all sessions together

    def part(self, request: Open) -> Span:
        """Return the blocks that a session asks for. Raises Declined."""
        if request.root != self.root:
            raise Declined("not_served", f"this server has the model {self.root[:16]}...")
        if request.numeric_class != str(self.span.numeric_class):
            raise Declined("not_served", f"this server computes in {self.span.numeric_class}")
        try:
            return self.span.part(Blocks(request.start, request.stop))
        except BadBlocks as error:
            raise Declined("not_served", str(error)) from None

    def following(self, request: Open | Reroute, stop: int, now: float) -> Announcement | None:
        """Read the record of the next hop, which must begin where this one stops. Raises Declined.

        now: seconds since 1970.
        """
        if request.next_record is None:
            return None
        if request.relay:
            raise Declined("bad_request", "outputs go to the next hop or to the client, not to both")
        try:
            data = b64decode(request.next_record, validate=True)
            record = open_announcement(data, now=now, network=self.network, late_s=NEXT_RECORD_LATE_S)
        except (RecordError, ValueError) as error:
            raise Declined("bad_request", f"the next hop's record: {error}") from None
        served = (record.root, record.numeric_class) == (self.root, str(self.span.numeric_class))
        if not served or stop not in record.span:
            raise Declined("bad_request", f"the next hop does not serve block {stop} of this model and numeric class")
        return record
