import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hivemind.proto.dht_pb2 import PingRequest, PingResponse

from swarm.errors import P2PFailed, Unreachable
from swarm.identity import Identity
from swarm.net.limits import DaemonLimits
from swarm.net.p2p import Daemon, P2PConfig, p2pd, running_daemon, supervise
from swarm.net.program import OVERRIDE, check_program
from tests.dht.support import is_running, soon

PARENT = """
import subprocess, sys, time
from swarm.net.launch import command
child = subprocess.Popen(command("/bin/sleep", "60", descriptors_max=99, data_bytes_max=1 << 30))
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_launched_child_has_limits_and_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            deadline = time.monotonic() + 5
            while "sleep" not in _file(child, "comm"):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            limits = [line.split() for line in _file(child, "limits").splitlines()]
            assert ["Max", "open", "files", "99", "99", "files"] in limits
            assert ["Max", "data", "size", "1073741824", "1073741824", "bytes"] in limits
        finally:
            parent.kill()
    deadline = time.monotonic() + 2
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _file(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/{name}") as file:
        return file.read()


async def test_connecting_gives_up_at_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with running_daemon(P2PConfig(None, None)) as daemon:
            address = f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}/p2p/{Identity.generate().peer_id}"
            with soon(1.5), pytest.raises(Unreachable, match="12D3KooW"):
                await daemon.connect(address, 0.5)


async def test_a_p2pd_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, hashlib.sha256(Path("/bin/false").read_bytes()).hexdigest())
    with pytest.raises(P2PFailed, match="did not start"):
        async with running_daemon(P2PConfig(None, None, program=Path("/bin/false"))):
            pass


async def test_another_p2pd_is_never_started(tmp_path: Path) -> None:
    program, mark = tmp_path / "p2pd", tmp_path / "it ran"
    program.write_text(f"#!/bin/sh\ntouch '{mark}'\n")
    program.chmod(0o755)
    with pytest.raises(P2PFailed, match=f"{hashlib.sha256(program.read_bytes()).hexdigest()}.*{OVERRIDE}="):
        async with running_daemon(P2PConfig(None, None, program=program)):
            pass
    assert not mark.exists()


async def test_a_trusted_hash_takes_the_place_of_the_pinned_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(OVERRIDE, "0" * 64)
    with pytest.raises(P2PFailed, match=f"not {'0' * 64}"):
        async with running_daemon(P2PConfig(None, None)):
            pass


def test_the_binary_of_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "plan9")
    with pytest.raises(P2PFailed, match="known for this platform"):
        check_program(p2pd())


@pytest.mark.long
async def test_a_p2pd_that_keeps_failing_is_given_up() -> None:
    started, limits = [], DaemonLimits(backoff_s=(0.01,), restarts_max=2)

    @contextlib.asynccontextmanager
    async def attach(daemon: Daemon) -> AsyncIterator[None]:
        started.append(daemon.pid)
        os.kill(daemon.pid, signal.SIGKILL)
        yield

    with pytest.raises(P2PFailed, match="3 times in a row"):
        await asyncio.wait_for(supervise(P2PConfig(None, None, limits=limits), attach), 20)
    assert len(started) == 3
    assert not any(is_running(pid) for pid in started)


async def test_p2pd_relays_for_no_peer_and_has_limits() -> None:
    async with running_daemon(P2PConfig(None, ("127.0.0.1", 0))) as daemon:
        line = _file(daemon.pid, "cmdline").split("\0")
        assert "-relayService=0" in line
        assert "-autonat=0" in line
        limits = [row.split() for row in _file(daemon.pid, "limits").splitlines()]
        assert ["Max", "open", "files", *[str(DaemonLimits().descriptors_max)] * 2, "files"] in limits
        assert ["Max", "data", "size", *[str(DaemonLimits().data_bytes_max)] * 2, "bytes"] in limits
        async with running_daemon(P2PConfig(None, None)) as stranger:
            await stranger.connect((await daemon.addresses())[0], 5.0)
            for end in ("hop", "stop"):
                with pytest.raises(Unreachable, match="protocol"):
                    await stranger.open_stream(daemon.p2p.peer_id.to_bytes(), f"/libp2p/circuit/relay/0.2.0/{end}", 5.0)


@pytest.mark.long
async def test_a_p2pd_that_dies_while_attaching_is_replaced() -> None:
    attempts: list[Daemon] = []
    attached = asyncio.Event()

    @contextlib.asynccontextmanager
    async def attach(daemon: Daemon) -> AsyncIterator[None]:
        attempts.append(daemon)
        if len(attempts) == 2:
            os.kill(daemon.pid, signal.SIGKILL)
            await asyncio.get_running_loop().create_future()  # as hivemind waits for the answer of a dead one
        if len(attempts) > 2:
            attached.set()
        yield

    task = asyncio.create_task(supervise(P2PConfig(None, None), attach))
    try:
        async with asyncio.timeout(30):
            while not attempts:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            os.kill(attempts[0].pid, signal.SIGKILL)
            await attached.wait()
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert len(attempts) == 3


async def test_a_call_to_a_p2pd_that_ends_fails_and_does_not_end_its_caller() -> None:
    async def silent(request: PingRequest, _: object) -> PingResponse:
        await asyncio.get_running_loop().create_future()
        raise AssertionError(request)

    async with running_daemon(P2PConfig(None, ("127.0.0.1", 0))) as other:
        await other.p2p.add_protobuf_handler("silent", silent, PingRequest)
        async with running_daemon(P2PConfig(None, None)) as daemon:
            await daemon.connect((await other.addresses())[0], 5.0)
            call = daemon.p2p.call_protobuf_handler(other.p2p.peer_id, "silent", PingRequest(), PingResponse)
            calling = asyncio.create_task(call)
            await asyncio.sleep(0.2)
        with pytest.raises(ConnectionError, match="p2pd has ended"):
            await calling
