"""Dial-back: before a server calls itself online, another node tries to reach it as a client would.

The asker sends its own signed record over a libp2p stream, which proves its peer id. The helper dials the addresses in
the record, with the keys in the record, and says which answered. It dials no other address, and a private or loopback
address only if the asker itself comes from such a network; so it is no port scanner for hire.

In a private swarm record and answer are sealed: nodes of strangers, which any routing table may hold, can neither read
a server's addresses nor make it believe that it cannot be reached.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import structlog
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.dht.node import SwarmNode
from swarm.dht.rates import RateLimit
from swarm.dht.records import RECORD, SignedAnnouncement, open_announcement
from swarm.dht.sealing import SEAL_BYTES, Purpose
from swarm.errors import InvalidMessage, RecordError, SwarmError, Unreachable
from swarm.identity import peer_id_of
from swarm.limits import limit
from swarm.net.address import parse
from swarm.net.carriers.tcp import dial
from swarm.net.channel import ignore
from swarm.net.endpoint import Endpoint, Remote

PROTOCOL = "/swarm/dial-back/1"

Dial = Callable[[str, bytes, bytes], Awaitable[None]]
"""`dial(address, public_key, channel_key)`: connect to "host:port" and shake hands, or raise SwarmError or OSError."""

_log = structlog.get_logger("swarm.dialback")


@dataclass(frozen=True, slots=True)
class DialBackLimits:
    """How much a helper does for others, and how long an asker waits."""

    dial_timeout_s: float = limit(
        5.0, "s", "an address that has not answered by then is silent; all are dialled at once"
    )
    request_timeout_s: float = limit(
        5.0, "s", "an asker that is slower with its record, or to read the answer, is left"
    )
    answer_timeout_s: float = limit(12.0, "s", "a helper that is slower counts as failed")
    answer_bytes_max: int = limit(4096, "bytes", "a longer answer is rejected")
    helping_max: int = limit(8, "askers", "at one time; more are refused")
    streams_max: int = limit(64, "streams", "opened by others at one time; more are closed")
    per_s: float = limit(1 / 10, "1/s", "requests of one asker; more are refused")
    burst: float = limit(3.0, "requests", "of one asker at once")
    helpers_max: int = limit(3, "helpers", "asked, until one answers")
    next_helper_s: float = limit(2.0, "s", "then the next helper is asked as well")


class Answer(BaseModel):
    """A helper's findings. `refused`: why it did not try, else empty."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    answered: tuple[str, ...] = Field(default=(), max_length=RECORD.addresses_max)
    silent: tuple[str, ...] = Field(default=(), max_length=RECORD.addresses_max)
    refused: str = Field(default="", max_length=200)


@dataclass(frozen=True, slots=True)
class DialledBack:
    """Which of a server's addresses the peer `helper` reached, and which not."""

    helper: str
    answered: tuple[str, ...]
    silent: tuple[str, ...]


def dialling_as(me: Endpoint) -> Dial:
    """Return a Dial that opens a channel as clients do, up to both sides' proven identities."""

    async def try_once(address: str, public_key: bytes, channel_key: bytes) -> None:
        channel = await dial(parse(address), Remote(peer_id_of(public_key), channel_key), me, ignore)
        channel.close()

    return try_once


async def serve_dial_back(node: SwarmNode, dial: Dial, limits: DialBackLimits = DialBackLimits()) -> None:
    """Help others on this node from now on."""
    await node.handle_stream(PROTOCOL, Helper(node, dial, limits).handle)


async def ask_dial_back(
    node: SwarmNode, signed: SignedAnnouncement, limits: DialBackLimits = DialBackLimits()
) -> DialledBack:
    """Let another node try to reach us. Raises Unreachable if no node helps.

    A helper that is slow, or stopped, is not waited for: after `next_helper_s` the next one is asked as well.
    """
    reasons: list[str] = []
    asked: set[asyncio.Task[DialledBack]] = set()
    helpers = iter(node.neighbours()[: limits.helpers_max])
    try:
        while True:
            helper = next(helpers, None)
            if helper is not None:
                asked.add(asyncio.create_task(_ask_one(node, helper, signed, limits)))
            if not asked:
                break
            patience_s = limits.next_helper_s if helper is not None else None
            done, asked = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            found = _first_answer(done, reasons)
            if found is not None:
                return found
    finally:
        for task in asked:
            task.cancel()
        if asked:
            await asyncio.wait(asked)
    why = "; ".join(reasons)[:300] or "none is known"
    raise Unreachable("a node that dials us back", (), limits.answer_timeout_s, why)


def _first_answer(done: Iterable[asyncio.Task[DialledBack]], reasons: list[str]) -> DialledBack | None:
    """Return the result of a task that has one; add the reasons of those that failed."""
    for task in done:
        error = task.exception()
        if error is None:
            return task.result()
        if not isinstance(error, (SwarmError, OSError, TimeoutError, asyncio.IncompleteReadError)):
            raise error
        reasons.append(str(error) or type(error).__name__)
    return None


