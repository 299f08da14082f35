"""Receipts: a hop's signature under what a session gave to it and what it returned.

A session that is opened with `receipt` has a tally at each hop: a digest of each position's input and of its output.
Asked at the end, the hop signs one digest over all of its inputs and one over all of its outputs.

    position    SHA-256 of dtype, shape, the hidden states of all rows, and the place
    place       position ids and mask of all rows; empty where ids count on from 0 and nothing is padding
    inputs      SHA-256 of the digests of all positions, in order
    outputs     the same; a position that was computed and not sent on has a digest of zeros

A digest is of the numbers that the receiver decodes, however they travel, in the sender's dtype. So a hop's outputs
have the digests of the next hop's inputs, over a direct edge, in a bundle or by a relay.

    add(at, given, sent)   positions from `at` on; those that were there are taken back, as by a rollback
    reset()                the past is forgotten, and comes anew

A tally is of the session as it is now. A past that is rebuilt from a journal has the digests that it had before, in
pieces of any size. Its outputs are told only as far as they went on: a hop that takes the place of another one has sent
none of them to the hop behind it. A tally is lost where it cannot be told any more (`lost` says why): rows were
gathered, the session began with a kept past, or has too many positions. It begins anew with position 0.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from swarm.activations import Activations, NumericClass
from swarm.blocks import BLOCKS_MAX
from swarm.identity import Identity, peer_id_of, verify
from swarm.limits import limit
from swarm.protocol.base import SessionId
from swarm.protocol.int8 import decode_int8
from swarm.protocol.tensors import Coding, encode_tensor

if TYPE_CHECKING:
    from torch import Tensor

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class ReceiptLimits:
    """Bounds on the tally of one session at a hop."""

    positions_max: int = limit(8192, "positions", "of 64 bytes each; a longer session gets no receipt")
    together: int = limit(16, "positions", "steps of one position are hashed together, which takes less time")
    noted_bytes: int = limit(256 << 10, "bytes", "or as soon as their inputs and outputs are so large")


@dataclass(frozen=True, slots=True)
class Form:
    """The sizes and the domains of digests."""

    digest_bytes: int = 32
    position: bytes = b"swarm position\0"
    whole: bytes = b"swarm positions\0"
    signed: bytes = b"swarm receipt"


def _check_class(text: str) -> str:
    NumericClass.parse(text)
    return text


class Statement(BaseModel):
    """A hop's words, which it signs.

    peer: its Ed25519 public key. root, start, stop, numeric_class: of the computation, as in Open. length: positions of
    each row. told: outputs that it sent on, of as many positions. issued: seconds since 1970, by its clock.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: Literal[1] = 1
    peer: Digest
    session: SessionId
    root: Digest
    numeric_class: Annotated[str, Field(max_length=64), AfterValidator(_check_class)]
    start: Annotated[int, Field(ge=0, le=BLOCKS_MAX)]
    stop: Annotated[int, Field(ge=0, le=BLOCKS_MAX)]
    rows: Annotated[int, Field(ge=1, le=1 << 16)]
    length: Annotated[int, Field(ge=1, le=1 << 22)]
    told: Annotated[int, Field(ge=0, le=1 << 22)]
    inputs: Digest
    outputs: Digest
    issued: Annotated[int, Field(ge=0, lt=1 << 53)]

    @property
    def peer_id(self) -> str:
        """The signer."""
        return peer_id_of(bytes.fromhex(self.peer))


