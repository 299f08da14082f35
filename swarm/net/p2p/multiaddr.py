"""libp2p's addresses, written and read."""

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from swarm.errors import BadConfiguration
from swarm.net.ports import EVERY, has_ipv6
from swarm.net.reach import literals


def multiaddr_of(host: str, port: int) -> str:
    """Write host and port as a multiaddr: /ip4/..., /ip6/... or /dns/.../tcp/port."""
    try:
        return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"
    except ValueError:
        return f"/ip4/{socket.gethostbyname(host)}/tcp/{port}" if host == "localhost" else f"/dns/{host}/tcp/{port}"


def where_to_listen(host: str, port: int) -> tuple[str, ...]:
    """Return the multiaddrs that listen at a host and port: libp2p needs one for each family."""
    if host == EVERY:
        return (multiaddr_of("0.0.0.0", port), *([multiaddr_of(EVERY, port)] if has_ipv6() else []))  # noqa: S104
    return (multiaddr_of(host, port),)


def port_of(multiaddr: str) -> int:
    """Return the TCP port in a multiaddr; 0 where it has none."""
    found = re.search(r"/tcp/(\d{1,5})", multiaddr)
    return int(found[1]) if found is not None else 0


def host_of(multiaddr: str) -> str:
    """Return the literal address from which a peer comes; "" for one that is relayed or has none."""
    parts = multiaddr.split("/")
    if "p2p-circuit" in parts or len(parts) < 3 or parts[1] not in {"ip4", "ip6"}:
        return ""
    try:
        return str(ipaddress.ip_address(parts[2]))
    except ValueError:
        return ""


def text_of(address: bytes) -> str:
    """Write a multiaddr in bytes as text; "" for junk."""
    try:
        return str(Multiaddr(address))
    except Exception:  # noqa: BLE001 - the parser raises whatever it likes
        return ""


def first_host(address: bytes) -> str:
    """Return the host that a multiaddr in bytes is dialled at, an address or a name; "" for another kind, or none."""
    parts = _parts(address)
    return parts[2] if parts else ""


async def literal_addresses(
    addresses: Iterable[bytes], makes_sense: Callable[[str], bool], names_max: int = 2
) -> list[bytes]:
    """Return multiaddrs in bytes with literal hosts that make sense: names are resolved here, then judged.

    makes_sense: of a literal address. names_max: more are left out. Left out is also what leads through a relay.
    """
    usable, names = [], 0
    for address in addresses:
        if not (parts := _parts(address)):
            continue
        _, kind, host, *rest = parts
        hosts: Sequence[str] = (host,)
        if kind.startswith("dns"):
            names += 1
            try:
                hosts = await literals(host, 0) if names <= names_max else ()
            except (OSError, UnicodeError):
                continue
        for literal in filter(makes_sense, hosts):
            with suppress(Exception):  # some that are read cannot be written, in many ways
                text = "/".join(["", f"ip{ipaddress.ip_address(literal).version}", literal, *rest])
                usable.append(Multiaddr(text).to_bytes())
    return usable


def _parts(address: bytes) -> list[str]:
    """Return the parts of a multiaddr that is dialled at a host; none for another one, or for junk."""
    parts = text_of(address).split("/")
    is_dialled = len(parts) > 2 and parts[1] in {"ip4", "ip6", "dns", "dns4", "dns6"} and "p2p-circuit" not in parts
    return parts if is_dialled else []


def split_multiaddr(text: str) -> tuple[PeerID, Multiaddr]:
    """Split "/ip4/.../tcp/.../p2p/12D3..." into peer id and address. Raises BadConfiguration."""
    address, found, peer = text.rpartition("/p2p/")
    try:
        if not found or not address:
            raise ValueError("it has no address, or no /p2p/ part")
        peer_id = PeerID.from_base58(peer)
        if (len(peer_id.to_bytes()), peer_id.to_bytes()[:2]) not in {(38, b"\x00\x24"), (34, b"\x12\x20")}:
            raise ValueError(f"{peer!r} is no peer id")
        return peer_id, Multiaddr(address)
    except Exception as error:  # noqa: BLE001 - the parsers raise whatever they like
        raise BadConfiguration(
            f"peer address {text!r}", f"{error}; it should look like /ip4/1.2.3.4/tcp/31337/p2p/12D3KooW..."
        ) from None
