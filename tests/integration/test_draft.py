"""`swarm-draft` through a swarm of processes: it stops at Ctrl-C, goes on, and `swarm-generate` takes its draft."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.swarms import DEMO_CHECKPOINT, World, environment

PROMPT = "def read_lines(path):\n    return "


def command(world: World, home: Path, module: str, *arguments: str) -> "subprocess.Popen[str]":
    joining = ("--network", world.swarm.network, "--initial-peers", ",".join(world.swarm.initial_peers))
    line = [sys.executable, "-m", module, str(DEMO_CHECKPOINT), *joining, *arguments]
    env = {**os.environ, **environment(home)}
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out


@pytest.mark.long
@pytest.mark.slow("processes import torch, and a head is trained")
def test_draft_is_made_in_two_runs_and_taken(demo: World, tmp_path: Path):
    texts, out = tmp_path / "texts", tmp_path / "draft"
    texts.mkdir()
    for path in Path(os.__file__).parent.glob("[a-d]*.py"):
        (texts / path.name).write_bytes(path.read_bytes())
    sizes = ("--tokens", "40000", "--positions", "128", "--steps", "60", "--layers", "1")
    making = ("swarm.client.distilling.cli", "--texts", str(texts), "--out", str(out), *sizes)
    first = command(demo, tmp_path, *making)
    kept = out / "work" / "collected"
    deadline = time.monotonic() + 120
    while not (kept.exists() and int(kept.read_text()) > 0):
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    assert "the same command goes on" in said(first)
    collected = int(kept.read_text())
    assert collected > 0
    assert "the draft is complete" in said(command(demo, tmp_path, *making))
    assert sorted(path.name for path in out.iterdir()) == ["draft.json", "draft.safetensors"]

    generating = ("--prompt", PROMPT, "--max-new-tokens", "12", "--draft", str(out))
    text = said(command(demo, tmp_path, "swarm.client.cli", *generating))
    tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
    tokens = demo.full.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=12, do_sample=False)
    assert text == tokenizer.decode(tokens[0], skip_special_tokens=True) + "\n"
