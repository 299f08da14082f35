"""Dial-back: before a server calls itself online, another node tries to reach it as a client would.

The asker sends its own signed record over a libp2p stream, which proves its peer id. The helper dials the addresses in
the record, with the keys in the record, and says which answered. It dials nothing else: not for others, not what is no
address of the record, and no private or loopback address unless the asker itself comes from such a network; so it is no
port scanner for hire.

In a private swarm record and answer are sealed: strangers' nodes, which anybody's routing table may hold, can neither
read where a server is nor tell it that it cannot be reached.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.dht.limits import RateLimit, TooBusy
from swarm.dht.node import SwarmNode
from swarm.dht.records import ADDRESSES_MAX, RECORD_BYTES_MAX, SignedAnnouncement, open_announcement
from swarm.dht.sealing import ANSWER, SEAL_BYTES
from swarm.errors import InvalidMessage, RecordError, SwarmError, Unreachable
from swarm.identity import peer_id_of
from swarm.net.address import parse
from swarm.net.carriers.tcp import dial
from swarm.net.channel import ignore
from swarm.net.endpoint import Endpoint, Remote

PROTOCOL = "/swarm/dial-back/1"
DIAL_TIMEOUT_S = 5.0  # per address; they are dialled at the same time
REQUEST_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 12.0
ANSWER_BYTES_MAX = 4096
HELPING_MAX = 8  # askers at one time
STREAMS_MAX = 64  # opened by others at one time
RATE, BURST = 1 / 10, 3.0  # requests a second per asker
HELPERS_MAX = 3  # asked, until one answers
NEXT_HELPER_S = 2.0  # after which the next one is asked as well

Dial = Callable[[str, bytes, bytes], Awaitable[None]]
"""`dial(address, public_key, channel_key)`: connect to "host:port" and shake hands, or raise SwarmError or OSError."""

_log = structlog.get_logger("swarm.dialback")


class Answer(BaseModel):
    """What a helper found. `refused`: why it did not try, else empty."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    answered: tuple[str, ...] = Field(default=(), max_length=ADDRESSES_MAX)
    silent: tuple[str, ...] = Field(default=(), max_length=ADDRESSES_MAX)
    refused: str = Field(default="", max_length=200)


@dataclass(frozen=True, slots=True)
class DialledBack:
    """Which of a server's addresses the peer `helper` reached, and which not."""

    helper: str
    answered: tuple[str, ...]
    silent: tuple[str, ...]


def dialling_as(me: Endpoint) -> Dial:
    """Return a Dial that tries what clients do: a channel, up to both sides' proven identities."""

    async def try_once(address: str, public_key: bytes, channel_key: bytes) -> None:
        channel = await dial(parse(address), Remote(peer_id_of(public_key), channel_key), me, ignore)
        channel.close()

    return try_once


async def serve_dial_back(node: SwarmNode, dial: Dial) -> None:
    """Help others on this node from now on."""
    await node.handle_stream(PROTOCOL, _Helper(node, dial).handle)


async def ask_dial_back(node: SwarmNode, signed: SignedAnnouncement) -> DialledBack:
    """Let another node try to reach us. Raises Unreachable if no node helps.

    A helper that is slow, or stopped, is not waited for: after NEXT_HELPER_S the next one is asked as well.
    """
    reasons: list[str] = []
    asked: set[asyncio.Task[DialledBack]] = set()
    helpers = iter(node.neighbours()[:HELPERS_MAX])
    try:
        while True:
            helper = next(helpers, None)
            if helper is not None:
                asked.add(asyncio.create_task(_ask_one(node, helper, signed)))
            if not asked:
                break
            patience_s = NEXT_HELPER_S if helper is not None else None
            done, asked = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    return task.result()
                if not isinstance(error, (SwarmError, OSError, TimeoutError, asyncio.IncompleteReadError)):
                    raise error
                reasons.append(str(error) or type(error).__name__)
    finally:
        for task in asked:
            task.cancel()
        if asked:
            await asyncio.wait(asked)
    raise Unreachable("a node that dials us back", (), ANSWER_TIMEOUT_S, "; ".join(reasons)[:300] or "none is known")


async def _ask_one(node: SwarmNode, helper: str, signed: SignedAnnouncement) -> DialledBack:
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        answer = await _ask(node, helper, node.gate.seal.close(signed.data))
    if answer.refused:
        raise Unreachable(helper, (), 0.0, answer.refused)
    known = set(signed.announcement.addresses)
    return DialledBack(
        helper,
        tuple(address for address in answer.answered if address in known),
        tuple(address for address in answer.silent if address in known),
    )


async def _ask(node: SwarmNode, helper: str, record: bytes) -> Answer:
    reader, writer = await node.open_stream(helper, PROTOCOL)
    try:
        await _write(writer, record)
        answer = node.gate.seal.open(await _read(reader, ANSWER_BYTES_MAX), ANSWER)
        return Answer.model_validate_json(answer)
    except ValidationError:
        raise InvalidMessage("dial-back answer", f"from {helper}") from None
    finally:
        writer.close()


class _Helper:
    """The answering side."""

    def __init__(self, node: SwarmNode, dial: Dial) -> None:
        self._node, self._dial = node, dial
        self._rates = RateLimit(RATE, BURST)
        self._helping = self._streams = 0

    async def handle(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one stream, whatever the peer does."""
        asker = str(info.peer_id.to_base58())
        if self._streams >= STREAMS_MAX:
            writer.close()
            return
        self._streams += 1
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):  # read even what will be refused: a reset loses the answer
                record = await _read(reader, RECORD_BYTES_MAX + SEAL_BYTES)
            answer = await self._answer(asker, str(info.addr), record)
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await _write(writer, self._node.gate.seal.close(answer.model_dump_json().encode(), ANSWER))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, SwarmError) as error:
            _log.debug("dial-back request failed", asker=asker, why=str(error))
        finally:
            self._streams -= 1
            writer.close()

    async def _answer(self, asker: str, asker_address: str, record: bytes) -> Answer:
        try:
            self._rates.take(asker, asyncio.get_running_loop().time())
            if self._helping >= HELPING_MAX:
                raise TooBusy("this node helps enough others; ask another")
        except TooBusy as error:
            return Answer(refused=str(error))
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
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                literal = await _resolved(address)
                if literal is None or (not near and not _is_global(literal)):
                    return False
                await self._dial(literal, public_key, channel_key)
        except (SwarmError, OSError, TimeoutError, asyncio.IncompleteReadError):
            return False
        return True


async def _resolved(address: str) -> str | None:
    """Turn "name:port" into "1.2.3.4:port", so that what is checked is what is dialled."""
    host, _, port = address.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=1)
    if not found:
        return None
    literal = str(found[0][4][0])
    return f"[{literal}]:{port}" if ":" in literal else f"{literal}:{port}"


def _is_global(literal: str) -> bool:
    return ipaddress.ip_address(literal.rpartition(":")[0].strip("[]")).is_global


def _is_private(multiaddr: str) -> bool:
    """Tell whether a peer's multiaddr is of a private network or this machine; relayed ones are not."""
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
