"""libp2p's Kademlia on this node: where peers are is told, and nothing of strangers is kept."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.multiaddr import Multiaddr

from swarm.dht.directory import Directory
from swarm.dht.messages import FIND_NODE, PING, KadMessage, varint
from swarm.dht.node import SwarmNode
from swarm.dht.whereabouts import PROTOCOL, Whereabouts, WhereaboutsLimits, nearest
from swarm.errors import InvalidMessage, Unreachable
from swarm.identity import Identity
from swarm.net.p2p import Daemon, P2PConfig, running_daemon
from tests.dht.memory import MemoryNetwork
from tests.dht.support import NETWORK, ROOT, announcement, node

ADD_PROVIDER, GET_PROVIDERS, PUT_VALUE, GET_VALUE = 2, 3, 0, 1  # what p2pd's own server would take and keep


def peer_of(base58: str) -> bytes:
    return bytes(PeerID.from_base58(base58).to_bytes())


@asynccontextmanager
async def stranger(of: SwarmNode) -> AsyncIterator[Daemon]:
    """A p2pd that is no node of the swarm, connected to one."""
    async with running_daemon(P2PConfig(None, None)) as daemon:
        await daemon.connect(of.addresses[0], 5.0)
        yield daemon


async def asked(daemon: Daemon, of: SwarmNode, question: KadMessage) -> KadMessage | None:
    """Send a question on a stream of its own. Returns the answer; None if the stream ends without one."""
    _, reader, writer = await daemon.open_stream(peer_of(of.peer_id), PROTOCOL, 5.0)
    try:
        async with asyncio.timeout(5):
            data = question.SerializeToString()
            writer.write(varint(len(data)) + data)
            return read(await reader.read())
    except ConnectionError:
        return None
    finally:
        writer.close()


def read(data: bytes) -> KadMessage | None:
    """Take an answer apart that stands behind its length."""
    size, shift = 0, 0
    for at, byte in enumerate(data):
        size |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            assert len(data) == at + 1 + size
            return KadMessage.FromString(data[at + 1 :])
    assert not data
    return None


async def test_a_node_tells_where_it_and_its_neighbours_are(tmp_path: Path) -> None:
    async with (
        node(tmp_path, "boot") as boot,
        node(tmp_path, "alice", boot.addresses) as alice,
        stranger(boot) as other,
    ):
        boot_id, alice_id = peer_of(boot.peer_id), peer_of(alice.peer_id)
        named = {}
        for key in (boot_id, alice_id, b"anything"):
            answer = await asked(other, boot, KadMessage(type=FIND_NODE, key=key))
            assert answer is not None
            named[key] = {each.id: list(each.addrs) for each in answer.closerPeers}
        assert list(named[boot_id]) == [boot_id, alice_id]
        assert list(named[alice_id]) == list(named[b"anything"]) == [alice_id]
        told = {f"{Multiaddr(address)}/p2p/{alice.peer_id}" for address in named[alice_id][alice_id]}
        assert set(alice.addresses) <= told
        assert await asked(other, boot, KadMessage(type=PING)) == KadMessage(type=PING)


@pytest.mark.parametrize("kind", [ADD_PROVIDER, GET_PROVIDERS, PUT_VALUE, GET_VALUE])
async def test_a_stranger_stores_nothing_in_p2pd(tmp_path: Path, kind: int) -> None:
    async with node(tmp_path, "boot") as boot, stranger(boot) as other:
        key = b"\x12\x20" + hashlib.sha256(b"content").digest()  # a multihash
        assert await asked(other, boot, KadMessage(type=kind, key=key)) is None


async def test_a_peer_is_found_through_the_node_that_named_it(tmp_path: Path) -> None:
    async with (
        node(tmp_path, "boot") as boot,
        node(tmp_path, "alice", boot.addresses) as alice,
        running_daemon(P2PConfig(None, None)) as daemon,
    ):
        await daemon.connect(boot.addresses[0], 5.0)
        finder, alice_id = Whereabouts(daemon, tuple), peer_of(alice.peer_id)
        assert await finder.connect(alice_id, 3.0)
        assert alice_id not in await daemon.connected(), "nobody has named it"
        finder.heard(peer_of(boot.peer_id), [alice_id])
        assert await finder.connect(alice_id, 3.0)
        assert alice_id in await daemon.connected()


# --- a network in memory in which calls need connections --------------------------------------------------------------


@pytest.mark.virtual_clock
async def test_nodes_that_joined_through_one_find_each_other() -> None:
    network = MemoryNetwork(links=set())
    owner = Identity(b"o" * 32)
    async with AsyncExitStack() as stack:
        boot = await stack.enter_async_context(network.node(identity=Identity(b"b" * 32)))
        nodes = [
            await stack.enter_async_context(network.node(*boot.addresses, identity=Identity(bytes([i]) * 32), seed=i))
            for i in range(1, 25)
        ]
        reader = await stack.enter_async_context(network.node(*boot.addresses, client=True))
        await Directory(nodes[3], identity=owner, network=NETWORK, clock=time.time).announce(announcement(owner))
        found = await Directory(reader, identity=None, network=NETWORK, clock=time.time).servers(ROOT, 12)
        assert [signed.announcement.public_key for signed in found] == [owner.public_key.hex()]
        met = sorted(len(node.neighbours()) for node in nodes)
        assert met[0] >= 10, "they have met, and not only the one they joined through"
        assert met[len(met) // 2] >= 20
        assert network.dials > 100


# --- without a network ------------------------------------------------------------------------------------------------


class Fake:
    """What whereabouts need of p2pd. told: by namer, its address and those that it tells of a peer, or how it fails."""

    def __init__(self, *connected: bytes, **told: "tuple[str, list[bytes]] | Exception") -> None:
        self.p2p = self
        self.peer_id = PeerID(b"own")
        self.there, self.addresses = frozenset(connected), [b"at"] * 20
        self.told = {name.encode(): each for name, each in told.items()}
        self.lists = self.looks = 0
        self.asked: list[bytes] = []
        self.dialled: list[str] = []

    async def connected(self) -> frozenset[bytes]:
        self.lists += 1
        await asyncio.sleep(0.01)
        return self.there

    async def addresses_of(self, peer: bytes) -> tuple[bytes, ...]:
        self.looks += 1
        return tuple(self.addresses)

    async def open_stream(self, peer: bytes, name: str, timeout_s: float) -> Any:
        assert name == PROTOCOL
        self.asked.append(peer)
        told = self.told[peer]
        if isinstance(told, Exception):
            raise told
        at, addresses = told
        data = KadMessage(
            type=FIND_NODE, closerPeers=[{"id": b"x"}, {"id": b"y", "addrs": addresses}]
        ).SerializeToString()
        reader = asyncio.StreamReader()
        if addresses != [SILENT]:
            reader.feed_data(varint(len(data)) + data)
        return _packed(at), reader, cast(asyncio.StreamWriter, Writer())

    async def connect_at(self, peer: bytes, addresses: list[bytes], timeout_s: float) -> None:
        assert peer == b"y"
        self.dialled = [str(Multiaddr(address)) for address in addresses]


class Writer:
    """A stream's writing half. deaf: nothing of it is read, so that it does not close by itself."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.sent, self.deaf, self.ended, self.transport = bytearray(), deaf, False, self

    def write(self, data: bytes) -> None:
        self.sent.extend(data)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None: ...

    async def wait_closed(self) -> None:
        await asyncio.sleep(3600 if self.deaf else 0)

    def abort(self) -> None:
        self.ended = True


