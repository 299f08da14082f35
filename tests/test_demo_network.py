"""Two demos on one machine are two swarms, and leave nothing behind."""

from pathlib import Path

import pytest

from swarm.access import Access
from swarm.demo.cli import network_of_its_own
from swarm.dht.peermemory import memory_of


def test_demos_have_networks_of_their_own_and_no_nodes_of_them_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with network_of_its_own() as one, network_of_its_own() as other:
        assert one != other
        memory = memory_of(one, Access(), public=False).path
        memory.parent.mkdir(parents=True)
        memory.write_text("{}")
    assert not memory.exists()
