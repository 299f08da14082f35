"""What routers answer, read without a network: the right bytes, refusals, and everything else."""

import contextlib
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.net.address import Tcp
from swarm.net.mapping import Mapping, MappingLimits, natpmp, pcp, upnp
from swarm.net.mapping.gateway import from_linux, from_macos
from swarm.net.mapping.plan import Lease, is_lost, next_s
from swarm.net.mapping.way import Malformed, MappingFailed, check

LIMITS = MappingLimits()
NONCE = b"0123456789ab"
ROUTER = "192.168.1.1"
OUTER = bytes((8, 8, 4, 4))

ADDRESS = bytes.fromhex("00 80 0000 00000e10") + OUTER
PORT = bytes.fromhex("00 82 0000 00000e10 7a62 7a63 00000e10")  # 31330 is 31331 outside, for an hour
PCP_PORT = bytes.fromhex("02 81 00 00 00000e10 00000e10") + bytes(12) + NONCE
PCP_PORT += bytes.fromhex("06 000000 7a62 7a63") + bytes(10) + b"\xff\xff" + OUTER
FOUND = (
    b"HTTP/1.1 200 OK\r\nST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n"
    b"Location: http://192.168.1.1:5000/root.xml\r\n\r\n"
)
ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
wlan0\t00000000\t0100A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
tun0\t00000000\t00000000\t0001\t0\t0\t50\t00000000\t0\t0\t0
eth0\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
"""
MACOS = "   route to: default\ndestination: default\n       mask: default\n    gateway: 192.168.1.1\n  interface: en0\n"

READERS = {
    "address": (natpmp.read_address, ADDRESS),
    "port": (lambda data: natpmp.read_mapped(data, 31330), PORT),
    "PCP": (lambda data: pcp.read_mapped(data, NONCE, 31330), PCP_PORT),
    "announcement": (pcp.read_announced, b"\x02\x80" + bytes(22)),
    "search": (lambda data: upnp.read_search(data, ROUTER), FOUND),
    "child": (upnp.read_child, b'{"host": "8.8.4.4", "port": 31331}'),
}
each_reader = pytest.mark.parametrize(("read", "right"), READERS.values(), ids=READERS)


def test_requests_are_as_the_rfcs_have_them() -> None:
    assert natpmp.address_request() == bytes(2)
    assert natpmp.map_request(31330, 31331, 3600) == bytes.fromhex("00 02 0000 7a62 7a63 00000e10")
    assert pcp.announce_request("192.168.1.2") == b"\x02" + bytes(17) + b"\xff\xff\xc0\xa8\x01\x02"
    request = pcp.map_request("192.168.1.2", NONCE, 31330, 31331, 3600)
    assert request[:8] == bytes.fromhex("02 01 0000 00000e10")
    assert request[24:] == NONCE + bytes.fromhex("06 000000 7a62 7a63") + bytes(10) + b"\xff\xff" + bytes(4)


def test_right_answers_are_read() -> None:
    assert [read(right) for read, right in READERS.values()] == [
        "8.8.4.4",
        (31331, 3600),
        (Tcp("8.8.4.4", 31331), 3600),
        None,
        "http://192.168.1.1:5000/root.xml",
        upnp.Answer(host="8.8.4.4", port=31331),
    ]


@each_reader
@given(data=st.data())
def test_hostile_answers_raise_nothing_else(read, right: bytes, data: st.DataObject) -> None:
    broken = bytearray(right)
    for at in data.draw(st.lists(st.integers(0, len(right) - 1), max_size=4)):
        broken[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(right)))
    hostile = data.draw(st.one_of(st.binary(max_size=2048), st.just(bytes(broken)), st.just(bytes(broken[:cut]))))
    with contextlib.suppress(Malformed, MappingFailed):
        read(hostile)


@pytest.mark.parametrize(("read", "right"), [pair for name, pair in READERS.items() if name != "search"])
def test_no_part_of_an_answer_is_an_answer(read, right: bytes) -> None:
    for cut in range(len(right)):
        with pytest.raises((Malformed, MappingFailed)):
            read(right[:cut])


@pytest.mark.parametrize(("result", "why"), [(2, "does not allow"), (3, "no external address"), (77, "result 77")])
def test_a_refusal_by_nat_pmp_says_why(result: int, why: str) -> None:
    for answer in (PORT[:2] + struct.pack("!H", result) + PORT[4:], PORT[:2] + struct.pack("!H", result)):
        with pytest.raises(MappingFailed, match=why):
            natpmp.read_mapped(answer, 31330)


@pytest.mark.parametrize(("result", "why"), [(2, "does not allow"), (8, "no port left"), (200, "result 200")])
def test_a_refusal_by_pcp_says_why(result: int, why: str) -> None:
    with pytest.raises(MappingFailed, match=why):
        pcp.read_mapped(PCP_PORT[:3] + bytes((result,)) + PCP_PORT[4:], NONCE, 31330)


def test_an_answer_for_another_request_is_none() -> None:
    with pytest.raises(Malformed, match="for port 31330"):
        natpmp.read_mapped(PORT, 31331)
    for nonce, port in ((b"another-nonc", 31330), (NONCE, 31331)):
        with pytest.raises(Malformed, match="another port"):
            pcp.read_mapped(PCP_PORT, nonce, port)


def test_a_router_of_nat_pmp_does_not_speak_pcp() -> None:
    unsupported = bytes.fromhex("00 80 0001 00000e10")
    with pytest.raises(MappingFailed, match="NAT-PMP only"):
        pcp.read_announced(unsupported)


def test_a_router_that_knows_no_announcements_speaks_pcp() -> None:
    pcp.read_announced(bytes.fromhex("02 80 00 04") + bytes(20))


@pytest.mark.parametrize(
    "location",
    [
        b"http://192.168.1.9:5000/root.xml",
        b"https://192.168.1.1/root.xml",
        b"http://192.168.1.1@192.168.1.9/",
        b"http://user@192.168.1.1/",
        b"http://192.168.1.1:99999/",
        b"http://[192.168.1.1/",
        b"http://192.168.1.1/" + b"x" * 300,
        b"http://192.168.1.1/a b",
        b"file:///etc/passwd",
        b"",
    ],
)
def test_a_description_elsewhere_is_not_fetched(location: bytes) -> None:
    with pytest.raises(Malformed, match="location"):
        upnp.read_search(FOUND.replace(b"http://192.168.1.1:5000/root.xml", location), ROUTER)


def test_a_device_that_is_no_router_is_left_out() -> None:
    with pytest.raises(Malformed, match="no router"):
        upnp.read_search(FOUND.replace(b"InternetGatewayDevice", b"MediaServer"), ROUTER)


@pytest.mark.parametrize("host", ["192.168.1.5", "100.64.0.1", "127.0.0.1", "0.0.0.0", "224.0.0.1", "::1", "x", ""])
def test_a_mapping_without_a_global_address_does_not_count(host: str) -> None:
    with pytest.raises(MappingFailed, match="another NAT"):
        check(Mapping(31330, Tcp(host, 31330), "PCP", 3600), LIMITS)


@pytest.mark.parametrize(("port", "lifetime_s", "why"), [(0, 3600, "port 0"), (31330, 59, "lease of 59 s")])
def test_a_mapping_of_no_use_does_not_count(port: int, lifetime_s: int, why: str) -> None:
    with pytest.raises(MappingFailed, match=why):
        check(Mapping(31330, Tcp("8.8.4.4", port), "UPnP", lifetime_s), LIMITS)


def test_the_gateway_is_of_the_default_route_with_the_lowest_metric() -> None:
    words = struct.unpack("<I", socket.inet_aton("192.168.1.1"))[0]
    native = struct.unpack("=I", socket.inet_aton("192.168.1.1"))[0]
    assert from_linux(ROUTES.replace(f"{words:08X}", f"{native:08X}")) == "192.168.1.1"
    assert from_linux(ROUTES.splitlines()[0]) is None
    assert from_macos(MACOS) == "192.168.1.1"
    assert from_macos(MACOS.replace("192.168.1.1", "utun3")) is None


@given(st.text())
def test_strange_routes_are_no_gateway(text: str) -> None:
    from_linux(text)
    from_macos(text)


def test_a_lease_is_renewed_early_and_given_up_late() -> None:
    lease = Lease(at_s=1000.0, lifetime_s=3600)
    assert next_s(None, 1000.0, LIMITS) == LIMITS.again_s
    assert next_s(lease, 1000.0, LIMITS) == LIMITS.renew_s
    assert next_s(Lease(1000.0, 90), 1000.0, LIMITS) == 45.0
    assert next_s(lease.failed(), 1000.0, LIMITS) == LIMITS.retry_s
    assert next_s(Lease(1000.0, 90).failed(), 1085.0, LIMITS) == 5.0
    assert not is_lost(lease.failed().failed(), 1240.0, LIMITS)
    assert is_lost(lease.failed().failed().failed(), 1250.0, LIMITS)
    assert is_lost(lease, 4600.0, LIMITS)
