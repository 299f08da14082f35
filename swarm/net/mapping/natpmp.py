"""NAT-PMP (RFC 6886): requests of 2 and 12 bytes, answers of 12 and 16."""

import ipaddress
import struct
from collections.abc import Callable
from typing import TypeVar

from swarm.net.address import Tcp
from swarm.net.mapping.ask import Question, ask, connected
from swarm.net.mapping.gateway import Gateway
from swarm.net.mapping.limits import MappingLimits
from swarm.net.mapping.way import By, Malformed, Mapping, MappingFailed

Read = TypeVar("Read")

VERSION, OF_ANSWERS = 0, 128
ADDRESS, MAP_TCP = 0, 2  # opcodes
REFUSALS = {  # RFC 6886, 3.5
    1: "it does not speak this version",
    2: "it does not allow it",
    3: "it has no external address",
    4: "it has no port left",
    5: "it does not know the request",
}


class NatPmp:
    """As `Way`."""

    by: By = "NAT-PMP"

    def __init__(self, gateway: Gateway, limits: MappingLimits) -> None:
        self._gateway, self._limits = gateway, limits

    async def probe(self) -> None:
        """As `Way.probe`."""
        await self._ask(address_request(), read_address, self._limits.probe_s)

    async def map(self, internal: int, external: int) -> Mapping:
        """As `Way.map`."""
        limits = self._limits
        host = await self._ask(address_request(), read_address, limits.map_s)
        request = map_request(internal, external, limits.lease_s)
        port, lifetime_s = await self._ask(request, lambda data: read_mapped(data, internal), limits.map_s)
        return Mapping(internal, Tcp(host, port), self.by, lifetime_s)

    async def unmap(self, mapping: Mapping) -> None:
        """As `Way.unmap`."""
        request = map_request(mapping.internal, 0, 0)
        await self._ask(request, lambda data: read_mapped(data, mapping.internal), self._limits.unmap_s)

    async def _ask(self, request: bytes, read: Callable[[bytes], Read], within_s: float) -> Read:
        question = Question(self._gateway.host, read, self._limits)
        sock = connected(self._gateway.host, self._gateway.pcp_port)
        return await ask(self.by, sock, [(request, None)], question, within_s, self._limits)


def address_request() -> bytes:
    """Ask for the external address."""
    return struct.pack("!BB", VERSION, ADDRESS)


def map_request(internal: int, external: int, lifetime_s: int) -> bytes:
    """Ask for a port. lifetime_s: 0 ends the mapping, and external is 0 then."""
    return struct.pack("!BBHHHI", VERSION, MAP_TCP, 0, internal, external, lifetime_s)


def read_address(data: bytes) -> str:
    """Return the external address. Raises Malformed and MappingFailed."""
    _read_header(data, ADDRESS)
    if len(data) != 12:
        raise Malformed(f"{len(data)} bytes instead of 12")
    return str(ipaddress.IPv4Address(data[8:12]))


def read_mapped(data: bytes, internal: int) -> tuple[int, int]:
    """Return external port and lifetime in seconds; both are 0 for a mapping that ended. As `read_address`."""
    _read_header(data, MAP_TCP)
    if len(data) != 16:
        raise Malformed(f"{len(data)} bytes instead of 16")
    port: int
    of, port, lifetime_s = struct.unpack("!HHI", data[8:16])
    if of != internal:
        raise Malformed(f"for port {of} instead of {internal}")
    return port, lifetime_s


def _read_header(data: bytes, opcode: int) -> None:
    """Errors may be shorter than answers (RFC 6886, 3.5)."""
    if len(data) < 4:
        raise Malformed(f"{len(data)} bytes")
    version, of, result = struct.unpack("!BBH", data[:4])
    if version != VERSION:
        raise Malformed(f"version {version}")
    if of != OF_ANSWERS + opcode:
        raise Malformed(f"opcode {of} instead of {OF_ANSWERS + opcode}")
    if result:
        raise MappingFailed("NAT-PMP", f"the router refuses: {REFUSALS.get(result, f'result {result}')}")
