"""Dial-back: before a server calls itself online, other nodes try to reach it as a client would.

The asker sends its own signed record over a libp2p stream, which proves its peer id. A helper (`swarm.dht.helper`)
tries the ways in the record, and says which work. Up to three helpers are asked, and two must agree: one that lies can
neither keep a server away nor make it believe that it is reached.

In a private swarm request and answer are sealed: nodes of strangers, which any routing table may hold, can neither read
a server's addresses nor make it believe that it cannot be reached.
"""

import asyncio
import re
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from swarm.dht.node import SwarmNode
from swarm.dht.records import RECORD, Address, Hex32, SignedAnnouncement
from swarm.dht.sealing import SEAL_BYTES, Purpose
from swarm.errors import InvalidMessage, SwarmError, TooBusy, Unreachable
from swarm.identity import peer_id_of
from swarm.limits import limit
from swarm.net.address import ViaAnchor, dialable
from swarm.net.reach import makes_sense, network_of

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
    streams_max: int = limit(64, "streams", "opened by others at one time; more are told that this node is busy")
    streams_per_asker: int = limit(4, "streams", "of them; one that says nothing keeps nobody else out")
    per_s: float = limit(1 / 10, "1/s", "requests of one asker; more are refused")
    burst: float = limit(6.0, "requests", "of one asker at once")
    helpers_max: int = limit(3, "helpers", "asked, side by side")
    asked_max: int = limit(8, "helpers", "asked in all, since those that fail are replaced; then those found count")
    last_helper_s: float = limit(
        6.0, "s", "after the first answer the others are not waited for: longer than a dial, or a fast liar decides"
    )


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
    """An asker's wishes beside the ways in its record (base64; a node that serves nothing has none).

    data_port, p2p_port: tried at the address from which it comes; 0 asks for nothing. p2p_host: a literal address at
    which p2p_port is tried, too; "" names none.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    record: str = Field(default="", max_length=4 * RECORD.bytes_max, pattern="^[A-Za-z0-9+/=]*$")
    data_port: int = Field(default=0, ge=0, le=65535)
    p2p_port: int = Field(default=0, ge=0, le=65535)
    p2p_host: str = Field(default="", max_length=45)

    @field_validator("p2p_host")
    @classmethod
    def _literal(cls, host: str) -> str:
        return str(ip_address(host)) if host else host


class Answer(BaseModel):
    """A helper's findings. `refused`: why it did not try, else empty. busy: it may try later.

    answered, silent: of the record's addresses. through: the public keys of the record's anchors through which it was
    reached. outside: the data port answers at `seen`, the host from which the asker comes. p2p: its libp2p port does.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    answered: tuple[str, ...] = Field(default=(), max_length=RECORD.addresses_max)
    silent: tuple[str, ...] = Field(default=(), max_length=RECORD.addresses_max)
    through: tuple[Hex32, ...] = Field(default=(), max_length=RECORD.anchors_max)
    outside: bool = False
    p2p: bool = False
    seen: str = Field(default="", max_length=45)
    anchor: Offer | None = None
    refused: str = Field(default="", max_length=200)
    busy: bool = False

    @field_validator("seen")
    @classmethod
    def _literal(cls, host: str) -> str:
        """A server announces this host: one that is none would spoil its record."""
        if host and not (re.fullmatch(r"[A-Za-z0-9.:-]+", host) and makes_sense(host, public=False)):
            raise ValueError("it is no host to be reached at")
        if ":" in host:
            return str(ip_address(host))
        return host


