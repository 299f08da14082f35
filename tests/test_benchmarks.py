"""The benchmarks run, and write what the documentation says that they write."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.monitor import needs_light
from tests.support.lab import unavailable

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("hop_overhead", {"local", "1 hop", "2 hops", "3 hops", "generate, local", "generate, 3 hops"}),
        ("plan", {"spans of 8, latency", "spans of 8, throughput", "spans of 8, latency, computing"}),
        ("inversion", {f"blocks 0:{depth}, attacker's time per token" for depth in (0, 1, 2, 4, 8)}),
        ("placement", {"settled / annealer", "settled with stale views / annealer"}),
        ("placement_liars", {"nobody: with / without", "silent: with / without", "boasting: with / without"}),
        pytest.param(
            "health",
            {"first reading of the DHT", "later readings", "GET /api/v1/state, 50 a second"},
            marks=needs_light,
        ),
        ("decode", {"1 sessions", "2 sessions", "stock, beside 1"}),
        ("prefill", {"256, overlapped", "256, one by one"}),
        ("mixed", {"decode alone", "decode beside prefills", "prefills"}),
        ("memory", {"before", "held", "closed"}),
        ("hostile", {"step, no attack", "step, attacked"}),
        pytest.param("hostile_directory --check", {"step, no attack", "step, attacked"}, marks=needs_light),
        ("serving", {"TTFT, 1 clients", "TTFT, 8 clients"}),
        ("encryption", {"sealed", "plain", "a frame, sealed and opened", "a frame, plain"}),
        ("receipts", {"16 steps of one position, noted, each", "128 positions (1 MiB), noted"}),
        ("gateway", {f"2 streams, {mode}, TTFT" for mode in ("gateway", "threads", "clients")}),
        ("gateway_faults", {"undisturbed", "disturbed"}),
        ("gateway_load", {"second turn", "new session"}),
        ("gateway_load audits", {"--audit 0.02", "--audit 0"}),
        ("kad_flood --check", set()),
        ("grammar", {"compile", "mask", "mask, processor time", "take", "forced tokens"}),
        pytest.param("joining", {f"{way}, first route" for way in ("p2pd", "light")}, marks=needs_light),
        pytest.param(
            "dht_hidden",
            {f"{what}, {mode}" for what in ("join", "look-up") for mode in ("clients until called", "servers at once")},
            marks=pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
        ),
        pytest.param(
            "nat pairs relay moored",
            {"connect, no symmetric router", "anchor's CPU, a relayed frame", "anchor's CPU, a second of pings"},
            marks=pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
        ),
        pytest.param(
            "nat tokens",
            {"token, all public", "token, four cones", "token, all symmetric"},
            marks=pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
        ),
        (
            "gpu_check --device cpu",
            {"section wide", "section families", "decode, sessions, 2, past 8", "prefill, 16 tokens"},
        ),
        ("speculation", {"5 ms, edit, greedy, stock", "5 ms, new, seeded, ahead, 0.75", "5 ms, new, greedy, never"}),
        ("guess_equal --check", {"text"}),
        ("guess_kills --check", {"generation, disturbed"}),
        ("draft", {"plain", "look-up", "draft", "alone"}),
        ("directory --check", set()),
        ("patrol --check", set()),
        ("audits_honest --check", set()),
        ("starting", {"bfloat16", "int8, first", "int8, second", "int4, first", "int4, second"}),
        pytest.param("soak --check", set(), marks=needs_light),
        ("wire", {"encode plain, 4096 x 1", "encode int8, 8192 x 256", "decode int8, 8192 x 256"}),
        ("wire_quality --check", {"plain", "int8, 3 hops", "int8, every block"}),
        ("wire_prefill", {"plain", "int8"}),
        ("head --check", {"exact", "bounds, greedy", "bounds, top-k 50, top-p 0.9"}),
        ("wan", {"token, local", "token, ring", "first token, local", "first token, ring"}),
    ],
)
def test_a_benchmark_prints_a_table_and_writes_its_raw_samples(name, measured, tmp_path):
    path = tmp_path / "result.json"
    name, *parts = name.split()
    line = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *parts, "--quick", "--json", str(path)]
    run = subprocess.run(line, capture_output=True, text=True, timeout=800, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(path.read_text())["benchmark"] == name
    assert len(run.stdout.splitlines()) > 3
    result = json.loads(path.read_text())
    assert {"commit", "machine", "seed", "samples"} <= result.keys()
    samples = {sample["name"]: sample["ms"] for sample in result["samples"]}
    assert measured <= samples.keys()
    assert all(samples.values())


@pytest.mark.long
def test_a_lone_decode_step_takes_few_calls(tmp_path):
    line = [
        sys.executable,
        str(ROOT / "benchmarks/trace_step.py"),
        "--check",
        "250",
        "--json",
        str(tmp_path / "result"),
    ]
    run = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.long
def test_a_version_is_compared_with_itself(tmp_path):
    path = tmp_path / "result"
    line = [sys.executable, str(ROOT / "benchmarks/hop_turns.py"), str(ROOT), "--tokens", "40", "--json", str(path)]
    run = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert set(json.loads(path.read_text())["shares"]) == {"1 hop", "2 hops", "3 hops"}
