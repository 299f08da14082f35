"""The parsers of answers on the local network: of the home router, and of others that announce themselves."""

from ipaddress import IPv4Address, IPv4Interface

from zeroconf import ServiceInfo

from swarm.access import EVERYBODY
from swarm.net.lan import SERVICE, LanLimits, Sought, Watch
from swarm.net.mapping import natpmp, pcp, upnp
from swarm.net.mapping.way import Malformed, MappingFailed
from tests.fuzz.parsers.base import ALICE, Parser

ROUTER = "192.168.1.1"
NONCE = b"0123456789ab"
OUTER = bytes((8, 8, 4, 4))
HERE = (IPv4Interface("192.168.1.7/24"),)
REFUSES = (Malformed, MappingFailed)


def _read_natpmp(data: bytes) -> object:
    """The first byte is not of the answer: it says which one is expected."""
    return natpmp.read_mapped(data[1:], 31330) if data[:1] > b"\x7f" else natpmp.read_address(data[1:])


def _read_pcp(data: bytes) -> object:
    if data[:1] > b"\x7f":
        return pcp.read_mapped(data[1:], NONCE, 31330)
    return pcp.read_announced(data[1:])


def _hear(data: bytes) -> object:
    """The text of an announcement, as DNS has it, of a host that is near."""
    watch = Watch(Sought.of("public", EVERYBODY), HERE, LanLimits())
    info = ServiceInfo(SERVICE, f"x.{SERVICE}", properties=data)
    watch.take(f"{ALICE.peer_id}.{SERVICE}", data, info.properties, [IPv4Address("192.168.1.9")], 31331)
    return watch.peers


def _txt(*fields: str) -> bytes:
    return b"".join(bytes([len(field)]) + field.encode() for field in fields)


def _all() -> tuple[Parser, ...]:
    address = b"\0\0\x80\0\0\0\0\x0e\x10" + OUTER
    port = b"\xff" + bytes.fromhex("00 82 0000 00000e10 7a62 7a63 00000e10")
    there = bytes.fromhex("02 81 00 00 00000e10 00000e10") + bytes(12) + NONCE
    there += bytes.fromhex("06 000000 7a62 7a63") + bytes(10) + b"\xff\xff" + OUTER
    found = (
        b"HTTP/1.1 200 OK\r\nST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n"
        b"Location: http://192.168.1.1:5000/root.xml\r\n\r\n"
    )
    hint = _txt("network=public", f"peer={ALICE.peer_id}", "version=1", "root=0123456789abcdef")
    return (
        Parser("nat-pmp", _read_natpmp, REFUSES, (port, address)),
        Parser("pcp", _read_pcp, REFUSES, (b"\xff" + there, b"\0\x02\x80" + bytes(22))),
        Parser("ssdp", lambda data: upnp.read_search(data, ROUTER), REFUSES, (found,)),
        Parser("upnp-child", upnp.read_child, REFUSES, (b'{"host": "8.8.4.4", "port": 31331}', b'{"why": "no"}')),
        Parser("lan-hint", _hear, (), (hint,)),
    )


PARSERS = _all()
