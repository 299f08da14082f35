"""Announcements on one network: hints of strangers, and what two hosts really hear of each other."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from ipaddress import IPv4Address, IPv4Interface
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zeroconf.asyncio import AsyncServiceInfo

from swarm.access import EVERYBODY, Access, NetworkKey
from swarm.errors import BadConfiguration
from swarm.identity import Identity
from swarm.net import lan
from swarm.net.lan import (
    SERVICE,
    Hint,
    LanLimits,
    Sought,
    Watch,
    announced,
    browse,
    networks,
    tag_of,
    watching,
    ways_in,
)
from tests.support.bridge import Host, Wire, bridge, why_not

LIMITS = LanLimits()
PEER = Identity.generate().peer_id
OTHER = Identity.generate().peer_id
HERE = (IPv4Interface("192.168.1.7/24"),)
NEAR = IPv4Address("192.168.1.9")
MINE, THEIRS = Access(NetworkKey(bytes(32))), Access(NetworkKey(bytes([1]) * 32))
SOUGHT = Sought.of("mine", EVERYBODY, OTHER)
GOOD = {"network": "mine", "peer": PEER, "version": "1", "root": "ab" * 8}


def heard(
    text: bytes | None = None, *, addresses=(NEAR,), port=31331, sought=SOUGHT, name=None, where=HERE, **fields
) -> tuple[str, ...]:
    """The peers that are believed after one announcement. text: as it came; fields: others than the good ones."""
    watch = Watch(sought, where, LIMITS)
    take(watch, text, addresses, port, name, **fields)
    return watch.peers


def take(watch: Watch, text=None, addresses=(NEAR,), port=31331, name=None, **fields) -> None:
    name = name or f"{fields.get('peer', PEER)}.{SERVICE}"
    info = AsyncServiceInfo(SERVICE, f"x.{SERVICE}", properties=txt(**fields) if text is None else text)
    watch.take(name, info.text or b"", info.properties, list(addresses), port)


def txt(**fields) -> bytes:
    """The good fields with others over them, as DNS has them."""
    pairs = [(key, value) for key, value in (GOOD | fields).items() if value is not None]
    parts = [f"{key}=".encode() + (value if isinstance(value, bytes) else value.encode()) for key, value in pairs]
    return b"".join(bytes([len(part[:255])]) + part[:255] for part in parts)


# Hints ----------------------------------------------------------------------------------------------------------------


def test_good_announcement_becomes_an_address() -> None:
    assert heard() == (f"/ip4/192.168.1.9/tcp/31331/p2p/{PEER}",)
    assert heard(root=None) == heard(root="", later="version") == heard()


@pytest.mark.parametrize(
    "fields",
    [
        {"network": "other"},
        {"network": "mine\n"},
        {"network": None},
        {"network": tag_of("mine", MINE)},
        {"version": "2"},
        {"version": "1" * 200},
        {"version": "\u00b2"},
        {"root": "xyz"},
        {"peer": "12D3KooW"},
        {"peer": PEER + "\n"},
        {"peer": PEER, "name": f"{Identity.generate().peer_id}.{SERVICE}"},
        {"peer": OTHER},  # this node itself
        {"padding": "x" * 250, "more": "y" * 250},
        {"port": 0},
        {"port": 65536},
        {"addresses": ()},
    ],
)
def test_other_announcements_are_left_out(fields: dict[str, object]) -> None:
    assert heard(**fields) == ()


@pytest.mark.parametrize(
    "address",
    ["192.168.2.9", "10.0.0.1", "8.8.8.8", "127.0.0.1", "0.0.0.0", "224.0.0.251", "192.168.1.255", "192.168.1.0"],
)
def test_only_addresses_of_own_networks_are_believed(address: str) -> None:
    assert heard(addresses=[IPv4Address(address)]) == ()
    assert heard(addresses=[IPv4Address(address), NEAR]) == heard()


def test_address_on_a_public_network_is_not_believed() -> None:
    assert heard(addresses=[IPv4Address("8.8.8.9")], where=[IPv4Interface("8.8.8.8/24")]) == ()


def test_only_listed_peers_are_taken() -> None:
    assert heard(sought=Sought.of("mine", Access(allowed=frozenset([PEER])))) == heard()
    assert heard(sought=Sought.of("mine", Access(allowed=frozenset([OTHER])))) == ()


def test_tag_hides_the_name_behind_a_key() -> None:
    tags = {tag_of(name, access) for name in ("mine", "other") for access in (EVERYBODY, MINE, THEIRS)}
    assert len(tags) == 6
    assert "mine" not in tag_of("mine", MINE)
    assert heard(network=tag_of("mine", MINE), sought=Sought.of("mine", MINE)) == heard()
    assert heard(network=tag_of("mine", THEIRS), sought=Sought.of("mine", MINE)) == ()
    assert heard(sought=Sought.of("mine", MINE)) == ()


@given(
    st.one_of(
        st.binary(max_size=700),
        st.lists(st.binary(max_size=60), max_size=9).map(
            lambda parts: b"".join(bytes([len(part)]) + part for part in parts)
        ),
    ),
    st.lists(st.ip_addresses(v=4), max_size=20),
    st.integers(-1, 70000),
)
@settings(max_examples=300)
def test_random_text_is_never_believed(text: bytes, addresses: list[IPv4Address], port: int) -> None:
    assert heard(text, addresses=addresses, port=port) == ()


@given(
    st.dictionaries(st.sampled_from(sorted(GOOD)), st.one_of(st.none(), st.text(max_size=80), st.binary(max_size=80))),
    st.lists(st.ip_addresses(v=4) | st.ip_addresses(v=4, network="192.168.1.0/24"), max_size=20),
    st.integers(-1, 70000),
)
@settings(max_examples=300)
def test_whatever_is_believed_is_near(fields: dict[str, object], addresses: list[IPv4Address], port: int) -> None:
    for peer in heard(addresses=addresses, port=port, **fields):
        _, _, host, _, at, _, named = peer.split("/")
        assert (IPv4Address(host) in HERE[0].network, int(at), named) == (True, port, PEER)
        assert 0 < port < 65536


def test_eight_peers_are_taken_and_one_more_when_one_leaves() -> None:
    watch = Watch(SOUGHT, HERE, LIMITS)
    peers = [Identity.generate().peer_id for _ in range(LIMITS.peers_max + 1)]
    for peer in peers:
        take(watch, peer=peer)
    assert [address.rpartition("/")[2] for address in watch.peers] == peers[:-1]
    watch.hear(f"{peers[0]}.{SERVICE}".upper(), gone=True)
    take(watch, peer=peers[-1])
    assert [address.rpartition("/")[2] for address in watch.peers] == peers[1:]


def test_names_beyond_the_bound_are_left_out() -> None:
    watch = Watch(SOUGHT, HERE, LIMITS)
    for number in range(10 * LIMITS.names_max):
        watch.hear(f"{number}.{SERVICE}", gone=False)
    assert watch.waiting == LIMITS.names_max


# This host ------------------------------------------------------------------------------------------------------------


def test_networks_are_private_up_and_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        "wifi": ("192.168.1.7", "up,broadcast,running,multicast", True),
        "cable": ("169.254.3.4", "up,broadcast,running,multicast", True),
        "windows": ("172.16.0.4", "", True),
        "lo": ("127.0.0.1", "up,loopback,running", True),
        "internet": ("8.8.8.8", "up,broadcast,running,multicast", True),
        "carrier": ("100.64.0.1", "up,broadcast,running,multicast", True),
        "vpn": ("10.8.0.2", "up,pointopoint,running,multicast", True),
        "mute": ("10.9.0.2", "up,broadcast,running", True),
        "unplugged": ("10.10.0.2", "broadcast,multicast", False),
    }
    addresses = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address, netmask="255.255.255.0")]
        for name, (address, _, _) in kinds.items()
    }
    addresses["wifi"].append(SimpleNamespace(family=socket.AF_INET6, address="fe80::1%wifi", netmask=None))
    states = {name: SimpleNamespace(isup=up, flags=flags) for name, (_, flags, up) in kinds.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    assert [str(each) for each in networks()] == ["192.168.1.7/24", "169.254.3.4/24", "172.16.0.4/24"]


async def test_given_peers_need_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lan, "browse", None)
    assert await ways_in(("a",), "mine", EVERYBODY, lan=True) == ("a",)
    with pytest.raises(BadConfiguration, match="SWARM_INITIAL_PEERS"):
        await ways_in((), "mine", EVERYBODY, lan=False)


async def test_closed_port_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(where: object) -> None:
        raise OSError("no multicast here")

    monkeypatch.setattr(lan, "_opened", opened)
    monkeypatch.setattr(lan, "networks", lambda: HERE)
    assert await browse(SOUGHT, 0.1) == ()
    with pytest.raises(BadConfiguration, match="'mine' was found on this network"):
        await ways_in((), "mine", EVERYBODY, lan=True)


# Hosts on a bridge ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab() -> Iterator[tuple[list[Host], Wire]]:
    """Three hosts."""
    if why := why_not():
        pytest.skip(why)
    with bridge(3) as made:
        yield made


@asynccontextmanager
async def told(host: Host, peer: str, network: str = "mine", port: int = 31331) -> AsyncIterator[None]:
    """A node that announces itself."""
    with host.entered():
        telling = announced(Hint(network=network, peer=peer), port, [host.at])
        await telling.__aenter__()
    try:
        yield
    finally:
        await telling.__aexit__(None, None, None)


@asynccontextmanager
async def watched(host: Host, limits: LanLimits = LIMITS) -> AsyncIterator[Watch]:
    """A node that listens."""
    with host.entered():
        watching_it = watching(SOUGHT, [host.at], limits)
        watch = await watching_it.__aenter__()
    try:
        yield watch
    finally:
        await watching_it.__aexit__(None, None, None)


async def look(host: Host, sought: Sought = SOUGHT, within_s: float = 2.0) -> tuple[str, ...]:
    with host.entered():
        return await browse(sought, within_s, [host.at])


async def test_two_hosts_are_found_by_a_third(lab: tuple[list[Host], Wire]) -> None:
    (first, second, third), _ = lab
    peers = [Identity.generate().peer_id for _ in range(2)]
    async with told(first, peers[0]), told(second, peers[1], port=4001):
        for _ in range(5):
            found = await look(third)
            if len(found) == 2:
                break
    assert set(found) == {f"/ip4/10.78.0.1/tcp/31331/p2p/{peers[0]}", f"/ip4/10.78.0.2/tcp/4001/p2p/{peers[1]}"}
    assert await look(third, within_s=0.5) == (), "they have said goodbye"


async def test_peer_on_the_same_host_is_found(lab: tuple[list[Host], Wire]) -> None:
    (first, _, _), _ = lab
    async with told(first, PEER):
        assert await look(first) == (f"/ip4/10.78.0.1/tcp/31331/p2p/{PEER}",)


@pytest.mark.long
async def test_other_names_and_keys_see_nothing(lab: tuple[list[Host], Wire]) -> None:
    (first, second, third), wire = lab
    keyed = tag_of("mine", MINE)
    async with told(first, PEER, "mine"), told(second, OTHER, keyed):
        wire.mdns()
        for sought in (Sought.of("other", EVERYBODY), Sought.of("mine", THEIRS), Sought.of("other", MINE)):
            assert await look(third, sought, within_s=0.7) == ()
        assert await look(third, Sought.of("mine", MINE)) == (f"/ip4/10.78.0.2/tcp/31331/p2p/{OTHER}",)
    assert any(keyed.encode() in packet for packet in wire.mdns())


async def test_watch_hears_a_peer_come_and_go(lab: tuple[list[Host], Wire]) -> None:
    (first, second, _), _ = lab
    async with watched(second) as watch:
        async with told(first, PEER):
            assert await watch.news(5.0)
            assert watch.peers == (f"/ip4/10.78.0.1/tcp/31331/p2p/{PEER}",)
        assert await watch.news(5.0)
        assert watch.peers == ()


async def test_watch_asks_anew_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, again = [], asyncio.Event()

    class Browser:
        """Asks when it is made."""

        def __init__(self, *_: object, **__: object) -> None:
            asked.append(self)
            if len(asked) > 1:
                again.set()

        async def __aenter__(self) -> None:
            pass

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("zeroconf.asyncio.AsyncServiceBrowser", Browser)
    asking = asyncio.create_task(Watch(SOUGHT, HERE, LanLimits(again_s=0.01)).ask(SimpleNamespace(zeroconf=None)))
    async with asyncio.timeout(60):
        await again.wait()
    asking.cancel()
    await asyncio.wait((asking,))


async def test_strange_packets_do_not_end_a_watch(lab: tuple[list[Host], Wire]) -> None:
    (first, second, third), _ = lab
    service = b"\x06_swarm\x04_tcp\x05local\x00"
    with third.entered():
        stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with closing(stranger):
        stranger.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, third.at.ip.packed)
        async with watched(second) as watch:
            for name in (b"\x01x\x06_SWARM\x04_tcp\x05local\x00", b"\x3f" + bytes(range(63)) + service):
                record = service + b"\x00\x0c\x00\x01\x00\x00\x11\x94" + len(name).to_bytes(2, "big") + name
                header = b"\x00\x00\x84\x00\x00\x00\x00\x01\x00\x00\x00\x00"  # one answer
                stranger.sendto(header + record, ("224.0.0.251", 5353))
            stranger.sendto(bytes(range(256)), ("224.0.0.251", 5353))
            async with told(first, PEER):
                assert await watch.news(5.0)
                assert len(watch.peers) == 1


async def test_each_network_hears_the_address_there(lab: tuple[list[Host], Wire]) -> None:
    (first, second, _), _ = lab
    with bridge(1, third_byte=1, guests=[first]) as ((guest, other), wire):
        with first.entered():
            telling = announced(Hint(network="mine", peer=PEER), 31331, [first.at, guest.at])
            await telling.__aenter__()
        try:
            assert await look(second) == (f"/ip4/10.78.0.1/tcp/31331/p2p/{PEER}",)
            assert await look(other) == (f"/ip4/10.78.1.1/tcp/31331/p2p/{PEER}",)
            packets = wire.mdns()
            assert any(guest.at.ip.packed in packet for packet in packets)
            assert not any(first.at.ip.packed in packet for packet in packets)
        finally:
            await telling.__aexit__(None, None, None)
