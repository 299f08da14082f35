"""Nodes that serve the DHT once others can call them, and are clients before and after."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm.dht import proof
from swarm.dht.dialback import Answer, DialledBack, Findings
from swarm.dht.directory import Directory
from swarm.dht.helper import serve_dial_back
from swarm.dht.node import NodeConfig, SwarmNode, open_node
from swarm.errors import TooBusy, Unreachable
from swarm.identity import Identity
from swarm.net.endpoint import Endpoint
from swarm.net.noise import ChannelKey
from swarm.net.p2p import P2PConfig
from tests.dht.support import LOOPBACK, NETWORK, ROOT, announcement, node

ALICE = Identity(b"a" * 32)


def unproven(folder: Path, peers: tuple[str, ...]) -> AbstractAsyncContextManager[SwarmNode]:
    ALICE.save(folder / "alice")
    config = NodeConfig(NETWORK, P2PConfig(folder / "alice", LOOPBACK), peers, proven=False)
    return open_node(config, clock=time.time)


def directory(of: SwarmNode) -> Directory:
    return Directory(of, identity=ALICE, network=NETWORK, clock=of.gate.clock)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.05)


async def replaced_p2pd(of: SwarmNode) -> None:
    restarts = of.restarts
    os.kill(of.p2pd_pid or 0, signal.SIGKILL)
    await until(lambda: of.restarts > restarts)


async def test_a_node_that_no_other_has_called_is_learnt_by_none(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, unproven(tmp_path, boot.addresses) as alice:
        assert (await directory(alice).announce(announcement(ALICE))).replicas == 1
        assert len(await directory(alice).servers(ROOT, 12)) == 1
        assert (boot.neighbours(), alice.neighbours()) == ((), (boot.peer_id,))
        assert not alice.serves


async def test_a_promoted_node_is_learnt_at_once(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, unproven(tmp_path, boot.addresses) as alice:
        await alice.promote()
        assert boot.neighbours() == (alice.peer_id,)
        assert (await directory(boot).announce(announcement(ALICE))).replicas == 1  # on alice, which answers


@pytest.mark.long
async def test_a_demoted_node_is_forgotten_while_it_stays_connected(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, unproven(tmp_path, boot.addresses) as alice:
        await alice.promote()
        alice.demote()
        assert alice.peer_id in await boot.hosts()
        with contextlib.suppress(Unreachable):
            await directory(boot).servers(ROOT, 12)
        assert boot.neighbours() == ()
        await directory(alice).announce(announcement(ALICE))
        assert boot.neighbours() == ()
        await alice.promote()
        assert boot.neighbours() == (alice.peer_id,)


@pytest.mark.long
async def test_a_new_p2pd_serves_if_the_node_was_promoted(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, unproven(tmp_path, boot.addresses) as alice:
        await alice.promote()
        await replaced_p2pd(alice)
        assert alice.member is not None
        assert not alice.member.protocol.client_mode
        alice.demote()
        await replaced_p2pd(alice)
        assert alice.member.protocol.client_mode


@pytest.mark.long
async def test_a_promotion_counts_that_comes_while_p2pd_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(tmp_path, "boot") as boot, unproven(tmp_path, boot.addresses) as alice:
        build = SwarmNode._build

        async def promoted(self: SwarmNode, daemon: Any) -> Any:
            member = await build(self, daemon)
            await self.promote()  # there is no present member that could be told
            return member

        monkeypatch.setattr(SwarmNode, "_build", promoted)
        await replaced_p2pd(alice)
        assert alice.member is not None
        assert not alice.member.protocol.client_mode
        assert boot.neighbours() == (alice.peer_id,)


async def test_the_first_node_of_a_swarm_needs_no_proof(tmp_path: Path) -> None:
    async with unproven(tmp_path, ()) as first, node(tmp_path, "second", first.addresses) as second:
        first.demote()
        assert first.serves
        assert second.neighbours() == (first.peer_id,)
        assert len(await first.hosts()) == 1
        assert (await directory(second).announce(announcement(ALICE))).replicas == 1


# --- the proof of a node without a record ----------------------------------------------------------------------------


async def test_a_node_proves_itself_on_loopback(tmp_path: Path) -> None:
    async def no_dial(*_: object) -> Any:
        raise Unreachable("a peer", (), 0.0)

    async with node(tmp_path, "boot") as boot, unproven(tmp_path, boot.addresses) as alice:
        await serve_dial_back(boot, Endpoint(Identity.generate(), ChannelKey(), NETWORK), no_dial)
        proving = asyncio.create_task(proof.prove(alice))
        await until(lambda: boot.neighbours() == (alice.peer_id,))
        proving.cancel()


class FakeNode:
    """Remembers what it is."""

    addresses = ("/ip4/192.0.2.7/tcp/31337/p2p/x",)

    def __init__(self) -> None:
        self.history = ""

    async def promote(self) -> None:
        self.history += "+"

    def demote(self) -> None:
        self.history += "-"


def said(p2p: bool) -> Findings:
    return Findings((DialledBack("helper", Answer(p2p=p2p)),))


@pytest.mark.parametrize(
    ("outcomes", "history"),
    [
        ((said(True),), "+"),
        ((said(False),), "-"),
        ((Unreachable("a node", (), 0.0),), "+"),
        ((TooBusy("later"),), ""),
        ((said(True), TooBusy("later"), said(False), said(True)), "+-+"),
    ],
)
async def test_a_node_is_what_its_helpers_find(
    monkeypatch: pytest.MonkeyPatch, outcomes: tuple[Findings | Exception, ...], history: str
) -> None:
    asked: list[dict[str, object]] = []
    left, done = list(outcomes), asyncio.Event()

    async def ask(_node: object, _signed: None, **ports: object) -> Findings:
        asked.append(ports)
        if not left:
            done.set()
            await asyncio.Event().wait()
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(proof, "ask_dial_back", ask)
    fake: Any = FakeNode()
    limits = replace(proof.ProofLimits(), look_s=0.0, again_s=0.0)
    proving = asyncio.create_task(proof.prove(fake, "192.0.2.7", limits))
    await asyncio.wait_for(done.wait(), 5)
    proving.cancel()
    assert fake.history == history
    assert asked[0] == {"p2p_port": 31337, "p2p_host": "192.0.2.7"}
