"""The helping side of dial-back: this node tries whether an asker can be reached, and dials nobody else.

It dials the ways in the asker's own record, with the keys in that record, and two ports at the host from which the
asker comes; the libp2p port also at the record's hosts and at one that the asker names. All of them must prove the
asker's identity. A private or loopback address is dialled only if the asker itself comes from such a network. So it is
no port scanner for hire.
"""

import asyncio
import binascii
import ipaddress
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable

import structlog
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from pydantic import ValidationError

from swarm.dht.dialback import (
    FORMER,
    PROTOCOL,
    Answer,
    DialBackLimits,
    Offer,
    Request,
    read_message,
    write_message,
)
from swarm.dht.node import SwarmNode
from swarm.dht.probe import peer_at
from swarm.dht.rates import RateLimit
from swarm.dht.records import Announcement
from swarm.dht.sealing import SEAL_BYTES, Purpose
from swarm.errors import RecordError, SwarmError
from swarm.identity import peer_id_of
from swarm.net.address import Tcp, ViaAnchor, dialable, parse
from swarm.net.channel import ignore
from swarm.net.dialer import Dial
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.p2p import host_of
from swarm.net.reach import literals, makes_sense

_log = structlog.get_logger("swarm.dialback")


async def serve_dial_back(
    node: SwarmNode,
    me: Endpoint,
    dial: Dial,
    offer: Callable[[], Offer | None] = lambda: None,
    limits: DialBackLimits = DialBackLimits(),  # noqa: B008 - frozen
) -> None:
    """Help others on this node from now on. offer: where they may moor, if this node is an anchor."""
    helper = Helper(node, me, dial, offer, limits)
    await node.handle_stream(PROTOCOL, helper.handle)
    await node.handle_stream(FORMER, helper.handle_former)


