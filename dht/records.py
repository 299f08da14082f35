"""Announcements: a server's claims about one span, signed by the identity that serves it.

A record is `signature (64 bytes, Ed25519) + payload`, at most 2048 bytes, where the payload is canonical JSON: UTF-8,
sorted keys, no spaces, no NaN. Bytes that are not their own canonical form are rejected: one announcement has exactly
one encoding.

Two readers share this module. A *storing* node needs only a record's place, its owner and its lifetime: that is an
`Envelope`, and it holds for every major version of the protocol, so that versions mix in one DHT. A *using* node opens
the whole `Announcement` of its own major version. Fields that neither knows are signed, kept and ignored.

Nothing here imports hivemind or torch: light readers and simulators use this module too.
"""

import hashlib
import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from swarm.blocks import BLOCKS_MAX, Blocks
from swarm.config import NETWORK_PATTERN, PROTOCOL_VERSION
from swarm.errors import ClockSkew, RecordError, RecordExpired
from swarm.identity import SIGNATURE_BYTES, Identity, peer_id_of, verify
from swarm.limits import limit
from swarm.net import address as net


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """Bounds of a record, on which all nodes of a swarm agree: no node can have others."""

    bytes_max: int = limit(2048, "bytes", "a longer record is rejected; 256 of them fill half of one DHT message")
    lifetime_s: float = limit(60.0, "s", "a dead server's record is gone after this")
    refresh_s: float = limit(20.0, "s", "announced this often, so that two refreshes may get lost")
    skew_max_s: float = limit(30.0, "s", "clocks farther apart are reported as ClockSkew")
    addresses_max: int = limit(8, "addresses", "a record with more is rejected")
    anchors_max: int = limit(3, "anchors", "a record with more is rejected")
    codings_max: int = limit(4, "codings of activations", "a record with more is rejected")
    rtts_max: int = limit(16, "round trips", "a record with more is rejected")
    public_name_chars: int = limit(64, "characters", "a record with a longer public name is rejected")
    device_chars: int = limit(64, "characters", "a record with a longer device name is rejected")
    model_shards: int = limit(16, "keys", "the names of models are spread over so many DHT keys")
    entries_per_key: int = limit(256, "entries", "in one answer that is not a sample")
    held_per_key: int = limit(128, "entries", "a newcomer is refused, and goes to a key below")
    depth_max: int = limit(10, "levels", "of keys below a model's first: 2,047 keys, for 262,000 servers")
    unmeasured_tps: float = limit(20.0, "tokens/s", "that a server counts with until it has measured itself")
    key_parts: int = limit(3, "separators", "in the name of a key of spans; each more is one level down")


RECORD = RecordLimits()

_DOMAIN = b"swarm announcement"
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

Model = TypeVar("Model", bound=BaseModel)


def check_printable(text: str) -> str:
    """Return a name that can be shown to people. Raises ValueError."""
    if not text.isprintable() or text != text.strip():
        raise ValueError("not printable, or with spaces around it")
    return text


