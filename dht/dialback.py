"""Dial-back: before a server calls itself online, other nodes try to reach it as a client would.

The asker sends its own signed record over a libp2p stream, which proves its peer id. A helper (`swarm.dht.helper`)
tries the ways in the record, and says which work. Up to three helpers are asked, and two must agree: one that lies can
neither keep a server away nor make it believe that it is reached.

In a private swarm request and answer are sealed: nodes of strangers, which any routing table may hold, can neither read
a server's addresses nor make it believe that it cannot be reached.
"""

import asyncio
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.dht.node import SwarmNode
from swarm.dht.records import RECORD, Address, Hex32, SignedAnnouncement
from swarm.dht.sealing import SEAL_BYTES, Purpose
from swarm.errors import InvalidMessage, SwarmError, Unreachable
from swarm.identity import peer_id_of
from swarm.limits import limit
from swarm.net.address import ViaAnchor, dialable

PROTOCOL = "/swarm/dial-back/2"
FORMER = "/swarm/dial-back/1"  # the request is the bare record


@dataclass(frozen=True, slots=True)
class DialBackLimits:
    """How much a helper does for others, and how long an asker waits."""

    dial_timeout_s: float = limit(
        5.0, "s", "an address that has not answered by then is silent; all are dialled at once"
    )
    port_timeout_s: float = limit(2.0, "s", "the same, for ports at the address from which the asker comes")
    request_timeout_s: float = limit(
        5.0, "s", "an asker that is slower with its record, or to read the answer, is left"
    )
    answer_timeout_s: float = limit(12.0, "s", "a helper that is slower counts as failed")
    request_bytes_max: int = limit(4096, "bytes", "a longer request is rejected")
    answer_bytes_max: int = limit(4096, "bytes", "a longer answer is rejected")
    helping_max: int = limit(8, "askers", "at one time; more are refused")
    streams_max: int = limit(64, "streams", "opened by others at one time; more are closed")
    per_s: float = limit(1 / 10, "1/s", "requests of one asker; more are refused")
    burst: float = limit(6.0, "requests", "of one asker at once")
    helpers_max: int = limit(3, "helpers", "asked, side by side")
    last_helper_s: float = limit(2.0, "s", "that the other helpers may take longer than the first")


class Offer(BaseModel):
    """A helper is an anchor itself: where hidden peers may moor."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    public_key: Hex32
    channel_key: Hex32
    addresses: tuple[Address, ...] = Field(max_length=RECORD.addresses_max)

    @property
    def anchors(self) -> tuple[ViaAnchor, ...]:
        """The anchor at each of its addresses."""
        peer, key = peer_id_of(bytes.fromhex(self.public_key)), bytes.fromhex(self.channel_key)
        return tuple(ViaAnchor(peer, key, at) for at in dialable(self.addresses))


class Request(BaseModel):
    """What an asker wants to be tried, beside the ways in its record (base64; a node that serves nothing has none).

    data_port, p2p_port: tried at the address from which it comes; 0 asks for nothing.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    record: str = Field(default="", max_length=4 * RECORD.bytes_max)
    data_port: int = Field(default=0, ge=0, le=65535)
    p2p_port: int = Field(default=0, ge=0, le=65535)


class Answer(BaseModel):
    """A helper's findings. `refused`: why it did not try, else empty.

    answered, silent: of the record's addresses. through: the public keys of the record's anchors through which it was
    reached. outside: the data port answers at `seen`, the host from which the asker comes. p2p: its libp2p port does.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    answered: tuple[str, ...] = Field(default=(), max_length=RECORD.addresses_max)
    silent: tuple[str, ...] = Field(default=(), max_length=RECORD.addresses_max)
    through: tuple[Hex32, ...] = Field(default=(), max_length=RECORD.anchors_max)
    outside: bool = False
    p2p: bool = False
    seen: str = Field(default="", max_length=64)
    anchor: Offer | None = None
    refused: str = Field(default="", max_length=200)


@dataclass(frozen=True, slots=True)
class DialledBack:
    """What the peer `helper` found; `answer` names only addresses and anchors of the record that was sent."""

    helper: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class Findings:
    """What the helpers agree on. Each of them may lie: a claim counts if more than half of them make it."""

    found: tuple[DialledBack, ...]

    @property
    def reached(self) -> bool:
        """Whether some address of the record leads here."""
        return self._most(lambda answer: bool(answer.answered))

    @property
    def through(self) -> bool:
        """Whether some anchor of the record leads here."""
        return self._most(lambda answer: bool(answer.through))

    @property
    def outside(self) -> str:
        """The host at which the data port answers; "" where it does not."""
        return next((host for host in self._seen() if self._most(lambda a, h=host: a.outside and a.seen == h)), "")  # type: ignore[misc]

    @property
    def p2p(self) -> bool:
        """Whether others can call the libp2p port."""
        return self._most(lambda answer: answer.p2p)

    @property
    def seen(self) -> str:
        """From where this node's own connections come; "" where the helpers do not agree."""
        return next((host for host in self._seen() if self._most(lambda a, h=host: a.seen == h)), "")  # type: ignore[misc]

    @property
    def anchors(self) -> tuple[ViaAnchor, ...]:
        """Where this node may moor: claims that mooring itself proves."""
        return tuple(one for each in self.found if each.answer.anchor is not None for one in each.answer.anchor.anchors)

    def _seen(self) -> list[str]:
        return list(dict.fromkeys(each.answer.seen for each in self.found))

    def _most(self, claim: Callable[[Answer], bool]) -> bool:
        return 2 * sum(claim(each.answer) for each in self.found) > len(self.found)


