"""Nodes that answered are remembered: who knows them joins a swarm whose first nodes are gone."""

import random
from pathlib import Path
from typing import cast

import pytest

from swarm.access import Access, NetworkKey
from swarm.dht.directory import Directory
from swarm.dht.node import NodeConfig, SwarmNode
from swarm.dht.peermemory import MemoryLimits, PeerMemory, memory_of
from swarm.dht.remembered import answering
from swarm.errors import Unreachable
from swarm.identity import Identity
from swarm.net.p2p import Daemon, P2PConfig
from tests.dht.memory import MemoryDaemon, MemoryNetwork
from tests.dht.support import NETWORK, ROOT, announcement

NOW, DAY_S = 1_800_000_000.0, 86400.0
PEERS = [Identity(bytes([i]) * 32).peer_id for i in range(1, 41)]
OWNER = Identity(b"o" * 32)


def at(i: int, host: str = "9.1.2.3") -> str:
    return f"/ip4/{host}/tcp/31337/p2p/{PEERS[i]}"


def test_latest_answers_are_read_first_and_the_oldest_are_forgotten(tmp_path: Path) -> None:
    memory = PeerMemory(tmp_path / "state" / "peers.json", public=True, limits=MemoryLimits(peers_max=3))
    assert memory.addresses(NOW) == ()
    memory.note([at(0), at(1)], NOW)
    memory.note([at(2), at(3)], NOW + 10)
    assert memory.addresses(NOW + 20) == (at(2), at(3), at(0))


def test_peer_that_moved_is_remembered_where_it_is_now(tmp_path: Path) -> None:
    memory = PeerMemory(tmp_path / "peers.json", public=True)
    memory.note([at(0)], NOW)
    memory.note([at(0, "9.9.9.9")], NOW + 10)
    assert memory.addresses(NOW + 20) == (at(0, "9.9.9.9"),)


def test_node_that_has_not_answered_for_long_is_forgotten(tmp_path: Path) -> None:
    memory = PeerMemory(tmp_path / "peers.json", public=True)
    memory.note([at(0)], NOW)
    assert memory.addresses(NOW + 80 * DAY_S) == (at(0),)
    assert memory.addresses(NOW + 100 * DAY_S) == ()


def test_public_swarm_remembers_public_addresses_alone(tmp_path: Path) -> None:
    private = [at(0, "127.0.0.1"), at(1, "192.168.1.7")]
    for public, kept in ((True, (at(2),)), (False, (*private, at(2)))):
        memory = PeerMemory(tmp_path / f"{public}.json", public=public)
        memory.note([*private, at(2)], NOW)
        assert memory.addresses(NOW) == kept


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"nonsense": 1}', '{"/ip4/9.1.2.3/tcp/1/p2p/12D3": 1800000000}', "[" * 50_000, "x" * 100_000],
)
def test_damaged_file_counts_as_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peers.json"
    path.write_text(text)
    memory = PeerMemory(path, public=True)
    assert memory.addresses(NOW) == ()
    memory.note([at(0)], NOW)
    assert memory.addresses(NOW) == (at(0),)


def test_file_that_cannot_be_written_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = PeerMemory(tmp_path / "file" / "peers.json", public=True)
    memory.note([at(0)], NOW)
    assert memory.addresses(NOW) == ()


def test_networks_are_remembered_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    keys = [NetworkKey(bytes([i]) * 32) for i in (1, 2)]
    all_paths = {
        memory_of(network, access, public=True).path
        for network in ("public", "other")
        for access in (Access(), *(Access(network_key=key) for key in keys))
    }
    assert len(all_paths) == 6
    assert all(path.is_relative_to(tmp_path) for path in all_paths)


@pytest.mark.virtual_clock
async def test_client_with_remembered_nodes_joins_when_all_initial_peers_are_gone(tmp_path: Path) -> None:
    network, memory = MemoryNetwork(), PeerMemory(tmp_path / "peers.json", public=False)
    async with network.node(seed=1) as first, network.node(*first.addresses, identity=OWNER, seed=2) as server:
        async with network.node(*first.addresses, client=True, seed=3) as client:
            memory.note(await answering(client))
        assert len(memory.addresses()) == 2
        gone = first.addresses
        assert first.member is not None
        del network.peers[first.member.daemon.p2p.peer_id]
        await Directory(server, identity=OWNER, network=NETWORK, clock=server.gate.clock).announce(announcement(OWNER))

        async def joined(met: tuple[str, ...]) -> int:
            config = NodeConfig(NETWORK, P2PConfig(None, None), gone, met=met)
            node = SwarmNode(config, server.gate.clock, random.Random(4))
            async with node.attach(cast(Daemon, MemoryDaemon(network.join(Identity.generate())))):
                reader = Directory(node, identity=None, network=NETWORK, clock=server.gate.clock)
                return len(await reader.servers(ROOT, 12))

        with pytest.raises(Unreachable):
            await joined(())
        assert await joined(memory.addresses()) == 1
        network.peers[first.member.daemon.p2p.peer_id] = first.member.daemon.p2p


@pytest.mark.virtual_clock
async def test_first_node_of_a_swarm_starts_though_all_remembered_ones_are_gone() -> None:
    network = MemoryNetwork()
    config = NodeConfig(NETWORK, P2PConfig(None, ("127.0.0.1", 0)), met=(at(0, "127.0.0.1"),))
    node = SwarmNode(config, lambda: NOW, random.Random(1))
    async with node.attach(cast(Daemon, MemoryDaemon(network.join(OWNER)))):
        assert node.serves