async def _ask_one(node: SwarmNode, helper: str, signed: SignedAnnouncement, limits: DialBackLimits) -> DialledBack:
    async with asyncio.timeout(limits.answer_timeout_s):
        answer = await ask_helper(node, helper, node.gate.seal.close(signed.data), limits)
    if answer.refused:
        raise Unreachable(helper, (), 0.0, answer.refused)
    known = set(signed.announcement.addresses)
    return DialledBack(
        helper,
        tuple(address for address in answer.answered if address in known),
        tuple(address for address in answer.silent if address in known),
    )


async def ask_helper(node: SwarmNode, helper: str, record: bytes, limits: DialBackLimits = DialBackLimits()) -> Answer:
    """Send a sealed record to one helper and return its answer. Raises SwarmError, OSError, IncompleteReadError."""
    reader, writer = await node.open_stream(helper, PROTOCOL)
    try:
        await _write(writer, record)
        answer = node.gate.seal.open(await _read(reader, limits.answer_bytes_max), Purpose.ANSWER)
        return Answer.model_validate_json(answer)
    except ValidationError:
        raise InvalidMessage("dial-back answer", f"from {helper}") from None
    finally:
        writer.close()


class Helper:
    """The answering side: dials an asker back."""

    def __init__(self, node: SwarmNode, dial: Dial, limits: DialBackLimits = DialBackLimits()) -> None:
        self._node, self._dial, self._limits = node, dial, limits
        self._rates = RateLimit(limits.per_s, limits.burst)
        self._helping = self._streams = 0

    async def handle(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one stream. No behaviour of the peer raises."""
        asker = str(info.peer_id.to_base58())
        if self._streams >= self._limits.streams_max:
            writer.close()
            return
        self._streams += 1
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                # Read even a request that will be refused: a reset would lose the answer.
                record = await _read(reader, RECORD.bytes_max + SEAL_BYTES)
            answer = await self._answer(asker, str(info.addr), record)
            async with asyncio.timeout(self._limits.request_timeout_s):
                await _write(writer, self._node.gate.seal.close(answer.model_dump_json().encode(), Purpose.ANSWER))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, SwarmError) as error:
            _log.debug("dial-back request failed", asker=asker, why=str(error))
        finally:
            self._streams -= 1
            writer.close()

    async def _answer(self, asker: str, asker_address: str, record: bytes) -> Answer:
        if not self._rates.take(asker, asyncio.get_running_loop().time()):
            return Answer(refused="too many requests; slow down")
        if self._helping >= self._limits.helping_max:
            return Answer(refused="this node helps enough others; ask another")
        self._helping += 1
        try:
            return await self._try_all(asker, asker_address, record)
        finally:
            self._helping -= 1

    async def _try_all(self, asker: str, asker_address: str, record: bytes) -> Answer:
        gate = self._node.gate
        try:
            announcement = open_announcement(gate.seal.open(record), now=gate.clock(), network=gate.network)
        except RecordError as error:
            return Answer(refused=str(error)[:200])
        if announcement.peer_id != asker:
            return Answer(refused="the record is not the asker's own")
        keys = bytes.fromhex(announcement.public_key), bytes.fromhex(announcement.channel_key)
        near = _is_private(asker_address)
        addresses = tuple(dict.fromkeys(announcement.addresses))
        tries = await asyncio.gather(*(self._try(address, near, *keys) for address in addresses))
        return Answer(
            answered=tuple(address for address, ok in zip(addresses, tries, strict=True) if ok),
            silent=tuple(address for address, ok in zip(addresses, tries, strict=True) if not ok),
        )

    async def _try(self, address: str, near: bool, public_key: bytes, channel_key: bytes) -> bool:
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                literal = await resolved(address)
                if literal is None or (not near and not is_global(literal)):
                    return False
                await self._dial(literal, public_key, channel_key)
        except (SwarmError, OSError, TimeoutError, asyncio.IncompleteReadError):
            return False
        return True


async def resolved(address: str) -> str | None:
    """Turn "name:port" into "1.2.3.4:port", so that the address that is checked is the one that is dialled."""
    host, _, port = address.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=1)
    if not found:
        return None
    literal = str(found[0][4][0])
    return f"[{literal}]:{port}" if ":" in literal else f"{literal}:{port}"


def is_global(literal: str) -> bool:
    """Whether "1.2.3.4:port" is an address of the internet."""
    return ipaddress.ip_address(literal.rpartition(":")[0].strip("[]")).is_global


def _is_private(multiaddr: str) -> bool:
    """Whether a peer's multiaddr is of a private network or this machine; relayed ones are not."""
    parts = multiaddr.split("/")
    if "p2p-circuit" in parts or len(parts) < 3 or parts[1] not in {"ip4", "ip6"}:
        return False
    return not ipaddress.ip_address(parts[2]).is_global


async def _read(reader: asyncio.StreamReader, bytes_max: int) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > bytes_max:
        raise InvalidMessage("dial-back message", f"{length} bytes, at most {bytes_max} are allowed")
    return await reader.readexactly(length)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()