@dataclass(frozen=True, slots=True)
class DialledBack:
    """The answer of the peer `helper`; it names only addresses and anchors of the record that was sent."""

    helper: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of all helpers. Each of them may lie: a claim counts if more than half of them make it."""

    found: tuple[DialledBack, ...]

    @property
    def reached(self) -> bool:
        """Whether some address of the record leads here."""
        return self._most(lambda answer: bool(answer.answered))

    @property
    def answered(self) -> tuple[str, ...]:
        """The addresses of the record that lead here."""
        named = dict.fromkeys(address for each in self.found for address in each.answer.answered)
        return tuple(address for address in named if self._most(lambda answer, at=address: at in answer.answered))  # type: ignore[misc]

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
    p2p_host: str = "",
    limits: DialBackLimits = DialBackLimits(),
) -> Findings:
    """Let other nodes try to reach us. Raises TooBusy if those that could help have no time, Unreachable if none can.

    signed: our own record; None for a node that serves nothing. p2p_host: as in Request. Helpers that fail are
    replaced by others; one that is stopped is not waited for long once another has answered.
    """
    if not await node.back():
        raise TooBusy("p2pd is being replaced; ask again later")
    helpers = _Helpers(spread(node.neighbours(), await node.hosts())[: limits.asked_max], limits.helpers_max)
    record = b"" if signed is None else signed.data
    request = Request(record=b64encode(record).decode(), data_port=data_port, p2p_port=p2p_port, p2p_host=p2p_host)
    loop = asyncio.get_running_loop()
    last_at, alone = loop.time() + limits.answer_timeout_s, True
    try:
        while helpers.ask(lambda helper: _ask_one(node, helper, request, signed, limits)):
            if not await helpers.answered(max(0.0, last_at - loop.time())) or helpers.decided:
                break
            if helpers.found and alone:
                last_at, alone = min(last_at, loop.time() + limits.last_helper_s), False
    finally:
        await helpers.close()
    if helpers.found:
        return Findings(tuple(helpers.found))
    why = "; ".join(helpers.reasons)[:300] or ("no answer" if node.neighbours() else "none is known")
    if helpers.busy:
        raise TooBusy(f"the nodes that could dial us back have no time; ask again later ({why})")
    raise Unreachable("a node that dials us back", (), limits.answer_timeout_s, why)


def spread(helpers: Sequence[str], hosts: Mapping[str, str]) -> tuple[str, ...]:
    """Put helpers of different networks first: many nodes of one operator share a /16, or a /32 of IPv6.

    hosts: the literal address of a helper where it is known.
    """
    seen, first, rest = set[str](), list[str](), list[str]()
    for helper in helpers:
        network = network_of(hosts[helper]) if helper in hosts else helper
        (rest if network in seen else first).append(helper)
        seen.add(network)
    return (*first, *rest)


class _Helpers:
    """The helpers of one question, and their answers."""

    def __init__(self, helpers: Sequence[str], at_once: int) -> None:
        self.found: list[DialledBack] = []
        self.reasons: list[str] = []
        self.busy = False
        self._waiting, self._at_once = deque(helpers), at_once
        self._pending: set[asyncio.Task[DialledBack]] = set()

    def ask(self, question: Callable[[str], Coroutine[None, None, DialledBack]]) -> bool:
        """Ask as many as may answer. Returns whether an answer is still to come."""
        while self._waiting and len(self._pending) + len(self.found) < self._at_once:
            self._pending.add(asyncio.create_task(question(self._waiting.popleft())))
        return bool(self._pending)

    async def answered(self, timeout_s: float) -> bool:
        """Wait for some answers. Returns False if none came in time."""
        done, self._pending = await asyncio.wait(self._pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            error = task.exception()
            if error is None:
                self.found.append(task.result())
            elif isinstance(error, (SwarmError, OSError, TimeoutError, asyncio.IncompleteReadError)):
                self.busy = self.busy or isinstance(error, TooBusy)
                self.reasons.append(str(error) or type(error).__name__)
            else:
                raise error
        return bool(done)

    @property
    def decided(self) -> bool:
        """Whether no further answer can change the majority."""
        expected = min(self._at_once, len(self.found) + len(self._pending) + len(self._waiting))
        needed = expected // 2 + 1
        facts = [(bool(a.answered), bool(a.through), a.outside, a.p2p) for a in (each.answer for each in self.found)]
        columns = list(zip(*facts, strict=True))
        return bool(columns) and all(max(sum(column), len(column) - sum(column)) >= needed for column in columns)

    async def close(self) -> None:
        """End the questions that are still under way."""
        for task in self._pending:
            task.cancel()
        if self._pending:
            await asyncio.wait(self._pending)


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
        raise TooBusy(f"{helper}: {answer.refused}") if answer.busy else Unreachable(helper, (), 0.0, answer.refused)
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
