"""What the three protocols have in common: a mapping, and the way to get one."""

import ipaddress
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, TypeAlias

from swarm.errors import NetworkError
from swarm.net.address import Tcp
from swarm.net.mapping.limits import MappingLimits
from swarm.net.reach import makes_sense

By: TypeAlias = Literal["PCP", "NAT-PMP", "UPnP"]


@dataclass(eq=False)
class MappingFailed(NetworkError):
    """The home router does not forward a port. by: the protocol in which it was asked."""

    says: ClassVar[str] = "no port by {by}: {why}"
    by: str
    why: str


@dataclass(frozen=True, slots=True)
class Mapping:
    """A TCP port of this machine that the router forwards. Equal ones differ at most in what is left of the lease."""

    internal: int
    external: Tcp
    by: By
    lifetime_s: int = field(compare=False)

    def __str__(self) -> str:
        return f"port {self.internal} is {self.external} outside ({self.by})"


class Way(Protocol):
    """One protocol, spoken with one router. Every method may also raise OSError."""

    by: By

    async def probe(self) -> None:
        """Return once the router has answered in this protocol; changes nothing there. Raises MappingFailed."""

    async def map(self, internal: int, external: int) -> Mapping:
        """Have a port forwarded, or its lease renewed. external: the port that is wished for, and may not be given.

        The mapping may be one that does not count (`check`). Raises MappingFailed.
        """

    async def unmap(self, mapping: Mapping) -> None:
        """Stop the forwarding of a port. Raises MappingFailed."""


class Malformed(ValueError):
    """An answer that cannot be one of the protocol's."""


def check(mapping: Mapping, limits: MappingLimits) -> None:
    """Raise MappingFailed for a mapping that does not count: nothing outside could use it."""
    host, port = mapping.external.host, mapping.external.port
    if not is_global(host):
        raise MappingFailed(mapping.by, f"the router's own address, {host!r}, is not global: it is behind another NAT")
    if not 0 < port <= 65535:
        raise MappingFailed(mapping.by, f"the router gave port {port}")
    if mapping.lifetime_s < limits.lease_s_min:
        raise MappingFailed(mapping.by, f"the router gave a lease of {mapping.lifetime_s} s")


def is_global(host: str) -> bool:
    """Tell whether a text is a literal IPv4 address that is global."""
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return makes_sense(host, public=True)
