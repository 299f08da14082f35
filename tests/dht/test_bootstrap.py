"""`swarm-bootstrap` as a process: a fork of one that has imported everything, which takes seconds."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from swarm.identity import Identity
from tests.dht.support import NETWORK, is_running, node
from tests.support import warm
from tests.support.often import rest_is_long
from tests.support.swarms import eventually

START_S = 30.0


@dataclass(frozen=True)
class Bootstrap:
    process: warm.Warm
    ready: dict[str, object]
    children: list[int]
    folder: Path

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.ready["addresses"])  # type: ignore[arg-type]


def start(folder: Path, *arguments: str, **environment: str) -> warm.Command:
    common = ("--listen", "127.0.0.1:0", "--network", NETWORK, "--identity", str(folder / "identity"))
    return warm.start(folder, "swarm.dht.cli", *common, *arguments, env={"HOME": str(folder), **environment})


@contextmanager
def bootstrap(folder: Path, *arguments: str, **environment: str) -> Iterator[Bootstrap]:
    ready = folder / "ready.json"
    command = start(folder, "--ready-file", str(ready), *arguments, **environment)
    process = command.process
    try:
        eventually(lambda: ready.exists() or process.poll() is not None, within_s=START_S)
        assert process.poll() is None, command.printed()
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert children
        yield Bootstrap(process, json.loads(ready.read_text()), children, folder)
    finally:
        process.kill()
        process.wait()


def assert_gone(pids: list[int]) -> None:
    eventually(lambda: not any(map(is_running, pids)), within_s=10)


@pytest.mark.parametrize("number", rest_is_long([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
async def test_serves_and_ends_cleanly_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with bootstrap(tmp_path) as running:
        assert running.ready["pid"] == running.process.pid
        assert running.ready["peer_id"] == Identity.load_or_create(tmp_path / "identity").peer_id
        async with node(tmp_path, "alice", running.addresses) as server:
            assert server.neighbours() == (running.ready["peer_id"],)
        running.process.send_signal(number)
        code = await asyncio.to_thread(running.process.wait, 10)
        assert code == 0
        assert_gone(running.children)
        assert not (tmp_path / "ready.json").exists()
        assert (tmp_path / "identity").stat().st_mode & 0o777 == 0o600


async def test_behind_a_router_it_tells_the_address_that_it_was_given(tmp_path: Path) -> None:
    with bootstrap(tmp_path, "--announce-address", "203.0.113.7:4001") as running:
        assert running.addresses == (f"/ip4/203.0.113.7/tcp/4001/p2p/{running.ready['peer_id']}",)


def test_kill_9_leaves_no_child(tmp_path: Path) -> None:
    with bootstrap(tmp_path) as running:
        running.process.kill()
        running.process.wait()
        assert_gone(running.children)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with bootstrap(tmp_path) as running:
        for child in running.children:
            os.kill(child, signal.SIGSTOP)  # so that the orderly end takes its three seconds
        running.process.terminate()
        eventually(lambda: ends(running.process), within_s=10)
        assert running.process.returncode == 128 + signal.SIGTERM
        assert_gone(running.children)


def ends(process: warm.Warm) -> bool:
    """Send one more signal: the loop takes two that it reads at once for one. Returns whether the process has ended."""
    process.terminate()
    return process.poll() is not None


def test_a_signal_while_it_starts_ends_it_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts and says nothing: joining takes its time
        peer = f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}/p2p/{Identity.generate().peer_id}"
        command = start(tmp_path, "--initial-peers", peer)
        mute.settimeout(START_S)
        connection, _ = mute.accept()
        children = [child.pid for child in psutil.Process(command.process.pid).children(recursive=True)]
        command.process.terminate()
        assert command.ended(within_s=5) == (0, "")
        assert_gone(children)
        connection.close()


def test_a_second_process_on_the_same_identity_is_refused(tmp_path: Path) -> None:
    with bootstrap(tmp_path):
        assert_ends(start(tmp_path), 2, "another process uses the identity")


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert_ends(start(tmp_path, "--listen", f"127.0.0.1:{port}"), 2, f"cannot listen on 127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--listen", "nonsense"], {}, "HOST:PORT"),
        (["--listen", "127.0.0.1:70000"], {}, "HOST:PORT"),
        (["--network", "Not A Name"], {}, "small letters"),
        (["--initial-peers", "1.2.3.4:5"], {}, "/ip4/1.2.3.4/tcp/31337/p2p/12D3KooW"),
        (["--log-level", "loud"], {}, "log-level"),
        (["--no-such-option"], {}, "--no-such-option"),
        (["--ready-file", "/proc/no/such/place"], {}, "ready file"),
        (["--identity", "/proc/no/such/place"], {}, "identity"),
        ([], {"SWARM_LOG_LEVEL": "loud"}, "log_level"),
        ([], {"SWARM_INITIAL_PEERS": "one,two"}, "one"),
    ],
)
def test_a_bad_argument_gets_one_line(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], words: str
) -> None:
    assert_ends(start(tmp_path, *arguments, **environment), 2, words)


def test_unreachable_initial_peers_are_named(tmp_path: Path) -> None:
    """Those that nobody listens at; for those that say nothing see test_node."""
    peer = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
    assert_ends(start(tmp_path, "--initial-peers", peer), 1, peer)


def assert_ends(command: warm.Command, code: int, words: str) -> None:
    ended, printed = command.ended(within_s=START_S)
    lines = printed.strip().splitlines()
    assert ended == code, printed
    assert len(lines) == 1, printed
    assert lines[0].startswith("error: ")
    assert words in lines[0]
