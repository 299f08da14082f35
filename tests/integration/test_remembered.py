"""A swarm outlives the node that its members were told of: those that remember others join through them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swarm.errors import SwarmError, Unreachable
from tests.support.swarms import eventually, join, prompt, world

NOTED_WITHIN_S = 60.0  # a client notes its neighbours 20 s after it has joined
SAME = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


@pytest.mark.long
@pytest.mark.slow("a client notes its neighbours after 20 s")
def test_clients_that_remember_nodes_join_when_the_bootstrap_node_is_dead(
    checkpoint: Callable[[str], Path], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    ids = prompt(1, 6)
    with world(checkpoint("llama"), home, spans=("0:3", "3:6")) as running:
        expected = running.full.generate(ids, **SAME)
        monkeypatch.setenv("XDG_STATE_HOME", str(state))
        with join(running.directory, running.swarm) as before:
            assert torch.equal(before.generate(ids, **SAME), expected)
            (noted,) = eventually(lambda: list(state.rglob("*.json")), within_s=NOTED_WITHIN_S)
            running.swarm.bootstrap.process.kill()
            running.swarm.bootstrap.process.wait(20)
            assert torch.equal(before.generate(ids, **SAME), expected), "who has joined goes on"
        with join(running.directory, running.swarm) as after:
            assert torch.equal(after.generate(ids, **SAME), expected)
        noted.unlink()
        with pytest.raises(Unreachable), join(running.directory, running.swarm):
            pass


@pytest.mark.long
@pytest.mark.slow("a server notes its neighbours after 20 s")
def test_servers_that_remember_nodes_join_when_the_bootstrap_node_is_dead(
    checkpoint: Callable[[str], Path], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    ids = prompt(1, 6)
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    with world(checkpoint("llama"), home, spans=("0:3", "3:6"), env={"XDG_STATE_HOME": str(state)}) as running:
        first, second = running.swarm.servers

        def noted() -> bool:
            texts = [path.read_text() for path in state.rglob("*.json")]
            return any(all(server.ready["peer_id"] in text for server in (first, second)) for text in texts)

        eventually(noted, within_s=NOTED_WITHIN_S)
        for process in (running.swarm.bootstrap.process, second.process):
            process.kill()
            process.wait(20)
        running.swarm.start_server("3:6").wait_ready()
        with join(running.directory, running.swarm) as model:
            assert torch.equal(model.generate(ids, **SAME), running.full.generate(ids, **SAME))
        for path in state.rglob("*.json"):
            path.unlink()
        forgetful = running.swarm.start_server("0:6")
        with pytest.raises(SwarmError, match="cannot be reached"):
            forgetful.wait_ready()
