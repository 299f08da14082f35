"""Which addresses make sense (docs/adr/0009-which-addresses-make-sense.md).

A swarm is public to a member whose ways into it are all public: there, loopback, private and link-local addresses lead
somewhere else for each member, and are neither dialled nor counted. A member that came in through such an address is on
that network, and they make sense to it. Multicast and unspecified ones never do.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

from swarm.net.address import dialable


def makes_sense(host: str, public: bool) -> bool:
    """Tell whether to dial a host: a literal address, or a name, which is judged again once it is resolved."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return not (public and host.lower().rstrip(".") == "localhost")
    if address.is_multicast or address.is_unspecified:
        return False
    return not public or all(map(_is_global, (address, *_embedded(address))))


def _is_global(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    inside = address.version == 6 and address in ipaddress.ip_network("64:ff9b:1::/48")  # of a translator's own network
    return address.is_global and not inside and not getattr(address, "is_site_local", False)


def _embedded(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """Return the addresses of IPv4 that translators, tunnels and hosts make of one of IPv6."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found = [each for each in (address.ipv4_mapped, address.sixtofour) if each is not None]
    if any(address in ipaddress.ip_network(network) for network in ("64:ff9b::/96", "::/96")):
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return found


def sensible(addresses: Sequence[str], public: bool) -> tuple[str, ...]:
    """Return those of a record's addresses that can be dialled and make sense."""
    return tuple(str(address) for address in dialable(addresses) if makes_sense(address.host, public))


def is_told_well(multiaddr: str, public: bool) -> bool:
    """Tell whether to dial a peer at an address that another peer has told. Nodes tell literal ones."""
    parts = multiaddr.split("/")
    return len(parts) > 2 and (makes_sense(parts[2], public) if parts[1] in {"ip4", "ip6"} else not public)


async def is_public(ways: Sequence[str]) -> bool:
    """Tell whether all these multiaddrs, of which there must be one, lead to public addresses."""
    literals = await asyncio.gather(*map(_literals, ways))
    return any(literals) and all(makes_sense(host, public=True) for hosts in literals for host in hosts)


def network_of(host: str) -> str:
    """Return the network of a literal address, as an operator may have one: /16, or /32 of IPv6. A name is its own."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(ipaddress.ip_network((address, 16 if address.version == 4 else 32), strict=False))


async def literals(host: str, port: int) -> tuple[str, ...]:
    """Resolve a name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[4][0]) for address in found))


async def _literals(multiaddr: str) -> tuple[str, ...]:
    """Return the addresses that a multiaddr leads to: none if its name is unknown here."""
    parts = multiaddr.split("/")
    if len(parts) < 3 or parts[1] not in {"ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr"}:
        return ()
    try:
        async with asyncio.timeout(3.0):
            return await literals(parts[2], 0)
    except (OSError, TimeoutError, UnicodeError):
        return ()