@dataclass(frozen=True, slots=True)
class Receipt:
    """A statement and its signature, which is over the very text: text and signature travel as they are."""

    statement: Statement
    text: str
    signature: str

    @classmethod
    def sign(cls, statement: Statement, identity: Identity) -> "Receipt":
        """Sign a statement of one's own."""
        text = statement.model_dump_json()
        return cls(statement, text, identity.sign(Form().signed, text.encode()).hex())

    @classmethod
    def read(cls, text: str, signature: str) -> "Receipt":
        """Read a receipt and check its signature. Raises ValueError, with the reason."""
        try:
            statement = Statement.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise ValueError(f"the statement's {'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]) from None
        if not verify(bytes.fromhex(statement.peer), Form().signed, text.encode(), bytes.fromhex(signature)):
            raise ValueError("the signature is not that of the statement's peer")
        return cls(statement, text, signature)


class Tally:
    """The digests of one session at one hop, or at the client."""

    def __init__(self, coding: Coding | None = None, limits: ReceiptLimits | None = None) -> None:
        """coding: of the session's activations."""
        self.lost = ""
        self.rows = 0
        self._coding: Coding | None = coding
        self._limits = limits or ReceiptLimits()
        self._inputs, self._outputs = bytearray(), bytearray()
        self._noted: list[tuple[Activations, Tensor | None]] = []  # positions behind those, which are not hashed yet
        self._noted_bytes = 0
        self._summary: tuple[int, str, str] | None = None  # told, inputs, outputs; until there is more

    @property
    def length(self) -> int:
        """Positions of each row."""
        return self._hashed + len(self._noted)

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return len(self._inputs) + len(self._outputs) + self._noted_bytes

    @property
    def told(self) -> int:
        """Positions of which the outputs were sent on."""
        return self._summed[0]

    @property
    def inputs(self) -> str:
        """The digest of all inputs."""
        return self._summed[1]

    @property
    def outputs(self) -> str:
        """The digest of all outputs."""
        return self._summed[2]

    @property
    def _summed(self) -> tuple[int, str, str]:
        if self._summary is None:
            self._hash()
            size = Form().digest_bytes
            told = sum(any(self._outputs[at : at + size]) for at in range(0, len(self._outputs), size))
            self._summary = told, _whole(self._inputs), _whole(self._outputs)
        return self._summary

    def reset(self) -> None:
        """Begin anew."""
        self.lost, self.rows = "", 0
        self._keep(0)

    def lose(self, why: str) -> None:
        """Give up until the session begins anew."""
        self.reset()
        self.lost = why

    def add(self, at: int, given: Activations, sent: "Tensor | None", *, gathered: bool = False) -> None:
        """Note positions from `at` on.

        given: as they came. sent: outputs of the last of them, [rows, positions, hidden_size], as they were before
        they were coded; None for none. gathered: rows have changed places before.
        """
        if at == 0:
            self.reset()
        if self.lost:
            return
        rows, tokens = given.rows, given.tokens
        if gathered and at:
            self.lose("its rows were gathered")
        elif at > self.length or (at and rows != self.rows):
            self.lose("a part of its past is not known here")
        elif at + tokens > self._limits.positions_max:
            self.lose(f"it has more than {self._limits.positions_max} positions")
        else:
            self._keep(at)
            self.rows = rows
            if tokens > 1:
                self._hash()
                self._append(given, sent)
            else:
                self._noted.append((given.with_hidden(given.hidden.clone()), sent))  # not the frame that it came in
                self._noted_bytes += given.n_bytes + (0 if sent is None else sent.nbytes)
                if len(self._noted) >= self._limits.together or self._noted_bytes >= self._limits.noted_bytes:
                    self._hash()

    @property
    def _hashed(self) -> int:
        return len(self._inputs) // Form().digest_bytes

    def _keep(self, length: int) -> None:
        """Take back the positions from this one on."""
        self._summary = None
        size = Form().digest_bytes
        del self._noted[max(0, length - self._hashed) :]
        if not self._noted:
            self._noted_bytes = 0
        del self._inputs[length * size :], self._outputs[length * size :]

    def _hash(self) -> None:
        """Hash what is noted: together, where all of it is ordinary steps of one dtype."""
        noted, self._noted, self._noted_bytes = self._noted, [], 0
        sent = [output for _, output in noted if output is not None]
        dtypes = {(given.hidden.dtype, output.dtype) for (given, _), output in zip(noted, sent, strict=False)}
        is_plain = all(given.positions is None and given.mask is None for given, _ in noted)
        if len(sent) == len(noted) > 1 and is_plain and len(dtypes) == 1:
            import torch  # noqa: PLC0415 - as in _places

            whole = torch.cat([given.hidden for given, _ in noted], dim=1)
            self._append(Activations(whole), torch.cat(sent, dim=1))
        else:
            for given, output in noted:
                self._append(given, output)

    def _append(self, given: Activations, sent: "Tensor | None") -> None:
        at, tokens, told = self._hashed, given.tokens, 0 if sent is None else sent.shape[1]
        self._inputs += digests(given.hidden, at, given)
        self._outputs += bytes((tokens - told) * Form().digest_bytes)
        if sent is not None and told:
            part = given if told == tokens else given.last(told)
            self._outputs += digests(as_received(sent, self._coding), at + tokens - told, part)


def as_received(hidden: "Tensor", coding: Coding | None) -> "Tensor":
    """Return hidden states as the receiver has them: coded and decoded."""
    if coding is None:
        return hidden
    coded = memoryview(bytearray(encode_tensor(hidden, coding)))
    return decode_int8(coded, hidden.dtype, tuple(hidden.shape))


def digests(hidden: "Tensor", start: int, places: Activations) -> bytes:
    """Return the digests of positions, one behind the other.

    hidden: [rows, positions, hidden_size], the first of which is at `start`. places: has the position ids and the mask
    of the same positions.
    """
    rows, tokens, width = hidden.shape
    dtype = str(hidden.dtype).removeprefix("torch.")
    header = Form().position + f"{dtype} {rows} {width}\0".encode()
    data = encode_tensor(hidden if rows == 1 else hidden.transpose(0, 1))
    size = rows * width * hidden.element_size()
    beside = _places(start, places)
    parts = bytearray()
    for index in range(tokens):
        hasher = hashlib.sha256(header)
        hasher.update(data[index * size : (index + 1) * size])
        if beside is not None:
            hasher.update(beside[index])
        parts += hasher.digest()
    return bytes(parts)


def _places(start: int, places: Activations) -> list[bytes] | None:
    """Return position ids and mask of each position; None where all of them are the ordinary ones."""
    positions, mask = places.positions, places.mask
    if positions is None and mask is None:
        return None
    import torch  # noqa: PLC0415 - a process that only shakes hands and pings does without

    rows, tokens = places.rows, places.tokens
    ordinary = torch.arange(start, start + tokens)[None]
    ids = (ordinary if positions is None else positions.cpu()).expand(rows, -1)
    real = torch.ones((rows, tokens), dtype=torch.uint8) if mask is None else mask.cpu()
    plain = ((ids == ordinary) & (real == 1)).all(dim=0)
    return [
        b"" if plain[at] else bytes(encode_tensor(ids[:, at])) + bytes(encode_tensor(real[:, at]))
        for at in range(tokens)
    ]


def _whole(parts: bytearray) -> str:
    return hashlib.sha256(Form().whole + parts).hexdigest()
