"""Nodes on loopback, each with its own p2pd."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

from swarm.dht.directory import Directory
from swarm.dht.format import believe, pack_dictionary
from swarm.dht.member import MemberLimits
from swarm.dht.node import NodeConfig, NodeLimits, SwarmNode, open_node
from swarm.dht.search import Result
from swarm.dht.validator import Entry, RecordGate
from swarm.errors import AddressInUse, BadConfiguration, ClockSkew, Unreachable
from swarm.identity import Identity
from swarm.net.limits import DaemonLimits
from swarm.net.p2p import P2PConfig, running_daemon
from tests.dht.support import NETWORK, ROOT, announcement, is_running, node, signed, soon

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)


def directory(of: SwarmNode, identity: Identity | None = None) -> Directory:
    return Directory(of, identity=identity, network=NETWORK, clock=of.gate.clock)


async def test_what_one_node_announces_a_client_finds(tmp_path: Path) -> None:
    async with (
        node(tmp_path, "boot") as boot,
        node(tmp_path, "alice", boot.addresses, identity=ALICE) as server,
        node(tmp_path, "client", boot.addresses, client=True) as client,
    ):
        assert server.peer_id == ALICE.peer_id
        published = await directory(server, ALICE).announce(announcement(ALICE))
        assert published.replicas == 1
        (found,) = await directory(client).servers(ROOT, 12)
        assert found == published.signed
        assert [model.name for model in await directory(client).models()] == ["org/model"]
        assert client.addresses == ()
        await directory(server, ALICE).withdraw()


@pytest.mark.long
async def test_a_p2pd_that_dies_in_the_middle_of_an_announcement_costs_a_moment(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as server:
        assert server.member is not None
        search = server.member.searcher.search

        async def killed(*args: object, **options: object) -> object:
            assert server.p2pd_pid is not None
            os.kill(server.p2pd_pid, signal.SIGKILL)
            return await search(*args, **options)

        server.member.searcher.search = killed  # type: ignore[method-assign]
        published = await directory(server, ALICE).announce(announcement(ALICE))
        assert published.replicas == 1
        assert server.restarts == 1
        assert await directory(server).servers(ROOT, 12) == (published.signed,)


async def test_p2pd_that_dies_is_replaced_and_the_record_announced_again(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as server:
        await directory(server, ALICE).announce(announcement(ALICE))
        boot.storage._keys.clear()  # the other node forgets, so that only a second announcement can bring it back
        dead, before = server.p2pd_pid, server.addresses
        assert dead is not None
        os.kill(dead, signal.SIGKILL)
        async with asyncio.timeout(10):
            while server.restarts < 1 or len(boot.storage) < 2:  # under its span and under its model
                await asyncio.sleep(0.05)
        assert len(await directory(boot).servers(ROOT, 12)) == 1
        assert server.p2pd_pid not in {None, dead}
        assert server.addresses == before, "the same peer at the same port"


async def test_calls_wait_while_p2pd_is_replaced(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as server:
        os.kill(server.p2pd_pid or 0, signal.SIGKILL)
        await asyncio.sleep(0.3)
        with soon(10):
            assert (await directory(server, ALICE).announce(announcement(ALICE))).replicas == 1


@pytest.mark.long
async def test_calls_wait_for_the_next_p2pd_as_soon_as_one_is_given_up(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as server:
        await boot.handle_stream("/test/1", _echo)
        for restarts, call in enumerate(
            (
                lambda: directory(server, ALICE).announce(announcement(ALICE)),
                lambda: directory(server).servers(ROOT, 12),
                lambda: _echoed(server, boot.peer_id),
            ),
            1,
        ):
            server.renew("the machine has moved")
            assert server.restarts == restarts - 1
            await call()
            assert server.restarts == restarts
            assert server.neighbours() == (boot.peer_id,)


async def _echo(_: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read(2))
    writer.close()


async def _echoed(of: SwarmNode, peer: str) -> bytes:
    reader, writer = await of.open_stream(peer, "/test/1")
    writer.write(b"hi")
    try:
        return await reader.read(2)
    finally:
        writer.close()


async def test_stream_to_a_peer_waits_while_a_dead_p2pd_is_replaced(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses) as server:
        await boot.handle_stream("/test/1", _echo)
        os.kill(server.p2pd_pid or 0, signal.SIGKILL)  # and nothing has noticed it
        assert await _echoed(server, boot.peer_id) == b"hi"


async def test_stream_waits_no_longer_than_its_limit(tmp_path: Path) -> None:
    limits = DaemonLimits(backoff_s=(60.0,))
    async with node(tmp_path, "boot", limits=limits, node_limits=NodeLimits(up_timeout_s=-4.5)) as boot:
        boot.renew("the machine has moved")
        with soon(3), pytest.raises(Unreachable, match="opening a stream"):
            await boot.open_stream(ALICE.peer_id, "/test/1")
        assert not await boot.back()


async def test_stream_that_is_to_be_served_is_served_on_the_next_p2pd(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot:
        os.kill(boot.p2pd_pid or 0, signal.SIGKILL)
        await boot.handle_stream("/test/1", _echo)
        while boot.restarts < 1:
            await asyncio.sleep(0.05)
        async with node(tmp_path, "client", boot.addresses, client=True) as client:
            assert await _echoed(client, boot.peer_id) == b"hi"


async def test_p2pd_that_dies_while_it_stores_costs_no_replica(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as server:
        assert server.member is not None
        store = server.member.protocol.store

        async def killed(*args: Any) -> Any:
            os.kill(server.p2pd_pid or 0, signal.SIGKILL)
            return await store(*args)

        server.member.protocol.store = killed  # type: ignore[method-assign]
        assert (await directory(server, ALICE).announce(announcement(ALICE))).replicas == 1
        assert server.restarts == 1


async def test_a_deaf_connection_to_p2pd_is_noticed(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot:
        assert boot.member is not None
        boot.member.daemon.p2p._client.control._read_task.cancel()
        async with asyncio.timeout(10):
            while boot.restarts < 1:
                await asyncio.sleep(0.05)


async def test_closing_a_node_leaves_no_process_and_no_folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path_factory.mktemp("t")  # of a short name: a socket's path has a hundred characters at most
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    async with node(tmp_path, "boot") as boot:
        pid = boot.p2pd_pid
        assert pid is not None
        assert list(temporary.iterdir())
    assert not is_running(pid)
    assert not list(temporary.iterdir())


async def test_an_error_in_the_block_comes_out_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with node(tmp_path, "boot"):
            _ = 1 / 0


async def test_unreachable_initial_peers_are_named_within_15_seconds(tmp_path: Path) -> None:
    gone = f"/ip4/127.0.0.1/tcp/9/p2p/{BOB.peer_id}"
    silent = f"/ip4/127.0.0.1/tcp/{{}}/p2p/{BOB.peer_id}"
    async with contextlib.AsyncExitStack() as stack:
        listener = await asyncio.start_server(lambda _r, _w: asyncio.sleep(60), "127.0.0.1", 0)
        stack.push_async_callback(listener.wait_closed)
        stack.callback(listener.close)
        mute = silent.format(listener.sockets[0].getsockname()[1])
        with soon(15), pytest.raises(Unreachable) as caught:
            async with node(tmp_path, "alice", (gone, mute)):
                pytest.fail("it joined nobody")
        assert gone in str(caught.value)
        assert mute in str(caught.value)


async def test_one_living_initial_peer_is_enough(tmp_path: Path) -> None:
    gone = f"/ip4/127.0.0.1/tcp/9/p2p/{BOB.peer_id}"
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", (gone, *boot.addresses)) as server:
        assert server.neighbours() == (boot.peer_id,)


@pytest.mark.parametrize("address", ["nonsense", "/ip4/1.2.3.4/tcp/5", "/p2p/12D3", "/ip4/1.2.3.4/tcp/5/p2p/zzz"])
async def test_a_malformed_initial_peer_is_a_usage_error(tmp_path: Path, address: str) -> None:
    with soon(5), pytest.raises(BadConfiguration, match="12D3KooW"):
        async with node(tmp_path, "alice", (address,)):
            pass


@pytest.mark.parametrize("skew_s", [-40.0, 40.0])
async def test_a_clock_forty_seconds_off_is_reported_before_anything_is_announced(
    tmp_path: Path, skew_s: float
) -> None:
    async with node(tmp_path, "boot") as boot:
        with pytest.raises(ClockSkew) as caught:
            async with node(tmp_path, "alice", boot.addresses, clock=lambda: time.time() + skew_s):
                pytest.fail("it joined")
        assert caught.value.skew_s == pytest.approx(skew_s, abs=1)
        assert len(boot.storage) == 0


@pytest.mark.parametrize("skew_s", [-20.0, 20.0])
async def test_a_clock_twenty_seconds_off_works(tmp_path: Path, skew_s: float) -> None:
    def clock() -> float:
        return time.time() + skew_s

    async with (
        node(tmp_path, "boot") as boot,
        node(tmp_path, "alice", boot.addresses, identity=ALICE, clock=clock) as server,
    ):
        assert (await directory(server, ALICE).announce(announcement(ALICE))).replicas == 1
        assert len(await directory(boot).servers(ROOT, 12)) == 1
        assert len(await directory(server).servers(ROOT, 12)) == 1


async def test_protocols_n_and_n_plus_1_live_in_one_swarm(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        boot = await stack.enter_async_context(node(tmp_path, "boot"))
        today = await stack.enter_async_context(node(tmp_path, "a", boot.addresses, identity=ALICE))
        tomorrow = await stack.enter_async_context(node(tmp_path, "b", boot.addresses, identity=BOB))
        await directory(today, ALICE).announce(announcement(ALICE, hologram="a field of tomorrow"))
        await directory(tomorrow, BOB).announce(announcement(BOB, protocol=2, hologram=True))
        heard = []
        survey = await directory(boot).survey(ROOT, 12, heard.extend)
        (found,) = survey.servers
        assert found.data in [entry.data for entry in heard]  # as it came, before the search was over
        assert found.announcement.unknown_fields == ("hologram",)
        assert survey.other_protocols == (2,)


async def test_the_port_of_another_p2pd_is_not_shared(tmp_path: Path) -> None:
    async with running_daemon(P2PConfig(None, ("127.0.0.1", 0))) as daemon:
        (address,) = await daemon.addresses()
        port = int(address.split("/")[4])
        with pytest.raises(AddressInUse, match=str(port)):
            async with running_daemon(P2PConfig(None, ("127.0.0.1", port))):
                pass


def test_a_node_runs_in_a_loop_of_another_thread(tmp_path: Path) -> None:
    """As in a client, with uvloop."""
    found = []

    async def main() -> None:
        async with node(tmp_path, "boot") as boot, node(tmp_path, "c", boot.addresses, client=True) as client:
            await directory(boot, ALICE).announce(announcement(ALICE))
            found.extend(await directory(client).servers(ROOT, 12))

    thread = threading.Thread(target=lambda: uvloop.run(main()))
    thread.start()
    thread.join(30)
    assert len(found) == 1


# --- dial-back -------------------------------------------------------------------------------------------------------


# --- staying responsive ----------------------------------------------------------------------------------------------


async def test_a_full_key_is_verified_in_slices(tmp_path: Path) -> None:
    owners = [Identity(i.to_bytes(32, "big")) for i in range(1, 257)]
    records = [signed(owner) for owner in owners]
    async with node(tmp_path, "boot") as boot:
        entries = [
            Entry(data, facts, facts.span) for data in records if (facts := RecordGate(NETWORK, time.time).facts(data))
        ]
        assert boot.member is not None
        turns = 0

        async def other_work() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            other = group.create_task(other_work())
            believed = await believe(boot.gate, entries[0].place.key, pack_dictionary(entries))
            other.cancel()
        assert len(believed) == 256
        assert turns >= 256 // 24


async def test_a_frozen_p2pd_is_noticed_and_replaced(tmp_path: Path) -> None:
    async with node(tmp_path, "boot", limits=DaemonLimits(probe_s=0.5)) as boot:
        frozen = boot.p2pd_pid
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        async with asyncio.timeout(15):
            while boot.restarts < 1:
                await asyncio.sleep(0.05)
        assert not is_running(frozen)


@pytest.mark.long
async def test_a_node_begins_anew_on_another_p2pd_and_that_is_no_failure(tmp_path: Path) -> None:
    async with node(tmp_path, "boot", limits=DaemonLimits(restarts_max=1)) as boot:
        for restarts in (1, 2, 3):
            before = boot.p2pd_pid
            boot.renew("the machine has moved")
            async with asyncio.timeout(15):
                while boot.restarts < restarts:
                    await asyncio.sleep(0.05)
            assert before is not None
            assert not is_running(before)


async def test_a_killed_processes_folder_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("swarm-p2p-4194305-abc", f"swarm-p2p-{os.getpid()}-abc", "swarm-p2p-notes"):
        (tmp_path / name).mkdir()
    async with running_daemon(P2PConfig(None, None)):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"swarm-p2p-{os.getpid()}-abc", "swarm-p2p-notes"]


@pytest.mark.long
async def test_a_clock_that_goes_wrong_later_does_not_end_a_running_node(tmp_path: Path) -> None:
    skew_s = 0.0
    async with (
        node(tmp_path, "boot") as boot,
        node(tmp_path, "alice", boot.addresses, clock=lambda: time.time() + skew_s) as server,
    ):
        skew_s = 100.0
        os.kill(server.p2pd_pid or 0, signal.SIGKILL)
        async with asyncio.timeout(10):
            while server.restarts < 1:
                await asyncio.sleep(0.05)
        assert server.neighbours() == (boot.peer_id,)


async def test_a_dead_neighbour_is_forgotten(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot:
        async with node(tmp_path, "alice", boot.addresses) as server:
            assert boot.neighbours() == (server.peer_id,)
        async with asyncio.timeout(20):
            while boot.neighbours():
                await directory(boot).servers(ROOT, 12)


async def test_a_node_that_knows_nobody_any_more_finds_its_way_back_at_once(tmp_path: Path) -> None:
    async with (
        node(tmp_path, "boot") as boot,
        node(tmp_path, "alice", boot.addresses, identity=ALICE) as server,
        node(tmp_path, "client", boot.addresses, client=True) as client,
    ):
        published = await directory(server, ALICE).announce(announcement(ALICE))
        assert client.member is not None
        client.member.protocol.routing_table = type(client.member.protocol.routing_table)(
            client.member.protocol.node_id, 20, 5
        )
        assert await directory(client).servers(ROOT, 12) == (published.signed,)


async def test_that_nobody_answers_is_not_that_nobody_serves(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack, AsyncExitStack() as others:
        boot = await others.enter_async_context(node(tmp_path, "boot"))
        client = await stack.enter_async_context(node(tmp_path, "client", boot.addresses, client=True))
        assert await directory(client).servers(ROOT, 12) == ()
        await others.aclose()
        with pytest.raises(Unreachable):
            await directory(client).servers(ROOT, 12)


@pytest.mark.long
async def test_an_initial_peer_that_was_away_learns_of_the_others_again(tmp_path: Path) -> None:
    """Servers that know each other must not leave a restarted bootstrap node, and all who join through it, alone."""
    often = MemberLimits(maintain_s=0.5)
    key = Identity.generate()
    async with AsyncExitStack() as servers:
        async with node(tmp_path, "boot", identity=key) as boot:
            address = boot.addresses[0]
            alice = await servers.enter_async_context(
                node(tmp_path, "alice", boot.addresses, identity=ALICE, member=often)
            )
            await servers.enter_async_context(node(tmp_path, "bob", boot.addresses, identity=BOB, member=often))
        async with asyncio.timeout(20):
            while boot.peer_id in alice.neighbours():
                await directory(alice, ALICE).announce(announcement(ALICE))
        assert alice.neighbours() == (BOB.peer_id,)
        port = int(address.split("/")[4])
        again = NodeConfig(NETWORK, P2PConfig(tmp_path / "boot", ("127.0.0.1", port)), member_limits=often)
        async with open_node(again, clock=time.time) as boot, asyncio.timeout(20):
            while set(boot.neighbours()) != {ALICE.peer_id, BOB.peer_id}:
                await asyncio.sleep(0.1)


def test_of_two_nodes_answers_the_newer_record_counts() -> None:
    gate = RecordGate(NETWORK, time.time)
    now = time.time()
    old, new = (
        Entry(data, facts, facts.span)
        for data in (signed(ALICE, now=now - 20), signed(ALICE, now=now))
        if (facts := gate.facts(data))
    )
    for answers in ((old, new), (new, old)):
        found = Result()
        for answer in answers:
            found.add((answer,))
        assert found.ordered() == (new,)
