"""Clients without p2pd: in processes without hivemind and uvloop, and without what only Unix has, as on Windows."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.monitor import needs_light
from tests.support.swarms import DEMO_CHECKPOINT, REPOSITORY, World, environment, eventually

pytestmark = needs_light

PROMPT = "def read_lines(path):\n    return "
BARE = ("-X", "warn_default_encoding", "-m", "tests.support.bare")


def generated(world: World, home: Path, *how: str, **env: str) -> str:
    """Run `swarm-generate` in a process of its own and return what it prints."""
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "12", "--network", world.swarm.network)
    peers = ("--initial-peers", ",".join(world.swarm.initial_peers))
    line = [sys.executable, *how, str(DEMO_CHECKPOINT), *arguments, *peers]
    run = subprocess.run(
        line, env={**os.environ, **environment(home), **env}, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def expected(world: World) -> str:
    """What the whole model makes of the prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
    tokens = world.full.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=12, do_sample=False)
    return tokenizer.decode(tokens[0], skip_special_tokens=True) + "\n"


@pytest.mark.long
@pytest.mark.slow("it imports torch and transformers in another process")
def test_bare_process_generates_what_the_whole_model_does(demo: World, tmp_path: Path):
    assert generated(demo, tmp_path, *BARE, "swarm.client.cli") == expected(demo)


@pytest.mark.long
def test_client_reads_the_directory_alone_where_p2pd_is_missing(demo: World, tmp_path: Path):
    without_program = tmp_path / "site" / "hivemind"
    without_program.mkdir(parents=True)
    (without_program / "__init__.py").write_text("raise RuntimeError('hivemind is imported')\n")
    path = os.pathsep.join((str(without_program.parent), str(REPOSITORY)))
    assert generated(demo, tmp_path, "-m", "swarm.client.cli", PYTHONPATH=path) == expected(demo)


@pytest.mark.long
def test_bare_gateway_answers_and_ends_on_ctrl_c(demo: World, tmp_path: Path):
    ready_file, log = tmp_path / "ready.json", tmp_path / "log"
    line = [sys.executable, *BARE, "swarm.gateway.cli", "--listen", "127.0.0.1:0", "--ready-file", str(ready_file)]
    swarm = ("--network", demo.swarm.network, "--initial-peers", ",".join(demo.swarm.initial_peers))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*line, *swarm, "--model", str(DEMO_CHECKPOINT), "--threads", "1"],
            env={**os.environ, **environment(tmp_path)},
            stdout=out,
            stderr=out,
        )
    try:
        eventually(lambda: ready_file.exists() or process.poll() is not None, 90)
        assert ready_file.exists(), log.read_text()
        url = json.loads(ready_file.read_text())["url"]
        body = {"model": "checkpoint", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        answer = httpx.post(url + "/v1/completions", json=body, timeout=60).json()
        assert PROMPT + answer["choices"][0]["text"] + "\n" == expected(demo)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_clients_tests_pass_in_a_bare_process():
    line = [sys.executable, "-m", "pytest", "-p", "tests.support.bare", "-p", "no:cacheprovider", "-q", "-n", "0"]
    run = subprocess.run(
        [*line, "tests/integration/test_client_api.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