class Helper:
    """Dials askers back."""

    def __init__(
        self,
        node: SwarmNode,
        me: Endpoint,
        dial: Dial,
        offer: Callable[[], Offer | None] = lambda: None,
        limits: DialBackLimits = DialBackLimits(),  # noqa: B008 - frozen
    ) -> None:
        self._node, self._me, self._dial, self._offer, self._limits = node, me, dial, offer, limits
        self._rates = RateLimit(limits.per_s, limits.burst)
        self._helping = 0
        self._streams: Counter[str] = Counter()  # by asker

    async def handle(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one stream. No behaviour of the peer raises."""
        await self._serve(info, reader, writer, Request.model_validate_json)

    async def handle_former(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The same, for an asker of version 0.2 or before, which sends its bare record."""
        await self._serve(info, reader, writer, lambda record: Request(record=b64encode(record).decode()))

    async def _serve(
        self,
        info: StreamInfo,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        read: Callable[[bytes], Request],
    ) -> None:
        asker = str(info.peer_id.to_base58())
        limits = self._limits
        self._streams[asker] += 1
        try:
            if self._streams.total() > limits.streams_max or self._streams[asker] > limits.streams_per_asker:
                await self._send(writer, Answer(refused="this node helps enough others; ask another", busy=True))
                return
            async with asyncio.timeout(self._limits.request_timeout_s):
                # Read even a request that will be refused: a reset would lose the answer.
                request = await read_message(reader, self._limits.request_bytes_max + SEAL_BYTES)
            answer = await self._answer(asker, str(info.addr), request, read)
            await self._send(writer, answer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, SwarmError) as error:
            _log.debug("dial-back request failed", asker=asker, why=str(error))
        finally:
            self._streams[asker] -= 1
            if not self._streams[asker]:
                del self._streams[asker]
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        """Send an answer, and end the stream."""
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                sealed = self._node.gate.seal.close(answer.model_dump_json().encode(), Purpose.ANSWER)
                await write_message(writer, sealed)
        finally:
            writer.close()

    async def _answer(self, asker: str, multiaddr: str, sealed: bytes, read: Callable[[bytes], Request]) -> Answer:
        if not self._rates.take(asker, asyncio.get_running_loop().time()):
            return Answer(refused="too many requests; slow down", busy=True)
        if self._helping >= self._limits.helping_max:
            return Answer(refused="this node helps enough others; ask another", busy=True)
        self._helping += 1
        try:
            gate = self._node.gate
            request = read(gate.seal.open(sealed))
            record = gate.own_record(asker, b64decode(request.record)) if request.record else None
            return await self._try_all(asker, request, record, host_of(multiaddr))
        except RecordError as error:
            return Answer(refused=str(error)[:200])
        except (ValidationError, binascii.Error):
            return Answer(refused="the request cannot be read")
        finally:
            self._helping -= 1

    async def _try_all(self, asker: str, request: Request, record: Announcement | None, host: str) -> Answer:
        near = host != "" and not ipaddress.ip_address(host).is_global
        addresses = tuple(dict.fromkeys(record.addresses)) if record is not None else ()
        vias = tuple(way for way in record.ways if isinstance(way, ViaAnchor)) if record is not None else ()
        hosts = dict.fromkeys(each for each in (host, request.p2p_host) if each)
        hosts |= dict.fromkeys(at.host for at in dialable(addresses))
        async with asyncio.TaskGroup() as group:
            direct = [group.create_task(self._reaches(record, address, near)) for address in addresses]
            through = [group.create_task(self._meets(record, via)) for via in vias]
            outside = group.create_task(self._has_data_port(record, host, request.data_port))
            p2p = [group.create_task(self._has_p2p_port(asker, each, request.p2p_port, near)) for each in hosts]
        met = {via.peer for via, task in zip(vias, through, strict=True) if task.result()}
        keys = {key for key, _, _ in record.anchors if peer_id_of(bytes.fromhex(key)) in met} if record else set()
        return Answer(
            answered=tuple(address for address, task in zip(addresses, direct, strict=True) if task.result()),
            silent=tuple(address for address, task in zip(addresses, direct, strict=True) if not task.result()),
            through=tuple(sorted(keys)),
            outside=outside.result(),
            p2p=any(task.result() for task in p2p),
            seen=host,
            anchor=self._offer(),
        )

    async def _reaches(self, record: Announcement | None, address: str, near: bool) -> bool:
        """Whether an address of the record leads to the asker."""
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                literal = await resolved(address)
                if record is None or literal is None or (not near and not is_global(literal)):
                    return False
                await self._prove(record, parse(literal))
        except (SwarmError, OSError, TimeoutError, ValueError):
            return False
        return True

    async def _meets(self, record: Announcement | None, via: ViaAnchor) -> bool:
        """Whether an anchor of the record leads to the asker."""
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                if record is not None:
                    await self._prove(record, via)
        except (SwarmError, OSError, TimeoutError):
            return False
        return record is not None

    async def _has_data_port(self, record: Announcement | None, host: str, port: int) -> bool:
        """Whether the asker listens at the host from which it comes: its router may forward the port."""
        if not host or port < 1024 or record is None:
            return False
        try:
            async with asyncio.timeout(self._limits.port_timeout_s):
                await self._prove(record, Tcp(host, port))
        except (SwarmError, OSError, TimeoutError):
            return False
        return True

    async def _has_p2p_port(self, asker: str, host: str, port: int, near: bool) -> bool:
        """Whether the asker's libp2p node listens there, and not that of another machine behind the same router."""
        if port < 1024:
            return False
        try:
            async with asyncio.timeout(self._limits.port_timeout_s):
                literal = await resolved(str(Tcp(host, port)))
                if literal is None or (not near and not is_global(literal)):
                    return False
                return await peer_at(parse(literal)) == asker
        except (SwarmError, OSError, TimeoutError, ValueError):
            return False

    async def _prove(self, record: Announcement, way: Tcp | ViaAnchor) -> None:
        """Open a channel as clients do, up to both sides' proven identities. Raises NetworkError."""
        remote = Remote(record.peer_id, bytes.fromhex(record.channel_key))
        channel = await self._dial(way, remote, self._me, ignore)
        channel.close()


async def resolved(address: str) -> str | None:
    """Turn "name:port" into "1.2.3.4:port", so that the address that is checked is the one that is dialled."""
    host, _, port = address.rpartition(":")
    found = await literals(host.strip("[]"), int(port))
    return str(Tcp(found[0], int(port))) if found else None


def is_global(literal: str) -> bool:
    """Whether "1.2.3.4:port" is an address of the internet that leads to no private one."""
    return makes_sense(literal.rpartition(":")[0], public=True)
