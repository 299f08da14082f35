"""libp2p's addresses, written and read."""

import ipaddress
import re
import socket

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from swarm.errors import BadConfiguration
from swarm.net.ports import EVERY, has_ipv6


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
