"""Which addresses make sense to whom."""

import pytest

from swarm.access import EVERYBODY
from swarm.dht.directory import Directory
from swarm.dht.store import MemoryStore
from swarm.errors import Unreachable
from swarm.identity import Identity
from swarm.net.address import parse
from swarm.net.carriers.tcp import dial
from swarm.net.channel import ignore
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.noise import ChannelKey
from swarm.net.reach import is_public, is_told_well, makes_sense
from tests.dht.support import NETWORK, ROOT, announcement

SENSELESS = ["0.0.0.0", "[::]", "224.0.0.1", "[ff02::1]"]
NEAR = ["127.0.0.1", "[::1]", "10.1.2.3", "192.168.0.9", "172.16.0.1", "169.254.1.1", "[fe80::1]", "[fd00::1]"]
NEAR += ["100.64.0.1", "[::ffff:127.0.0.1]", "localhost", "LOCALHOST."]
NEAR += [
    "[64:ff9b::7f00:1]",
    "[64:ff9b:1::1]",
    "[fec0::1]",
    "[2002:c0a8:101::1]",
    "[::127.0.0.1]",
]
FAR = ["8.8.8.8", "[64:ff9b::808:808]", "[2002:808:808::1]", "[2a00:1450:4001:82b::200e]", "example.org"]


@pytest.mark.parametrize("host", SENSELESS)
def test_some_addresses_make_no_sense_to_anybody(host: str) -> None:
    assert not makes_sense(host, public=False)


@pytest.mark.parametrize("host", NEAR)
def test_near_addresses_make_sense_in_a_local_swarm_only(host: str) -> None:
    assert makes_sense(host, public=False)
    assert not makes_sense(host, public=True)


@pytest.mark.parametrize(
    ("multiaddr", "public", "private"),
    [
        ("/ip4/8.8.8.8/tcp/1", True, True),
        ("/ip4/169.254.169.254/tcp/80", False, True),
        ("/ip6/::1/tcp/1", False, True),
        ("/dns4/localhost/tcp/1", False, True),
        ("/ip4/0.0.0.0/tcp/1", False, False),
        ("/ip4", False, False),
    ],
)
def test_peers_are_dialled_at_told_addresses_that_make_sense(multiaddr: str, public: bool, private: bool) -> None:
    assert is_told_well(multiaddr, public=True) == public
    assert is_told_well(multiaddr, public=False) == private


@pytest.mark.parametrize("host", FAR)
def test_public_addresses_always_make_sense(host: str) -> None:
    assert makes_sense(host, public=False)
    assert makes_sense(host, public=True)


@pytest.mark.parametrize(
    ("ways", "public"),
    [
        (["/ip4/8.8.8.8/tcp/1/p2p/x"], True),
        (["/ip6/2a00:1450:4001:82b::200e/tcp/1/p2p/x", "/ip4/8.8.8.8/tcp/1"], True),
        (["/ip4/8.8.8.8/tcp/1/p2p/x", "/ip4/192.168.0.9/tcp/1/p2p/x"], False),
        (["/ip4/127.0.0.1/tcp/1/p2p/x"], False),
        (["/dns4/localhost/tcp/1/p2p/x"], False),
        (["/ip4/0.0.0.0/tcp/31331"], False),
        (["nonsense"], False),
        ([], False),
    ],
)
async def test_a_swarm_is_public_if_all_ways_into_it_are(ways: list[str], public: bool) -> None:
    assert await is_public(ways) is public


@pytest.mark.parametrize("public", [False, True])
async def test_a_public_swarms_readers_leave_out_addresses_that_are_near(public: bool) -> None:
    store = MemoryStore.make(NETWORK, lambda: 1_800_000_000.0)
    for name, addresses in (
        (b"a", ("127.0.0.1:1",)),
        (b"b", ("10.0.0.1:1", "8.8.8.8:1")),
        (b"c", ()),
        (b"d", ("0.0.0.0:1",)),
    ):
        owner = Identity(name * 32)
        server = Directory(store, identity=owner, network=NETWORK, clock=store.gate.clock)
        await server.announce(announcement(owner, addresses=addresses))
    reader = Directory(store, identity=None, network=NETWORK, clock=store.gate.clock, public=public)
    found = sorted(server.announcement.addresses for server in await reader.servers(ROOT, 12))
    assert found == ([(), ("8.8.8.8:1",)] if public else [(), ("10.0.0.1:1", "8.8.8.8:1"), ("127.0.0.1:1",)])


@pytest.mark.parametrize("address", ["127.0.0.1:9", "localhost:9", "[::1]:9"])
async def test_a_public_swarms_members_do_not_dial_what_is_near(address: str) -> None:
    """Also not a name that resolves to it; nor can a client let a server do so."""
    me = Endpoint(Identity(b"a" * 32), ChannelKey(), NETWORK, EVERYBODY, public=True)
    with pytest.raises(Unreachable, match="no sense"):
        await dial(parse(address), Remote("x", bytes(32)), me, ignore)