def _packed(address: str) -> bytes:
    return bytes(Multiaddr(address).to_bytes())


SILENT = b"silent"
NEAR, FAR, THERE = "/ip4/192.168.0.7/tcp/1", "/ip4/8.8.8.8/tcp/1", "/ip4/8.8.4.4/tcp/9"
QUESTION = KadMessage(type=FIND_NODE, key=b"k").SerializeToString()
QUESTION = varint(len(QUESTION)) + QUESTION


def whereabouts(fake: Fake, *nodes: bytes, **limits: Any) -> Whereabouts:
    return Whereabouts(cast(Daemon, fake), lambda: nodes, WhereaboutsLimits(**limits))


async def served(
    told: Whereabouts, data: bytes, asker: bytes = b"asker", *, deaf: bool = False, eof: bool = True
) -> bytes:
    """Return what a stream gets for these bytes."""
    reader, writer = asyncio.StreamReader(), Writer(deaf=deaf)
    reader.feed_data(data)
    if eof:
        reader.feed_eof()
    info = StreamInfo(PeerID(asker), Multiaddr("/ip4/127.0.0.1/tcp/1"), PROTOCOL)
    try:
        await told.serve(info, reader, cast(asyncio.StreamWriter, writer))
    finally:
        assert writer.ended
    return bytes(writer.sent)


async def test_answers_name_nodes_alone_and_few_of_them() -> None:
    nodes = [bytes([i]) * 4 for i in range(30)]
    client = b"client"
    told = whereabouts(Fake(*nodes, client), *nodes, b"gone")
    near = await told.answer(KadMessage(type=FIND_NODE, key=b"anything"), nodes[0])
    named = [each.id for each in near.closerPeers]
    assert named == nearest(b"anything", nodes[1:], 7), "clients are not named, nor who has gone, nor the asker"
    assert all(len(each.addrs) == 8 for each in near.closerPeers)
    assert (await told.answer(KadMessage(type=FIND_NODE, key=client), nodes[0])).closerPeers[0].id == client
    with pytest.raises(InvalidMessage, match="keeps nothing"):
        await told.answer(KadMessage(type=ADD_PROVIDER, key=b"x"), nodes[0])


