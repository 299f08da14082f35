"""Faults in a real swarm, and every generation comes out as if nothing had happened: `benchmarks/chaos.py`."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from swarm.blocks import Blocks, missing_blocks
from swarm.client.hf.swarm import Swarm
from tests.support.swarms import eventually

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
EVERYWHERE = "kill,stop,p2pd"
IN_NAMESPACES = ",blackhole,disk"


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command's module; those that it consists of can be imported too."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import chaos

    return chaos


@pytest.mark.long
@pytest.mark.alone
def test_no_token_is_wrong_and_no_generation_fails(chaos, tmp_path):
    path = tmp_path / "chaos.json"
    kinds = EVERYWHERE + (IN_NAMESPACES if chaos.namespaces_available() else "")
    size = ("--servers", "8", "--sessions", "3", "--every", "1", "--new-tokens", "32")
    what = ("--faults", "50", *size, "--kinds", kinds)
    line = [sys.executable, str(BENCHMARKS / "chaos.py"), *what, "--json", str(path)]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = subprocess.run(line, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(path.read_text())
    assert len(result["faults"]) == 50
    assert {fault["kind"] for fault in result["faults"]} <= set(kinds.split(","))
    assert result["recoveries"], "no fault was felt by any session: nothing was tried"
    assert len(result["generations"]) >= 10
    assert result["failures"] == [], run.stdout
    assert result["summary"]["generations"].endswith(", 0 never ended")
    assert result["died"] == [], "servers ended that nobody had killed"
    assert not [fault["note"] for fault in result["faults"] if fault["note"]]


def _slot(number: int, blocks: str) -> SimpleNamespace:
    span = Blocks.parse(blocks, 12)
    process = SimpleNamespace(ready={"peer_id": f"p{number}"})
    return SimpleNamespace(number=number, blocks=span, process=process, peer_id=f"p{number}", fault=None, live=True)


@pytest.mark.parametrize("seed", range(20))
def test_the_last_live_holder_of_a_block_is_never_taken(chaos, seed):
    rng = random.Random(seed)
    slots = [_slot(number, chaos.SPANS[number % len(chaos.SPANS)]) for number in range(8)]
    taken = 0
    for _ in range(50):
        chosen = chaos.choose(slots, ("kill", "stop"), {"p0", "p3"}, rng)
        if chosen is None:
            break
        slot = chosen[1]
        slot.live, slot.fault, taken = False, object(), taken + 1
        assert not missing_blocks(Blocks(0, 12), [other.blocks for other in slots if other.live])
    assert 3 <= taken < 8


def test_a_repair_is_put_down_to_the_latest_fault_of_the_hop_that_was_left(chaos):
    from chaos_faults import Fault
    from chaos_report import OTHER, recoveries_of
    from chaos_sessions import Step

    kill = Fault("kill", 1, "a", began=99.9, on_route=1, ended=103.0)
    disk = Fault("disk", 2, "b", began=99.95, on_route=1, ended=103.0)
    usual = [Step(0, 90.0 + i / 10, 0.01, 0, ("a", "b"), ("a", "b")) for i in range(9)]
    repaired = Step(0, 100.4, 0.41, 1, ("a", "b"), ("c", "b"))
    stalled = Step(1, 100.4, 0.61, 0, ("b",), ("b",))
    unexplained = Step(2, 50.0, 0.21, 1, ("a",), ("c",))
    felt = recoveries_of([*usual, repaired, stalled, unexplained], [kill, disk])
    assert [(each.kind, round(each.extra_s, 3)) for each in felt] == [("kill", 0.4), ("disk", 0.6), (OTHER, 0.2)]


def test_a_token_that_the_local_model_does_not_say_is_counted_and_breaks_a_promise(chaos):
    from chaos_report import Run, broken_promises
    from chaos_sessions import Case, Client

    prompt, said = torch.tensor([[5, 6]]), torch.tensor([[5, 6, 7, 9]])
    model = SimpleNamespace(backend=object.__new__(Swarm), generate=lambda *_, **__: said)
    client = Client(0, model, [Case(prompt, torch.tensor([[5, 6, 7, 8]]))], token_s=0.0)
    client.start()
    eventually(lambda: client.generations, within_s=10)
    client.stop()
    eventually(lambda: not client.alive, within_s=10)
    assert client.crash is None
    assert {made.wrong for made in client.generations} == {1}
    broken = broken_promises(Run(1.0, [], [], client.generations, 0, []), [])
    assert broken == [f"no wrong token: {len(client.generations)} were"]
