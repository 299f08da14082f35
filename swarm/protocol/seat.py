"""A session's place at each hop, as OPEN and REROUTE say it: `Itinerary` writes it at the client, `Seat` reads it.

A seat is the only peer that a hop takes activations from, where its outputs go, the epoch of the route, and the grant.
It is frozen. A REROUTE replaces it whole, with a higher epoch; nothing else does but `spend`, which uses up some of the
grant. The epoch rises with every repair, so messages of an older route are recognized and refused by every hop.

    client                                         hop
    Itinerary(epoch, stops, relayed, ...)
      .open(index, terms, rebuild)    -- OPEN -->      Seat.of(request, owner, now)
      .reroute(index, reset)          -- REROUTE -->   Seat.of(request, owner, now), if request.epoch > seat.epoch
                                      Step, Rebuild    seat.objection(sender, epoch), then seat.grant.is_over(now)

An edge from hop i to hop i + 1 is direct, or relayed by the client because the two cannot connect:

    edge        hop i: next                  hop i + 1: previous
    direct      Peer(record of hop i + 1)    hop i
    relayed     Relay()                      the client
    hop 0                                    the client
    last hop    Client()

To `Peer` and to `Relay` a hop sends Steps, over different channels; to `Client` it sends Outputs. `has_next` is true of
the first two: such a hop keeps a journal. The record is the next hop's signed announcement. A server reads it before it
makes the seat, and refuses a request that names a record and a relay, so the two never come together here.

The client calls `open` for the hops that are new and `reroute` for those that stay, all with the same itinerary.
"""

from base64 import b64encode
from dataclasses import dataclass, replace

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.protocol.marks import Prefix
from swarm.protocol.messages import Open, Reroute
from swarm.protocol.tensors import Coding


@dataclass(frozen=True, slots=True)
class Client:
    """The hop is the last one: its outputs are the route's, and go to the session's owner."""


@dataclass(frozen=True, slots=True)
class Relay:
    """The session's owner passes the outputs on to the next hop."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The outputs go to the hop of this record. record: its signed announcement, base64."""

    record: str


Next = Client | Relay | Peer


@dataclass(frozen=True, slots=True)
class Grant:
    """For how long, and for how many tokens of all rows, the previous hop may push. tokens: None for no bound.

    ends_at: seconds, on the clock of `now` in `Seat.of`.
    """

    ends_at: float
    tokens: int | None

    def is_over(self, now: float) -> bool:
        """Whether its time has passed."""
        return now > self.ends_at

    def after(self, tokens: int) -> "Grant | None":
        """Return the grant with so many tokens used up; None if it has less."""
        if self.tokens is None:
            return self
        return replace(self, tokens=self.tokens - tokens) if tokens <= self.tokens else None


@dataclass(frozen=True, slots=True)
class Seat:
    """A session's place at one hop. previous: the peer that its activations come from, the owner included."""

    epoch: int
    previous: str
    next: Next
    grant: Grant

    @classmethod
    def of(cls, request: Open | Reroute, owner: str, now: float) -> "Seat":
        """Read a request of the owner's. now: seconds, on the clock that the grant is measured with."""
        following: Next = Relay() if request.relay else Client()
        if request.next_record is not None:
            following = Peer(request.next_record)
        grant = Grant(now + request.lifetime_s, request.tokens_max)
        return cls(request.epoch, request.previous or owner, following, grant)

    @property
    def has_next(self) -> bool:
        """Whether outputs go on to another hop, so that they are Steps and kept for replay."""
        return not isinstance(self.next, Client)

    def accepts(self, sender: str, epoch: int) -> bool:
        """Whether activations of this peer and epoch are for this seat."""
        return self.objection(sender, epoch) is None

    def objection(self, sender: str, epoch: int) -> str | None:
        """Say why activations of this peer and epoch are not for this seat (code `not_yours`); None where they are."""
        if epoch != self.epoch:
            return "of another epoch"
        return "its activations come from another peer" if sender != self.previous else None

    def spend(self, tokens: int) -> "Seat | None":
        """Return the seat with less of its grant left, by tokens of all rows; None if the grant has less."""
        grant = self.grant.after(tokens)
        if grant is None or grant is self.grant:
            return None if grant is None else self
        return replace(self, grant=grant)


@dataclass(frozen=True, slots=True)
class Stop:
    """A hop, as the client names it in messages. record: its signed announcement."""

    peer: str
    record: bytes
    blocks: Blocks
    numeric_class: str


@dataclass(frozen=True, slots=True)
class Terms:
    """The size of a session, in the units of Open. prefix: of which hops may have the past; None to ask none.

    coding: of the activations on all edges. It makes another numeric class of the hops' own. receipt: as in Open.
    """

    root: str
    positions_max: int
    rollback_max: int
    batch: int = 1
    positions_soon: int = 0
    tenant: str | None = None
    prefix: Prefix | None = None
    coding: Coding | None = None
    receipt: bool = False


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The hops beside one, in the fields that both messages share."""

    previous: str | None
    next_record: str | None
    relay: bool


@dataclass(frozen=True, slots=True)
class Itinerary:
    """A session's route at one epoch. relayed: the indices i of edges from hop i to i + 1 that the client relays.

    after_step: the last step that every hop is to be behind.
    """

    session: str
    epoch: int
    stops: tuple[Stop, ...]
    relayed: frozenset[int]
    after_step: int

    def neighbours(self, index: int) -> Neighbours:
        """Return the hops beside hop `index`, as both messages name them."""
        from_hop = index > 0 and index - 1 not in self.relayed
        to_hop = index + 1 < len(self.stops) and index not in self.relayed
        return Neighbours(
            previous=self.stops[index - 1].peer if from_hop else None,
            next_record=b64encode(self.stops[index + 1].record).decode() if to_hop else None,
            relay=index in self.relayed,
        )

    def open(self, index: int, terms: Terms, *, rebuild: bool) -> Open:
        """Write the message that opens the session at hop `index`. rebuild: the past will come by Rebuild messages."""
        stop, beside = self.stops[index], self.neighbours(index)
        numeric_class = str(NumericClass.parse(stop.numeric_class).sent(terms.coding))  # its own: hops may differ
        marks = None
        if terms.prefix is not None:
            upstream = [(each.peer, each.blocks, each.numeric_class) for each in self.stops[:index]]
            marks = terms.prefix.marks(terms.root, numeric_class, upstream)
        return Open(
            session=self.session,
            epoch=self.epoch,
            root=terms.root,
            numeric_class=numeric_class,
            start=stop.blocks.start,
            stop=stop.blocks.stop,
            positions_max=terms.positions_max,
            rollback_max=terms.rollback_max,
            batch=terms.batch,
            positions_soon=terms.positions_soon,
            after_step=self.after_step,
            rebuild=rebuild,
            tenant=terms.tenant,
            marks=marks,
            receipt=terms.receipt or None,
            previous=beside.previous,
            next_record=beside.next_record,
            relay=beside.relay,
        )

    def reroute(self, index: int, *, reset: bool) -> Reroute:
        """Write the message that gives hop `index` new neighbours. reset: it forgets the past, which comes anew."""
        beside = self.neighbours(index)
        return Reroute(
            session=self.session,
            epoch=self.epoch,
            reset=reset,
            after_step=self.after_step,
            previous=beside.previous,
            next_record=beside.next_record,
            relay=beside.relay,
        )