@pytest.mark.virtual_clock
async def test_p2pd_is_asked_once_for_many_questions() -> None:
    fake = Fake(b"a", b"b")
    told = whereabouts(fake, b"a", b"b", burst=1e9)
    await asyncio.gather(*(served(told, QUESTION, bytes([i])) for i in range(40)))
    for _ in range(50):
        await served(told, QUESTION)
    assert fake.lists == 1
    assert fake.looks <= 80, "the first forty ask at one time"
    looks = fake.looks
    await asyncio.sleep(11)
    await served(told, QUESTION)
    assert (fake.lists, fake.looks) == (2, looks)


@pytest.mark.virtual_clock
async def test_addresses_are_told_for_a_while_after_a_connection_has_ended() -> None:
    fake = Fake(b"a")
    told = whereabouts(fake, b"a")

    async def named() -> list[bytes]:
        return [each.id for each in (await told.answer(KadMessage(type=FIND_NODE, key=b"k"), b"asker")).closerPeers]

    fake.addresses = [b"x" * 129]
    assert await named() == [], "too long for an address"
    fake.addresses = [b"at"]
    assert await named() == [b"a"], "that it had told none before is not remembered"
    fake.there = frozenset()
    await asyncio.sleep(890)
    assert await named() == [b"a"]
    await asyncio.sleep(20)
    assert await named() == []


def test_the_nearest_come_first() -> None:
    peers = [bytes([i]) for i in range(50)]
    place = int.from_bytes(hashlib.sha256(b"key").digest())
    distances = sorted(int.from_bytes(hashlib.sha256(peer).digest()) ^ place for peer in peers)
    found = [int.from_bytes(hashlib.sha256(peer).digest()) ^ place for peer in nearest(b"key", peers, 10)]
    assert found == distances[:10]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff\xff\xff\xff",
        b"\xff\x7f" + bytes(20),
        b"\x80\x80\x80\x80",
        b"\x05\xff\xff\xff\xff\xff",
        b"\x08\x08\x04",
    ],
)
async def test_malformed_or_long_questions_end_the_stream(data: bytes) -> None:
    assert await served(whereabouts(Fake(b"a"), b"a"), data) == b""


@pytest.mark.virtual_clock
async def test_a_stream_without_a_question_or_a_reader_ends() -> None:
    told, loop = whereabouts(Fake(b"a"), b"a"), asyncio.get_running_loop()
    began = loop.time()
    assert await served(told, b"", eof=False) == b""
    assert await served(told, QUESTION, deaf=True) != b""
    assert loop.time() - began < 5


async def test_a_peer_has_a_question_for_each_token() -> None:
    told = whereabouts(Fake(b"a"), b"a", burst=3.0, per_s=0.001)
    assert [bool(await served(told, QUESTION)) for _ in range(5)] == [True, True, True, False, False]
    assert await served(told, QUESTION, b"other")


@pytest.mark.virtual_clock
async def test_streams_of_one_peer_have_a_bound_and_new_ones_displace_the_oldest() -> None:
    told = whereabouts(Fake(b"a"), b"a", streams_per_peer=2, streams_max=3)

    async def held(asker: bytes) -> asyncio.Task[bytes]:
        task = asyncio.create_task(served(told, b"", asker, eof=False))
        await asyncio.sleep(0.01)
        return task

    open_ones = [await held(b"one") for _ in range(3)] + [await held(b"two") for _ in range(2)]
    assert [task.done() for task in open_ones] == [True, False, True, False, False], "the first has made room"
    assert await served(told, QUESTION, b"three"), "however many others hold streams"
    await told.close()
    assert all(task.done() for task in open_ones)


# --- before a call ----------------------------------------------------------------------------------------------------


async def found(fake: Fake, *namers: bytes, within_s: float = 1.5) -> bool:
    finder = whereabouts(fake)
    for namer in namers:
        finder.heard(namer, [b"y"])
    return await finder.connect(b"y", within_s)


@pytest.mark.parametrize(("namer", "dialled"), [(THERE, [FAR]), ("/ip4/192.168.0.9/tcp/9", [NEAR, FAR])])
async def test_a_node_on_the_internet_leads_nobody_into_his_own_network(namer: str, dialled: list[str]) -> None:
    others = ["/ip4/224.0.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1", f"{FAR}/p2p/{Identity(b'a' * 32).peer_id}/p2p-circuit"]
    fake = Fake(namer=(namer, [b"junk", *map(_packed, [NEAR, FAR, *others])]))
    assert await found(fake, b"namer")
    assert fake.dialled == dialled