def check_address(text: str) -> str:
    """Return an address that a record can carry: "host:port", "1.2.3.4:port" or "[::1]:port". Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[1-9][0-9]{0,4}", port) or int(port) > 65535:
        raise ValueError("not host:port")
    if host.startswith("[") and host.endswith("]"):
        if ipaddress.IPv6Address(host[1:-1]).scope_id is not None:
            raise ValueError("the name of a network interface, which means nothing elsewhere")
    elif re.fullmatch(r"[0-9.]+", host):
        ipaddress.IPv4Address(host)
    elif not re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*", host):
        raise ValueError("not a host name")
    return text


def _hex(n_bytes: int) -> StringConstraints:
    return StringConstraints(pattern=rf"^[0-9a-f]{{{2 * n_bytes}}}$")


Hex32 = Annotated[str, _hex(32)]
Printable = Annotated[str, AfterValidator(check_printable)]
Address = Annotated[str, StringConstraints(max_length=128), AfterValidator(check_address)]
CodingName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{1,16}$")]  # how activations may travel
Count = Annotated[int, Field(ge=0, le=2**53 - 1)]  # every JSON reader represents these exactly
Rate = Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False)]  # a plan adds up their inverses
Moment = Annotated[float, Field(gt=0, le=1e11, allow_inf_nan=False)]  # wall seconds since 1970


class Span(NamedTuple):
    """Blocks [start, stop) in a record."""

    start: Annotated[int, Field(ge=0, lt=BLOCKS_MAX)]
    stop: Annotated[int, Field(gt=0, le=BLOCKS_MAX)]


class Rtt(NamedTuple):
    """A measured round trip to another peer, named by the first 16 hex digits of its public key."""

    peer: Annotated[str, _hex(8)]
    ms: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Mooring(NamedTuple):
    """An anchor at which a hidden server is moored."""

    public_key: Hex32
    channel_key: Hex32
    address: Address


class Envelope(BaseModel):
    """The part of a record of any version that a storing node needs: its place in the DHT, its owner and its time."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    protocol: int = Field(default=PROTOCOL_VERSION, ge=1, le=65535, description="the major version")
    network: str = Field(pattern=NETWORK_PATTERN)
    public_key: Hex32
    root: Hex32
    model: Annotated[Printable, StringConstraints(min_length=1, max_length=128)]
    n_blocks: int = Field(ge=1, le=BLOCKS_MAX)
    blocks: Span
    sequence: Count = Field(description="grows with every record of this owner and span, over restarts too")
    issued: Moment
    expires: Moment

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.blocks.start < self.blocks.stop <= self.n_blocks:
            raise ValueError("blocks out of range")
        if not 0 < self.expires - self.issued <= RECORD.lifetime_s:
            raise ValueError(f"lifetime is not within {RECORD.lifetime_s:.0f} s")
        return self

    @property
    def span(self) -> Blocks:
        """The announced blocks."""
        return Blocks(*self.blocks)

    @property
    def peer_id(self) -> str:
        """The owner's libp2p peer id."""
        return peer_id_of(bytes.fromhex(self.public_key))

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Names of fields that this version does not know."""
        return tuple(sorted(self.model_extra or ()))


class Announcement(Envelope):
    """One server's claim of one span. Rates are measured tokens per second; None is "not measured yet"."""

    version: Annotated[Printable, StringConstraints(min_length=1, max_length=32)]
    numeric_class: Annotated[str, StringConstraints(max_length=32)] = Field(
        pattern=r"^[a-z0-9][a-z0-9_.-]*(\+[a-z0-9_.-]*)?(\+[a-z0-9_.-]+)?$",  # as NumericClass reads, with torch
        description='dtype and quantisation: "float32"',
    )
    addresses: Annotated[tuple[Address, ...], Field(max_length=RECORD.addresses_max)]
    channel_key: Hex32
    decode_tps: Rate | None = None
    prefill_tps: Rate | None = None
    free_tokens: Count = 0
    load: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    batches: bool | None = Field(default=None, description="whether it runs steps of many sessions as one")
    state: Literal["joining", "online", "draining", "withdrawn"]
    codings: Annotated[tuple[CodingName, ...], Field(max_length=RECORD.codings_max)] = ()
    automatic: bool = Field(default=False, description="the server chose the span itself and moves where it is needed")
    rtts: Annotated[tuple[Rtt, ...], Field(max_length=RECORD.rtts_max)] = ()
    public_name: Annotated[Printable, StringConstraints(max_length=RECORD.public_name_chars)] = ""
    device: Annotated[Printable, StringConstraints(max_length=RECORD.device_chars)] = ""
    anchors: Annotated[tuple[Mooring, ...], Field(max_length=RECORD.anchors_max)] = ()

    @property
    def ways(self) -> tuple[net.Address, ...]:
        """All that a dialler can try: the addresses first, then the anchors."""
        via = (
            net.ViaAnchor(peer_id_of(bytes.fromhex(key)), bytes.fromhex(channel_key), at)
            for key, channel_key, address in self.anchors
            for at in net.dialable((address,))
        )
        return (*net.dialable(self.addresses), *via)


@dataclass(frozen=True, slots=True)
class SignedAnnouncement:
    """An announcement that was checked, and the bytes that prove it to others."""

    announcement: Announcement
    data: bytes


def sign_announcement(announcement: Announcement, identity: Identity) -> bytes:
    """Encode and sign. Raises RecordError if it is not the identity's own or does not fit into 2048 bytes."""
    if announcement.public_key != identity.public_key.hex():
        raise RecordError("an identity signs its own announcements only")
    payload = canonical_json(announcement.model_dump(mode="json"))
    data = identity.sign(_DOMAIN, payload) + payload
    if len(data) > RECORD.bytes_max:
        raise RecordError(f"size: {len(data)} bytes, at most {RECORD.bytes_max} are allowed")
    return data


def open_announcement(
    data: bytes, *, now: float, network: str, verified: bool = False, late_s: float = 0.0
) -> Announcement:
    """Check a record of this protocol version completely. `now` in wall seconds; `verified`: its signature was checked.

    late_s: a record counts for so long after its end, where only its keys and addresses are needed.
    Raises RecordError with the reason: size, encoding, field, signature, time, network or protocol.
    """
    fields = _fields(data)
    envelope = _checked(data, fields, now, network, verified, late_s)
    if envelope.protocol != PROTOCOL_VERSION:
        older = "this side" if envelope.protocol > PROTOCOL_VERSION else "the other side"
        raise RecordError(f"protocol: theirs is {envelope.protocol}, ours {PROTOCOL_VERSION}; {older} must upgrade")
    return _parse(Announcement, data)


