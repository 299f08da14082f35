"""PCP (RFC 6887): requests of 24 and 60 bytes, answers of the same sizes and options behind them."""

import ipaddress
import socket
import struct
from collections.abc import Callable
from random import Random
from typing import TypeVar

from swarm.net.address import Tcp
from swarm.net.mapping.ask import Question, ask, connected
from swarm.net.mapping.gateway import Gateway
from swarm.net.mapping.limits import MappingLimits
from swarm.net.mapping.way import By, Malformed, Mapping, MappingFailed

Read = TypeVar("Read")

VERSION, OF_ANSWERS = 2, 0x80
ANNOUNCE, MAP = 0, 1  # opcodes
HEADER_BYTES, MAP_BYTES = 24, 60
REFUSALS = {  # RFC 6887, 7.4
    1: "it does not speak this version",
    2: "it does not allow it",
    3: "it calls the request malformed",
    4: "it does not know the request",
    5: "it does not know an option",
    6: "it calls an option malformed",
    7: "its network is down",
    8: "it has no port left now",
    9: "it does not know TCP",
    10: "this machine has too many ports",
    11: "it cannot give this port",
    12: "another NAT is between",
    13: "too many remote peers",
}


class Pcp:
    """As `Way`. A port keeps its nonce: the router lets nothing else renew or end its mapping."""

    by: By = "PCP"

    def __init__(self, gateway: Gateway, limits: MappingLimits, random: Random) -> None:
        self._gateway, self._limits, self._random = gateway, limits, random
        self._nonces: dict[int, bytes] = {}

    async def probe(self) -> None:
        """As `Way.probe`."""
        await self._ask(announce_request(self._gateway.local), read_announced, self._limits.probe_s)

    async def map(self, internal: int, external: int) -> Mapping:
        """As `Way.map`."""
        nonce = self._nonces.setdefault(internal, self._random.randbytes(12))
        request = map_request(self._gateway.local, nonce, internal, external, self._limits.lease_s)
        at, lifetime_s = await self._ask(request, lambda data: read_mapped(data, nonce, internal), self._limits.map_s)
        return Mapping(internal, at, self.by, lifetime_s)

    async def unmap(self, mapping: Mapping) -> None:
        """As `Way.unmap`."""
        nonce = self._nonces[mapping.internal]
        request = map_request(self._gateway.local, nonce, mapping.internal, 0, 0)
        await self._ask(request, lambda data: read_mapped(data, nonce, mapping.internal), self._limits.unmap_s)

    async def _ask(self, request: bytes, read: Callable[[bytes], Read], within_s: float) -> Read:
        question = Question(self._gateway.host, read, self._limits)
        sock = connected(self._gateway.host, self._gateway.pcp_port)
        return await ask(self.by, sock, [(request, None)], question, within_s, self._limits)


def announce_request(local: str) -> bytes:
    """Ask whether the router speaks PCP. local: this machine's address."""
    return struct.pack("!BBHI16s", VERSION, ANNOUNCE, 0, 0, _mapped(local))


def map_request(local: str, nonce: bytes, internal: int, external: int, lifetime_s: int) -> bytes:
    """Ask for a port. lifetime_s: 0 ends the mapping, and external is 0 then."""
    header = struct.pack("!BBHI16s", VERSION, MAP, 0, lifetime_s, _mapped(local))
    return header + struct.pack("!12sB3xHH16s", nonce, socket.IPPROTO_TCP, internal, external, _mapped("0.0.0.0"))  # noqa: S104 - any


def read_announced(data: bytes) -> None:
    """Accept any answer of a router that speaks PCP, also that it does not know announcements. As `read_mapped`."""
    try:
        _read_header(data, ANNOUNCE)
    except MappingFailed:
        if data[0] != VERSION:
            raise


def read_mapped(data: bytes, nonce: bytes, internal: int) -> tuple[Tcp, int]:
    """Return the external address and the lifetime in seconds. Raises Malformed and MappingFailed."""
    lifetime_s = _read_header(data, MAP)
    if len(data) < MAP_BYTES:
        raise Malformed(f"{len(data)} bytes instead of {MAP_BYTES}")
    its_nonce, protocol, of, port, host = struct.unpack("!12sB3xHH16s", data[HEADER_BYTES:MAP_BYTES])
    if (its_nonce, protocol, of) != (nonce, socket.IPPROTO_TCP, internal):
        raise Malformed("for another port")
    address = ipaddress.IPv6Address(host)
    return Tcp(str(address.ipv4_mapped or address), port), lifetime_s


def _read_header(data: bytes, opcode: int) -> int:
    """Return the lifetime. A router that only knows NAT-PMP answers in version 0 (RFC 6886, 3.5)."""
    if len(data) >= 4 and data[0] == 0:
        raise MappingFailed("PCP", "the router speaks NAT-PMP only")
    if not HEADER_BYTES <= len(data) <= 1100 or len(data) % 4:  # RFC 6887, 7
        raise Malformed(f"{len(data)} bytes")
    version, of, _, result, lifetime_s = struct.unpack("!BBBBI", data[:8])
    if version != VERSION:
        raise Malformed(f"version {version}")
    if of != OF_ANSWERS | opcode:
        raise Malformed(f"opcode {of} instead of {OF_ANSWERS | opcode}")
    if result:
        raise MappingFailed("PCP", f"the router refuses: {REFUSALS.get(result, f'result {result}')}")
    return int(lifetime_s)


def _mapped(host: str) -> bytes:
    return ipaddress.IPv6Address(f"::ffff:{host}").packed