@pytest.mark.parametrize(("namer", "dialled"), [(THERE, []), ("/ip4/127.0.0.1/tcp/9", ["/ip4/127.0.0.1/tcp/1"])])
async def test_names_are_resolved_before_they_are_judged(namer: str, dialled: list[str]) -> None:
    fake = Fake(namer=(namer, [_packed("/dns4/localhost/tcp/1")]))
    assert await found(fake, b"namer") == bool(dialled)
    assert [address for address in fake.dialled if "ip6" not in address] == dialled


async def test_names_that_no_resolver_takes_are_left_out() -> None:
    odd = [bytes([54, len(name)]) + name + b"\x06\x00\x01" for name in (b"x" * 70, b"a\0b", b"8.8.8.8/x")]  # dns4
    fake = Fake(namer=("/ip4/127.0.0.1/tcp/9", [*odd, _packed(FAR)]))
    assert await found(fake, b"namer")
    assert fake.dialled == [FAR]


async def test_an_address_that_can_be_read_and_not_written_hides_no_other() -> None:
    odd = bytes.fromhex("0408080808bd03022f78")  # of onion3, and too short for one
    fake = Fake(liar=(THERE, [odd]), both=(THERE, [odd, _packed(NEAR), _packed(FAR)]))
    assert not await found(fake, b"liar")
    assert await found(fake, b"liar", b"both")
    assert fake.dialled == [FAR]


async def test_a_peer_that_is_connected_is_not_looked_for() -> None:
    fake = Fake(b"y")
    assert await found(fake, b"namer")
    assert fake.asked == []


@pytest.mark.virtual_clock
async def test_a_peer_that_has_gone_is_looked_for_sooner_than_others_are_told_so() -> None:
    fake = Fake(b"y", namer=(THERE, [_packed(FAR)]))
    told = whereabouts(fake, b"y")
    assert await served(told, QUESTION)
    fake.there = frozenset()
    await asyncio.sleep(2)
    assert await served(told, QUESTION)
    assert fake.lists == 1
    told.heard(b"namer", [b"y"])
    assert await told.connect(b"y", 1.5)
    assert (fake.lists, fake.asked) == (2, [b"namer"])


async def test_one_namer_that_knows_is_enough() -> None:
    fails = Unreachable("a peer", (), 1.0)
    fake = Fake(
        gone=fails,
        silent=(THERE, [SILENT]),
        liar=(THERE, [_packed("/ip4/9.9.9.9/tcp/1")]),
        honest=(THERE, [_packed(FAR)]),
    )
    assert await found(fake, b"gone", b"silent", b"liar", b"honest", within_s=0.4)
    assert fake.dialled == ["/ip4/9.9.9.9/tcp/1", FAR]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("fails", [Unreachable("a peer", (), 1.0), OSError("broken")])
async def test_a_peer_that_no_namer_knows_costs_no_more_than_a_call(fails: Exception) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert not await found(Fake(gone=fails, silent=(THERE, [SILENT])), b"gone", b"silent")
    assert loop.time() - began <= 1.5


async def test_calls_to_one_peer_share_a_search_and_the_next_begins_anew() -> None:
    fake = Fake(namer=(THERE, [_packed(FAR)]))
    finder = whereabouts(fake)
    finder.heard(b"namer", [b"y"])
    assert await asyncio.gather(*(finder.connect(b"y", 1.5) for _ in range(4))) == [True] * 4
    assert fake.asked == [b"namer"]
    assert await finder.connect(b"y", 1.5)
    assert fake.asked == [b"namer"], "nobody has named it again: p2pd knows it, or not"


async def test_who_waits_for_a_search_goes_on_when_the_node_closes() -> None:
    fake = Fake(namer=(THERE, [SILENT]))
    finder = whereabouts(fake)
    finder.heard(b"namer", [b"y"])
    waiting = asyncio.create_task(finder.connect(b"y", 5.0))
    await asyncio.sleep(0.05)
    await finder.close()
    assert await waiting is False


def test_namers_are_remembered_up_to_bounds() -> None:
    told = whereabouts(Fake(), named_peers_max=3)
    for i in range(9):
        told.heard(bytes([i]), [b"y"])
    assert told._namers[b"y"] == [b"\x05", b"\x06", b"\x07", b"\x08"]
    told.heard(b"namer", [bytes([i]) for i in range(10)])
    assert list(told._namers) == [b"\x07", b"\x08", b"\x09"]