async def ask_dial_back(
    node: SwarmNode,
    signed: SignedAnnouncement | None,
    *,
    data_port: int = 0,
    p2p_port: int = 0,
    limits: DialBackLimits = DialBackLimits(),
) -> Findings:
    """Let other nodes try to reach us. Raises Unreachable if no node helps.

    signed: our own record; None for a node that serves nothing. A helper that is slow, or stopped, is not waited for
    once another has answered.
    """
    helpers = node.neighbours()[: limits.helpers_max]
    record = b"" if signed is None else signed.data
    request = Request(record=b64encode(record).decode(), data_port=data_port, p2p_port=p2p_port)
    tasks = {asyncio.create_task(_ask_one(node, helper, request, signed, limits)) for helper in helpers}
    found, reasons = list[DialledBack](), list[str]()
    pending, last_at = set(tasks), None
    loop = asyncio.get_running_loop()
    try:
        while pending and not _decided(found, len(helpers)):
            timeout_s = None if last_at is None else max(0.0, last_at - loop.time())
            done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            found += _answers(done, reasons)
            if found and last_at is None:
                last_at = loop.time() + limits.last_helper_s
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
    if not found:
        why = "; ".join(reasons)[:300] or "none is known"
        raise Unreachable("a node that dials us back", (), limits.answer_timeout_s, why)
    return Findings(tuple(found))


def _decided(found: Sequence[DialledBack], helpers: int) -> bool:
    """Whether no further answer can change what most of them say."""
    needed = helpers // 2 + 1
    facts = [(bool(a.answered), bool(a.through), a.outside, a.p2p) for a in (each.answer for each in found)]
    return all(max(sum(column), len(column) - sum(column)) >= needed for column in zip(*facts, strict=True)) and bool(
        facts
    )


def _answers(done: "Iterable[asyncio.Task[DialledBack]]", reasons: list[str]) -> list[DialledBack]:
    """Return the results of the tasks that have one; add the reasons of those that failed."""
    found = []
    for task in done:
        error = task.exception()
        if error is None:
            found.append(task.result())
        elif isinstance(error, (SwarmError, OSError, TimeoutError, asyncio.IncompleteReadError)):
            reasons.append(str(error) or type(error).__name__)
        else:
            raise error
    return found


async def _ask_one(
    node: SwarmNode, helper: str, request: Request, signed: SignedAnnouncement | None, limits: DialBackLimits
) -> DialledBack:
    async with asyncio.timeout(limits.answer_timeout_s):
        try:
            answer = await ask_helper(node, helper, request, limits)
        except Unreachable as error:
            if signed is None or "protocol" not in error.why:
                raise
            answer = await ask_former(node, helper, signed.data, limits)
    if answer.refused:
        raise Unreachable(helper, (), 0.0, answer.refused)
    addresses = set() if signed is None else set(signed.announcement.addresses)
    anchors = set() if signed is None else {anchor.public_key for anchor in signed.announcement.anchors}
    ours = {
        "answered": tuple(address for address in answer.answered if address in addresses),
        "silent": tuple(address for address in answer.silent if address in addresses),
        "through": tuple(key for key in answer.through if key in anchors),
    }
    return DialledBack(helper, answer.model_copy(update=ours))


async def ask_helper(
    node: SwarmNode, helper: str, request: Request, limits: DialBackLimits = DialBackLimits()
) -> Answer:
    """Send a request to one helper and return its answer. Raises SwarmError, OSError, IncompleteReadError."""
    sealed = node.gate.seal.close(request.model_dump_json().encode())
    return await _exchange(node, helper, PROTOCOL, sealed, limits)


async def ask_former(node: SwarmNode, helper: str, record: bytes, limits: DialBackLimits) -> Answer:
    """The same, of a node of version 0.2 or before: it tries the record's addresses only.

    Such a node takes a peer whose address answers for one that can be called, so its word counts for both.
    """
    answer = await _exchange(node, helper, FORMER, node.gate.seal.close(record), limits)
    return answer.model_copy(update={"p2p": bool(answer.answered)})


async def _exchange(node: SwarmNode, helper: str, protocol: str, request: bytes, limits: DialBackLimits) -> Answer:
    reader, writer = await node.open_stream(helper, protocol)
    try:
        await write_message(writer, request)
        data = node.gate.seal.open(await read_message(reader, limits.answer_bytes_max + SEAL_BYTES), Purpose.ANSWER)
        return Answer.model_validate_json(data)
    except ValidationError:
        raise InvalidMessage("dial-back answer", f"from {helper}") from None
    finally:
        writer.close()


async def read_message(reader: asyncio.StreamReader, bytes_max: int) -> bytes:
    """Read one message of a dial-back stream. Raises InvalidMessage, IncompleteReadError."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > bytes_max:
        raise InvalidMessage("dial-back message", f"{length} bytes, at most {bytes_max} are allowed")
    return await reader.readexactly(length)


async def write_message(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write one message of a dial-back stream."""
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()
