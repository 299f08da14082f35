"""Two local swarms on one machine are two swarms, and leave nothing behind."""

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