def open_envelope(data: bytes, *, now: float, network: str, verified: bool = False) -> Envelope:
    """Check the part that records of every protocol version have. Raises RecordError like open_announcement."""
    return _checked(data, _fields(data), now, network, verified, 0.0)


def check_expiry(issued: float, expires: float, now: float) -> None:
    """Raise RecordExpired unless a record with these times is alive at `now` (all wall seconds)."""
    if expires <= now:
        raise RecordExpired(f"expired {now - expires:.1f} s ago")
    if issued > now + RECORD.skew_max_s:
        raise RecordExpired(f"from the future: issued {issued - now:.1f} s ahead of this clock")


def check_clock(skews_s: Sequence[float]) -> None:
    """Raise ClockSkew if this clock is too far from all others. skews_s: its difference from each of them."""
    skew_s = min(skews_s, key=abs, default=0.0)
    if abs(skew_s) > RECORD.skew_max_s:
        raise ClockSkew(skew_s=skew_s, allowed_s=RECORD.skew_max_s)


def canonical_json(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """Return the one accepted encoding. Raises ValueError for a value that JSON cannot carry."""
    return _CANONICAL.encode(value).encode()


# --- places in the DHT -----------------------------------------------------------------------------------------------
# scope: the network's name, or in a private swarm a secret of its members (`swarm.dht.sealing`).


def span_key(scope: str, root: str, branch: str = "") -> str:
    """Return the key of a model's spans. branch: of bits, below keys that are full."""
    return "/".join((f"swarm/spans/{scope}/{root}", *branch))


def branch_of(public_key: str) -> str:
    """Return the bits by which an owner's records are spread over keys below full ones."""
    return f"{int.from_bytes(hashlib.sha256(bytes.fromhex(public_key)).digest()[:2]):016b}"[: RECORD.depth_max]


def span_subkey(public_key: str, blocks: tuple[int, int]) -> str:
    """Return the subkey that belongs to one owner's span."""
    return f"{public_key}/{blocks[0]}:{blocks[1]}"


def model_keys(scope: str) -> tuple[str, ...]:
    """Return every key under which names of models are stored."""
    return tuple(f"swarm/models/{scope}/{shard}" for shard in range(RECORD.model_shards))


def model_key(scope: str, name: str) -> str:
    """Return the key under which the entries of one name are stored."""
    return model_keys(scope)[hashlib.sha256(name.encode()).digest()[0] % RECORD.model_shards]


def model_subkey(envelope: Envelope) -> str:
    """Return the subkey of a model's entry. A peer can add another entry, and cannot change this one."""
    facts = canonical_json([envelope.model, envelope.root, envelope.n_blocks])
    return hashlib.sha256(facts).hexdigest()[:40]


def key_id(key: str) -> bytes:
    """Return the 20 bytes that hivemind's DHT uses for a key: SHA-1 of its msgpack form."""
    return hashlib.sha1(packed_text(key), usedforsecurity=False).digest()


def packed_text(text: str) -> bytes:
    """Return the msgpack form of a short string, as hivemind sends subkeys."""
    data = text.encode()
    if len(data) < 32:
        return bytes([0xA0 | len(data)]) + data
    assert len(data) < 256, "keys and subkeys are short"
    return bytes([0xD9, len(data)]) + data


# --- checks ----------------------------------------------------------------------------------------------------------


def _fields(data: bytes) -> dict[str, Any]:
    """Read the payload's JSON object, which must be in its canonical form."""
    if not SIGNATURE_BYTES < len(data) <= RECORD.bytes_max:
        raise RecordError(f"size: {len(data)} bytes")
    payload = data[SIGNATURE_BYTES:]
    try:
        value = json.loads(payload.decode())
        canonical = canonical_json(value)
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise RecordError("encoding: not JSON") from None
    if canonical != payload:
        raise RecordError("encoding: not canonical")
    if not isinstance(value, dict):
        raise RecordError("encoding: not an object")
    return value


def _checked(data: bytes, fields: dict[str, Any], now: float, network: str, verified: bool, late_s: float) -> Envelope:
    if fields.get("network") != network:
        raise RecordError(f"another network: {str(fields.get('network'))[:32]!r}, this one is {network!r}")
    envelope = _parse(Envelope, data)
    check_expiry(envelope.issued, envelope.expires + late_s, now)
    if not verified and not verify(
        bytes.fromhex(envelope.public_key), _DOMAIN, data[SIGNATURE_BYTES:], data[:SIGNATURE_BYTES]
    ):
        raise RecordError("signature: not made by the announced key")
    return envelope


def _parse(model: type[Model], data: bytes) -> Model:
    try:
        return model.model_validate_json(data[SIGNATURE_BYTES:])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])[:64] or "record"
        raise RecordError(f"field {name}: {first['msg'][:120]}") from None
