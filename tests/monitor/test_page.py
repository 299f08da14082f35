"""`swarm-health` as a process over a real swarm: it finds the servers, sees one die, probes, and leaves in order."""

import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.demo.local import LocalProcess, LocalSwarm, Place
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.monitor.probe import probe_once
from swarm.server.measure import device_name
from tests.monitor import needs_light
from tests.support import warm
from tests.support.swarms import DEMO_CHECKPOINT, DEMO_SPANS, NETWORK, environment, eventually, join

pytestmark = needs_light


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    env = environment(tmp_path_factory.mktemp("home"))
    with LocalSwarm(DEMO_CHECKPOINT, DEMO_SPANS, network=NETWORK, env=env, launch=warm.launch) as running:
        yield running


@contextmanager
def page(folder: Path, swarm: LocalSwarm, *options: str) -> Iterator[LocalProcess]:
    peers = ("--initial-peers", ",".join(swarm.initial_peers), "--network", swarm.network)
    database = ("--database", str(folder / "health.sqlite"))
    arguments = ("--listen", "127.0.0.1:0", *peers, *database, *options)
    env = {**environment(folder), "PATH": "/usr/bin:/bin"}
    process = LocalProcess("health", "tests.monitor.impatient", arguments, Place(folder), env)
    try:
        yield process.wait_ready()
    finally:
        assert process.stop() == 0, process.log.read_text()


class Watched:
    """A model, and a user's own clock: when generate() was called and when it handed over each token."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.times: list[float] = []

    def generate(self, *arguments: Any, streamer: Any, **options: Any) -> Any:
        self.times = [time.perf_counter()]
        self._streamer = streamer
        return self._model.generate(*arguments, streamer=self, **options)

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())
        self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()


@pytest.mark.long
def test_probes_agree_with_a_clients_own_clock_within_a_tenth(swarm):
    """Of the same generations, however fast the machine is just then."""
    with join(DEMO_CHECKPOINT, swarm) as model:
        watched = Watched(model)
        for _ in range(5):
            line = probe_once(watched, "ab" * 32)
            assert line.ok, line.why
            _, _, first, *rest = watched.times  # called, the prompt, the first token
            assert line.ttft_ms == pytest.approx(1000 * (first - watched.times[0]), rel=0.1)
            gaps = [1000 * (b - a) for a, b in pairwise([first, *rest])]
            assert statistics.median(line.gaps_ms) == pytest.approx(statistics.median(gaps), rel=0.1)
            assert len(line.gaps_ms) == len(gaps) == 16


@pytest.mark.long
def test_it_finds_a_swarm_probes_it_and_sees_a_server_die(swarm, tmp_path):
    with page(tmp_path, swarm, "--probe", str(DEMO_CHECKPOINT), "--probe-every", "1") as running:
        url = running.ready["url"]

        def model() -> Any:
            models = get(url + "/api/v1/state")["models"]
            return models[0] if models and models[0]["probes"] and models[0]["servers_online"] == 3 else None

        found = eventually(model, 90, 0.1)
        assert (found["status"], found["missing_blocks"], found["coverage"]) == ("healthy", [], 1.0)
        day = found["probes"][0]
        assert day["success_rate"] == 1.0
        assert 0 < day["inter_token_ms"]["p50"] <= day["inter_token_ms"]["p95"]
        detail = get(f"{url}/api/v1/models/{found['root']}")
        assert [server["blocks"] for server in detail["servers"]] == [[0, 4], [4, 8], [8, 12]]
        assert {server["device"] for server in detail["servers"]} == {device_name(torch.device("cpu"))}
        memory = int(Path(f"/proc/{running.process.pid}/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
        assert memory < 200, "MB"

        swarm.servers[1].kill()
        broken = eventually(lambda: (m := get(url + "/api/v1/state")["models"][0])["status"] == "broken" and m, 60, 0.1)
        assert broken["missing_blocks"] == [4, 5, 6, 7]
    with page(tmp_path, swarm) as running:  # started again: the history is still there
        history = get(running.ready["url"] + f"/api/v1/history?root={found['root']}&window=30d")
        assert history["points"]


@pytest.mark.long
def test_a_private_swarms_page_is_for_members(tmp_path):
    """Network key and list together, as everybody in the swarm has them; probes come from the page's own identity."""
    members = {name: Identity.generate() for name in ("bootstrap", "server-0", "health")}
    key, peers = tmp_path / "network.key", tmp_path / "peers"
    key.touch(mode=0o600)
    key.write_text("5a" * 32)
    peers.write_text("\n".join(member.peer_id for member in members.values()))
    members["health"].save(tmp_path / "health")
    env = environment(tmp_path) | {"SWARM_NETWORK_KEY": str(key), "SWARM_ALLOW_PEERS": str(peers)}
    own = ("--network-key", str(key), "--allow-peers", str(peers), "--identity", str(tmp_path / "health"))
    probes = ("--probe", str(DEMO_CHECKPOINT), "--probe-every", "1")
    with LocalSwarm(
        DEMO_CHECKPOINT, ["0:12"], network=NETWORK, env=env, identities=members, launch=warm.launch
    ) as swarm:
        with page(tmp_path, swarm, *own, *probes) as running:

            def model() -> Any:
                models = get(running.ready["url"] + "/api/v1/state")["models"]
                return models[0] if models and models[0]["probes"] and models[0]["servers_online"] else None

            found = eventually(model, 90, 0.1)
            assert found["missing_blocks"] == []
            assert found["probes"][0]["success_rate"] == 1.0
        stranger = tmp_path / "outside"
        stranger.mkdir()
        with page(stranger, swarm) as running:
            state = get(running.ready["url"] + "/api/v1/state")
            assert state["reading"]["error"] is None, "it did read, and found nothing"
            assert state["models"] == []


def test_a_page_that_is_not_on_its_own_list_does_not_start(tmp_path):
    (tmp_path / "peers").write_text(Identity.generate().peer_id)
    Identity.generate().save(tmp_path / "identity")
    own = ("--allow-peers", str(tmp_path / "peers"), "--identity", str(tmp_path / "identity"))
    arguments = ("--initial-peers", "x", "--database", str(tmp_path / "h.sqlite"), *own)
    process = LocalProcess("health", "swarm.monitor.cli", arguments, Place(tmp_path), environment(tmp_path))
    with pytest.raises(SwarmError, match=r"ended with code 2: .*own id is not on the list; add 12D3KooW"):
        process.wait_ready()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--initial-peers"),
        pytest.param(("--initial-peers", "nonsense"), "nonsense", marks=pytest.mark.long),
        pytest.param(
            ("--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooW", "--join-address", "1.2.3.4"),
            "1.2.3.4",
            marks=pytest.mark.long,
        ),
        pytest.param(("--initial-peers", "x", "--listen", "127.0.0.1:1:1"), "HOST:PORT", marks=pytest.mark.long),
        (("--initial-peers", "x", "--database", "/proc/nowhere/health.sqlite"), "--database"),
    ],
)
def test_bad_arguments_end_with_one_line_and_2(arguments, says, tmp_path):
    database = () if "--database" in arguments else ("--database", str(tmp_path / "h.sqlite"))
    listen = () if "--listen" in arguments else ("--listen", "127.0.0.1:0")
    line = [sys.executable, "-m", "swarm.monitor.cli", *arguments, *database, *listen, "--log-level", "error"]
    run = subprocess.run(line, capture_output=True, text=True, timeout=60, env=environment(tmp_path), check=False)
    assert run.returncode == 2, run.stderr
    assert says in run.stderr
    assert len(run.stderr.splitlines()) == 1
