"""Nodes that meet on one network: none has to answer, and first nodes that start together become one swarm."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Interface
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarm.dht import nearby as module
from swarm.dht.directory import Directory
from swarm.dht.nearby import Nearby, nearby
from swarm.dht.node import NodeConfig, SwarmNode
from swarm.errors import BadConfiguration
from swarm.identity import Identity
from swarm.net.lan import LanLimits
from swarm.net.p2p import P2PConfig
from tests.dht.support import LOOPBACK, NETWORK, ROOT, announcement, node, soon

ALICE, BOB = Identity.generate(), Identity.generate()
GONE = f"/ip4/127.0.0.1/tcp/9/p2p/{BOB.peer_id}"


def directory(of: SwarmNode, identity: Identity | None = None) -> Directory:
    return Directory(of, identity=identity, network=NETWORK, clock=of.gate.clock)


async def test_two_first_nodes_meet_and_find_their_records(tmp_path: Path) -> None:
    async with node(tmp_path, "a", identity=ALICE) as alice, node(tmp_path, "b", identity=BOB) as bob:
        await directory(alice, ALICE).announce(announcement(ALICE))
        assert await directory(bob).servers(ROOT, 12) == ()
        with soon(5):
            await bob.meet(alice.addresses)
        assert bob.neighbours() == (alice.peer_id,)
        assert len(await directory(bob).servers(ROOT, 12)) == 1


async def test_met_node_that_is_gone_fails_nothing(tmp_path: Path) -> None:
    async with node(tmp_path, "alice", identity=ALICE) as alice:
        with soon(15):
            await alice.meet([GONE])
            assert await directory(alice).servers(ROOT, 12) == ()
            await directory(alice, ALICE).announce(announcement(ALICE))
            assert len(await directory(alice).servers(ROOT, 12)) == 1


async def test_next_p2pd_calls_on_met_nodes(tmp_path: Path) -> None:
    async with node(tmp_path, "a") as alice, node(tmp_path, "b") as bob:
        await bob.meet([GONE, *alice.addresses])
        os.kill(bob.p2pd_pid or 0, signal.SIGKILL)
        with soon(15):
            while bob.restarts < 1:
                await asyncio.sleep(0.05)
            assert bob.neighbours() == (alice.peer_id,)


async def test_malformed_address_is_not_met(tmp_path: Path) -> None:
    async with node(tmp_path, "alice") as alice:
        with pytest.raises(BadConfiguration):
            await alice.meet(["nonsense"])


async def test_node_on_loopback_is_on_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "networks", lambda: (IPv4Interface("192.168.1.7/24"),))
    monkeypatch.setattr(module, "announced", None)
    monkeypatch.setattr(module, "watching", None)
    config = NodeConfig(NETWORK, P2PConfig(tmp_path / "alice", LOOPBACK))
    async with node(tmp_path, "alice") as alice:
        with soon(0.5):
            async with nearby(alice, config, lan=True) as here:
                assert here.looked.is_set()


async def test_node_serves_where_multicast_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError("no multicast here")

    monkeypatch.setattr(module, "announced", failing)
    monkeypatch.setattr(module.Nearby, "_networks", lambda _: ("a network",))
    config = NodeConfig(NETWORK, P2PConfig(tmp_path / "alice", LOOPBACK))
    async with node(tmp_path, "alice") as alice, nearby(alice, config, lan=True) as here:
        assert here.looked.is_set()


async def test_node_tries_again_where_multicast_failed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries, told = 0, asyncio.Event()

    @asynccontextmanager
    async def failing(*_: object) -> AsyncIterator[None]:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError("port 5353 is taken")
        told.set()
        await asyncio.get_running_loop().create_future()
        yield

    monkeypatch.setattr(module, "announced", failing)
    monkeypatch.setattr(module.Nearby, "_networks", lambda _: ("a network",))
    config = NodeConfig(NETWORK, P2PConfig(Path("unused"), LOOPBACK))
    here = Nearby(SimpleNamespace(peer_id=ALICE.peer_id, port=1), config, LanLimits(again_s=0.01))  # type: ignore[arg-type]
    running = asyncio.create_task(here.run())
    async with asyncio.timeout(5):
        await told.wait()
    running.cancel()
    assert capsys.readouterr().out.count("port 5353 is taken") == 1
