"""Servers that choose their own blocks: together they cover the model, and move without ending anybody's session."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from swarm.demo.local import LocalProcess
from tests.support.swarms import World, eventually, prompt, world

SAME = {"pad_token_id": 0, "eos_token_id": None}
THREE_BLOCKS = ("auto", "--num-blocks", "3")


@pytest.fixture
def empty(checkpoint: Callable[[str], Path], home: Path) -> Iterator[World]:
    """A bootstrap node, and nobody who serves."""
    with world(checkpoint("llama"), home, spans=()) as running:
        yield running


def test_servers_that_start_together_choose_different_blocks(empty: World):
    servers = [empty.swarm.start_server(*THREE_BLOCKS) for _ in range(2)]
    assert sorted(server.wait_ready().ready["blocks"] for server in servers) == ["0:3", "3:6"]
    got = empty.client().generate(prompt(1, 6), max_new_tokens=8, **SAME)
    assert torch.equal(got, empty.full.generate(prompt(1, 6), max_new_tokens=8, **SAME))


@pytest.mark.long
def test_a_server_with_room_for_the_whole_model_takes_all_of_it(empty: World):
    assert empty.swarm.start_server("auto").wait_ready().ready["blocks"] == "0:6"


@pytest.mark.long
@pytest.mark.slow("six servers, one of which drains and moves")
def test_a_server_moves_to_where_it_is_needed_and_its_session_goes_on_elsewhere(empty: World):
    mover = empty.swarm.start_server(*THREE_BLOCKS, "--rebalance-every", "0.5").wait_ready()
    assert mover.ready["blocks"] == "0:3"
    empty.swarm.start_server("3:6").wait_ready()
    model = empty.client()
    with model.inference_session(max_length=400):
        first = model.generate(prompt(1, 6), max_new_tokens=4, **SAME)
        assert model.route[0].peer_id == mover.ready["peer_id"]
        for _ in range(3):  # two would do, were none of them silent for a moment: it stays where only one is known
            empty.swarm.start_server("0:3").wait_ready()  # one by one: together, each would measure half its speed
        eventually(lambda: blocks_now(mover) == "3:6", within_s=90, every_s=0.1)
        rest = model.generate(first, max_new_tokens=8, **SAME)
    assert torch.equal(rest, empty.full.generate(prompt(1, 6), max_new_tokens=12, **SAME))
    assert model.route[0].peer_id != mover.ready["peer_id"]
    events = [json.loads(line) for line in mover.log.read_text().splitlines() if line.startswith("{")]
    moved = next(event for event in events if event["event"] == "leaving")
    assert (moved["sessions"], moved["moving_to"]) == (1, "3:6")
    assert mover.process.pid == mover.ready["pid"], "the same process, and so the same identity"
    mover.ask_to_stop()
    assert mover.process.wait(timeout=20) == 0


def blocks_now(server: LocalProcess) -> str:
    """What a server's ready file says now."""
    return str(json.loads(server.log.with_suffix(".json").read_text())["blocks"])
