"""`swarm-gateway` as a process over a swarm of processes: it gets ready, answers, and ends in order."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from swarm.demo.local import LocalSwarm
from tests.support import warm
from tests.support.swarms import DEMO_CHECKPOINT, environment, eventually

PROMPT = "def read_lines(path):\n    return "
pytestmark = pytest.mark.slow("processes of a gateway and of a whole swarm")


@pytest.fixture(scope="module")
def swarm():
    with LocalSwarm(DEMO_CHECKPOINT, ["0:12"], launch=warm.launch) as swarm:
        yield swarm


class Gateway:
    """One running command: where it is, what it printed, and how it ends."""

    def __init__(self, folder, swarm, options):
        self.ready_file = folder / "ready.json"
        arguments = ("--listen", "127.0.0.1:0", "--network", swarm.network, "--ready-file", str(self.ready_file))
        peers = ("--initial-peers", ",".join(swarm.initial_peers))
        arguments = (*arguments, "--threads", "1", *peers, *options)
        self.command = warm.start(folder, "swarm.gateway.cli", *arguments, env=environment(folder))
        eventually(lambda: self.ready_file.exists() or self.command.process.poll() is not None, 60)
        assert self.ready_file.exists(), self.command.printed()
        self.headers = {}
        self.ready = json.loads(self.ready_file.read_text())
        self.url = self.ready["url"]

    def complete(self, **options):
        body = {"model": "checkpoint", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **options}
        return httpx.post(self.url + "/v1/completions", json=body, timeout=60, headers=self.headers)

    def end(self, number):
        self.command.process.send_signal(number)
        code, printed = self.command.ended(20)
        assert code == 0, printed
        assert not self.ready_file.exists()
        return printed


@contextmanager
def running(folder, swarm, *options) -> Iterator[Gateway]:
    folder.mkdir(exist_ok=True)
    gateway = Gateway(folder, swarm, options or ("--model", str(DEMO_CHECKPOINT)))
    try:
        yield gateway
    finally:
        gateway.command.process.kill()


def test_gateway_gets_ready_answers_and_ends_on_sigterm(tmp_path, swarm):
    with running(tmp_path, swarm) as gateway:
        assert gateway.ready["models"] == ["checkpoint"]
        assert gateway.ready["pid"] == gateway.command.process.pid
        answer = gateway.complete()
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert httpx.get(gateway.url + "/readyz").json()["models"] == {"checkpoint": {"ready": True, "reason": ""}}
        figures = httpx.get(gateway.url + "/metrics").text
        assert 'swarm_gateway_tokens_total{kind="output",model="checkpoint"} 8.0' in figures
        assert "swarm_gateway_conversations_idle 1.0" in figures
        assert "swarm_gateway_models_loaded 1.0" in figures
        printed = gateway.end(signal.SIGTERM)
    assert f'"id": "{answer.headers["x-request-id"]}"' in printed
    assert "read_lines" not in printed


def test_gateway_ends_on_ctrl_c_under_a_stream(tmp_path, swarm):
    with running(tmp_path, swarm) as gateway:
        body = {"model": "checkpoint", "prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", gateway.url + "/v1/completions", json=body, timeout=60) as response:
            assert next(response.iter_raw())
            printed = gateway.end(signal.SIGINT)
    assert "Traceback" not in printed


def test_conversation_that_no_turn_continues_ends_without_another_request(tmp_path, swarm):
    def kept():
        return "swarm_gateway_conversations_idle 1.0" in httpx.get(gateway.url + "/metrics").text

    with running(tmp_path, swarm, "--model", str(DEMO_CHECKPOINT), "--keep-conversations", "2") as gateway:
        assert gateway.complete().status_code == 200
        eventually(kept, 10)
        eventually(lambda: not kept(), 30)


@pytest.mark.long
def test_two_gateways_run_beside_each_other(tmp_path, swarm):
    with running(tmp_path / "one", swarm) as one, running(tmp_path / "other", swarm) as other:
        assert one.url != other.url
        texts = [gateway.complete().json()["choices"][0]["text"] for gateway in (one, other)]
        assert texts[0] == texts[1]
        other.end(signal.SIGTERM)
        assert one.complete().status_code == 200


@pytest.mark.long
def test_gateway_with_keys_asks_for_them(tmp_path, swarm):
    keys = tmp_path / "keys.json"
    code, printed = warm.start(tmp_path, "swarm.gateway.cli", "keys", "add", "ada", "--keys", str(keys)).ended()
    assert code == 0, printed
    with running(tmp_path, swarm, "--model", str(DEMO_CHECKPOINT), "--keys", str(keys)) as gateway:
        assert gateway.complete().status_code == 401
        gateway.headers = {"Authorization": f"Bearer {printed.strip()}"}
        assert gateway.complete().status_code == 200
        assert '"tenant": "ada"' in gateway.end(signal.SIGTERM)


def test_gateway_without_a_model_lists_what_this_disk_has(tmp_path, swarm):
    """The swarm serves a model that is in no cache of the hub: nothing is listed, and nothing is loaded."""
    with running(tmp_path, swarm, "--allow-download", "org/other") as gateway:
        assert gateway.ready["models"] == []
        assert httpx.get(gateway.url + "/v1/models").json()["data"] == []
        assert httpx.get(gateway.url + "/readyz").status_code == 503
        assert httpx.get(gateway.url + "/healthz").status_code == 200
        assert gateway.complete().status_code == 404
        gateway.end(signal.SIGTERM)


@pytest.mark.long
def test_model_of_the_settings_file_is_taken(tmp_path):
    """One name stands there, and the option may be repeated: what is missing is only a node to join through."""
    (tmp_path / "swarm.toml").write_text("model = 'org/name'\n")
    env = {**os.environ, **environment(tmp_path)}
    command = [sys.executable, "-m", "swarm.gateway.cli"]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, "--initial-peers" in run.stderr) == (2, True), run.stderr
