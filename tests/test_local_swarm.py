"""Local swarms: two on one machine are two swarms, and leave nothing behind. The demo's runs over distances."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.access import Access
from swarm.demo.local import LocalSwarm
from swarm.dht.peermemory import memory_of
from tests.support import warm
from tests.support.swarms import DEMO_CHECKPOINT


def test_swarms_have_networks_of_their_own_and_no_nodes_of_them_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with (
        LocalSwarm(DEMO_CHECKPOINT, launch=warm.launch) as one,
        LocalSwarm(DEMO_CHECKPOINT, launch=warm.launch) as other,
    ):
        assert one.network != other.network
        memory = memory_of(one.network, Access(), public=False).path
        memory.parent.mkdir(parents=True)
        memory.write_text("{}")
    assert not memory.exists()


def test_the_users_settings_are_of_another_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWKz4bXG9MkoPZ6do7b3r4Zy8W2LF94gLzxtYCSxMQSmDw"  # no node is there
    for name, value in {"INITIAL_PEERS": peer, "NETWORK": "theirs", "NUM_BLOCKS": "3"}.items():
        monkeypatch.setenv(f"SWARM_{name}", value)
    with LocalSwarm(DEMO_CHECKPOINT, ("0:6",), launch=warm.launch) as swarm:
        assert swarm.servers[0].ready["blocks"] == "0:6"


@pytest.mark.long
def test_the_demo_over_distances_gives_one_text_twice() -> None:
    line = [sys.executable, "-m", "swarm.demo.cli", "--delay-ms", "25", "--max-new-tokens", "32"]
    run = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    plain, guessed = run.stdout.split("25 ms from peer to peer:\n\n")[1:]
    text = plain.partition("\nwith guesses that travel ahead")[0].rstrip()
    assert text
    assert guessed.startswith(text)
    said = re.search(
        r"the same text: ([\d.]+) and ([\d.]+) tokens a second.*; (\d+) of (\d+) guesses were right", guessed
    )
    assert said is not None, guessed
    assert float(said[1]) < 10.0  # a trip takes a tenth of a second
    assert 0 < int(said[3]) <= int(said[4])
