"""Every command and every snippet of the README runs, as it stands there."""

import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "swarm" / "demo" / "checkpoint"
ADDRESS = re.compile(r"/ip4/127\.0\.0\.1/tcp/31337/p2p/12D3KooW\.\.\.")
DEADLINE_S = 120


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def commands():
    return [line for block in blocks("sh") for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """The README's swarm: the commands that stay are started, on free ports and with the demo's checkpoint."""
    folder = tmp_path_factory.mktemp("readme")
    scripts = Path(sys.executable).parent
    env = {
        **os.environ,
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "XDG_DATA_HOME": str(folder / "data"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "SWARM_LISTEN": "127.0.0.1:0",
        "SWARM_P2P_LISTEN": "127.0.0.1:0",
        "SWARM_THREADS": "1",
    }
    started = []
    try:
        for line in commands():
            if line.startswith(("swarm-bootstrap", "swarm-serve")):
                ready = folder / f"{len(started)}.json"
                text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:0", line.replace("MODEL", str(CHECKPOINT)))
                log = folder / f"{len(started)}.log"
                started_as = [*shlex.split(text), "--ready-file", str(ready)]
                with log.open("w") as file:
                    started.append(subprocess.Popen(started_as, env=env, cwd=folder, stdout=file, stderr=file))
                address = wait_ready(started[-1], ready, log)
                env.setdefault("SWARM_INITIAL_PEERS", address)
        yield env, folder
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(20) for process in started]
    assert codes == [0] * len(codes)


def wait_ready(process, path, log):
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return re.search(r"/ip4/[^\"]+", path.read_text())[0]


def test_the_readme_has_the_commands_that_this_file_knows():
    names = [line.split()[0] for line in commands()]
    assert names == ["make", "swarm-bootstrap", "export", "swarm-serve", "swarm-serve", "swarm-generate"]


def test_make_demo_is_a_target_that_runs_the_demo():
    planned = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert planned.strip().endswith("swarm-demo")


def test_the_demo_gives_the_local_models_tokens_and_leaves_nothing_running():
    run = subprocess.run(
        [sys.executable, "-m", "swarm.demo.cli", "--max-new-tokens", "24"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "the local model gives the same" in run.stdout
    assert "time to first token" in run.stdout
    last = run.stdout.splitlines()[-1]
    names = [Path(word).name for word in last.split() if word.startswith("/") and os.access(word, os.X_OK)]
    assert [name for name in names if name.startswith("swarm-")] == ["swarm-bootstrap", "swarm-serve"], last


def test_the_export_line_names_a_multiaddr():
    (line,) = [line for line in commands() if line.startswith("export")]
    assert ADDRESS.search(line)


def test_swarm_generate_continues_the_prompt(running):
    env, folder = running
    (line,) = [line for line in commands() if line.startswith("swarm-generate")]
    run = subprocess.run(
        shlex.split(line.replace("MODEL", str(CHECKPOINT))),
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("def quicksort(items):")
    assert len(run.stdout) > len("def quicksort(items):") + 20


def test_the_python_snippet_runs(running, capsys, tmp_path):
    env, _ = running
    (snippet,) = blocks("python")
    script = tmp_path / "snippet.py"
    script.write_text(ADDRESS.sub(env["SWARM_INITIAL_PEERS"], snippet).replace('"MODEL"', repr(str(CHECKPOINT))))
    names = runpy.run_path(str(script))
    try:
        printed = capsys.readouterr().out
        assert "def quicksort(items):" in printed
        assert [str(hop.blocks) for hop in names["model"].route] == ["0:6", "6:12"]
    finally:
        names["model"].close()
