"""The gate before storage: default-deny. Only our signed records, only in their own places, only while they live.

Keys arrive hashed, so the place of a record is derived from its signed fields and compared with the key of the store
request. Neither the sender nor the expiry that the sender claims is trusted.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from sys import intern

from swarm.access import EVERYBODY, Access
from swarm.dht.records import (
    RECORD,
    Announcement,
    Envelope,
    branch_of,
    check_expiry,
    key_id,
    model_key,
    model_subkey,
    open_announcement,
    open_envelope,
    packed_text,
    span_key,
    span_subkey,
)
from swarm.dht.sealing import seal_for
from swarm.errors import RecordError
from swarm.limits import limit

_BIN16 = b"\xc5"  # msgpack: bytes with a 16-bit length; every record is longer than 255 bytes

Clock = Callable[[], float]  # wall seconds since 1970


@dataclass(frozen=True, slots=True)
class GateLimits:
    """How much a gate remembers and forgives."""

    verified_max: int = limit(8192, "digests", "the oldest is verified again; a large model's look-up fits, 1 KiB each")
    verify_slice: int = limit(24, "records", "checked without a pause for the event loop: about 2 ms")
    expiry_slack_s: float = limit(1.0, "s", "a DHT entry's expiry may differ by this from its record's: float rounding")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one record belongs. `rank`: of two records in one place, the higher one wins."""

    key: bytes
    subkey: str
    rank: float


@dataclass(frozen=True, slots=True)
class Facts:
    """The verified facts of one record. `owner`: public key, hex. `issued`, `expires`: wall seconds.

    key: the name of the model's key. cost: the claimed time of a token in one block, ms; infinite for a server that is
    not to be found any more.
    """

    owner: str
    issued: float
    expires: float
    span: Place
    model: Place
    key: str = ""
    cost: float = 1.0
    blocks: tuple[int, int] = (0, 1)

    def span_at(self, depth: int) -> Place:
        """Return the place of the span `depth` levels below the model's key, for where that is full."""
        if not depth:
            return self.span
        key = key_id("/".join((self.key, *branch_of(self.owner)[:depth])))
        return Place(key, self.span.subkey, self.span.rank)

    def spans(self) -> Iterator[Place]:
        """Yield the places of the span, level by level."""
        yield from map(self.span_at, range(RECORD.depth_max + 1 if self.key else 1))


@dataclass(frozen=True, slots=True)
class Entry:
    """A verified record in one of its places."""

    data: bytes
    facts: Facts
    place: Place


OnEntries = Callable[[Sequence[Entry]], None]
"""Takes the records that one node holds, as they come."""


class RecordGate:
    """Accepts the records of this network, each in its own places; remembers those that it has verified.

    seal: closes each stored record. Data that it does not open is no record.
    """

    def __init__(
        self, network: str, clock: Clock, access: Access = EVERYBODY, limits: GateLimits = GateLimits()
    ) -> None:
        self.network = network
        self.clock = clock
        self.seal = seal_for(network, access.network_key)
        self._access, self.limits = access, limits
        self._verified: OrderedDict[bytes, Facts] = OrderedDict()

    def admit(self, key: bytes, subkey: bytes, value: bytes, expiration: float) -> Entry:
        """Check one DHT value (hivemind's packed form) against its place. Raises RecordError."""
        data = unpack_value(value)
        facts = self.facts(data)
        if not math.isfinite(expiration) or abs(expiration - facts.expires) > self.limits.expiry_slack_s:
            raise RecordError("the entry's expiry is not the record's")
        for place in chain((facts.span, facts.model), facts.spans()):
            if place.key == key and packed_text(place.subkey) == subkey:
                return Entry(data, facts, place)
        raise RecordError("misplaced: the record belongs under another key")

    def admit_span(self, key: bytes, data: bytes) -> Entry:
        """Check a record that came without its place, under a key of its model. Raises RecordError."""
        facts = self.facts(data)
        for place in facts.spans():
            if place.key == key:
                return Entry(data, facts, place)
        raise RecordError("misplaced: the record belongs under another key")

    def own_record(self, peer: str, data: bytes) -> Announcement:
        """Return the living record that a peer sends of itself. Raises RecordError if it is none, or another's."""
        announcement = open_announcement(data, now=self.clock(), network=self.network)
        if announcement.peer_id != peer:
            raise RecordError("the record is not the asker's own")
        return announcement

    def facts(self, data: bytes, *, ours: bool = False) -> Facts:
        """Verify a stored record, once for each digest. Raises RecordError; RecordExpired if it does not live now.

        ours: this side has just signed it, so its signature need not be verified.
        """
        digest = hashlib.sha256(data).digest()
        facts = self._verified.get(digest)
        now = self.clock()
        if facts is not None:
            self._verified.move_to_end(digest)
            check_expiry(facts.issued, facts.expires, now)
            return facts
        record = open_envelope(self.seal.open(data), now=now, network=self.network, verified=ours)
        if not self._access.admits(record.peer_id):
            raise RecordError(f"owner: {record.peer_id} is not on this side's list of allowed peers")
        scope, subkey = self.seal.scope, self.seal.subkey
        key = intern(span_key(scope, record.root))  # one string for all records of a model
        facts = Facts(
            owner=record.public_key,
            issued=record.issued,
            expires=record.expires,
            span=Place(key_id(key), subkey(span_subkey(record.public_key, record.blocks)), float(record.sequence)),
            model=Place(key_id(model_key(scope, record.model)), subkey(model_subkey(record)), record.expires),
            key=key,
            cost=claimed_cost(record),
            blocks=record.blocks,
        )
        self._verified[digest] = facts
        if len(self._verified) > self.limits.verified_max:
            self._verified.popitem(last=False)
        return facts


def claimed_cost(record: Envelope) -> float:
    """Return the time that a server claims to need for a token in one block, in ms, its queue included.

    A storing node reads these claims of any version where they are numbers: they only order samples.
    """
    claims = record.model_extra or {}
    tps, load = claims.get("decode_tps"), claims.get("load", 0.0)
    if claims.get("state") == "withdrawn":
        return math.inf
    tps = min(1e9, max(1e-9, tps)) if isinstance(tps, int | float) else RECORD.unmeasured_tps
    load = min(1e6, max(0.0, load)) if isinstance(load, int | float) else 0.0
    return 1000.0 / tps / len(record.span) * (1.0 + load)


def pack_value(data: bytes) -> bytes:
    """Return the msgpack form of a record, which is how hivemind stores bytes."""
    return _BIN16 + len(data).to_bytes(2, "big") + data


def unpack_value(value: bytes) -> bytes:
    """Invert pack_value. Raises RecordError for anything else."""
    if value[:1] != _BIN16 or int.from_bytes(value[1:3], "big") != len(value) - 3:
        raise RecordError("encoding: not the packed form of a record")
    return value[3:]
