"""Bad input gets one clear line and exit code 2 (or 1 where the swarm is at fault), and nothing is left behind."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.client.hf.auto import AutoDistributedModel
from swarm.demo.local import LocalSwarm
from swarm.errors import BadBlocks, BadConfiguration, NoRoute, PromptTooLong, Unreachable, UsageError
from swarm.server.loader import in_thread
from tests.families import make
from tests.support import warm
from tests.support.often import rest_is_long
from tests.support.swarms import eventually

DEADLINE_S = 90
NOWHERE = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWFMDVnT56zXjeXTfXZUPKEiFD6YCeEViLNE5eAq21BB3e"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make("llama")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def swarm(model):
    """A bootstrap node and one server of half of the blocks."""
    with LocalSwarm(model, ["0:3"], network="local", launch=warm.launch) as swarm:
        yield swarm


def serve(folder, *arguments, **env):
    """Run swarm-serve in a fork of a warm process; return its exit code and its last line."""
    env = {"XDG_CACHE_HOME": str(folder / "cache"), **env}
    code, printed = warm.start(folder, "swarm.server.cli", *line_of(folder, arguments), env=env).ended(DEADLINE_S)
    return code, error_in(printed)


def serve_without_torch(folder, *arguments):
    """Run swarm-serve where importing torch, which takes seconds, ends in a traceback."""
    (folder / "first").mkdir(exist_ok=True)
    (folder / "first" / "torch.py").write_text("raise RuntimeError('torch was imported')")
    path = os.pathsep.join([str(folder / "first"), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        (sys.executable, "-m", "swarm.server.cli", *line_of(folder, arguments)),
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return run.returncode, error_in(run.stderr)


def line_of(folder, arguments):
    own = ("--listen", "127.0.0.1:0", "--p2p-listen", "127.0.0.1:0", "--identity", str(folder / "identity"))
    return (*own, "--network", "local", *map(str, arguments))


def error_in(printed):
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) <= 1, printed
    assert "Traceback" not in printed, printed
    return errors[0] if errors else printed


BLOCKS = [("4:2", "it is reversed"), ("3:3", "it is empty"), ("a:b", "not a range"), ("-1:2", "not a range")]
OPTIONS = [
    ("--num-blocks", "2", "pass one of them"),
    ("--network", "Not A Name", "small letters"),
    ("--public-name", "x" * 65, "at most 64"),
    ("--public-name", " x", "not printable"),
    ("--announce-address", "under_score:80", "cannot be announced"),
    ("--announce-address", "host:0", "port 0"),
    ("--root", "abc", "64 hex digits"),
    ("--ready-file", "/no/such/folder/ready", "no such directory"),
    ("--dtype", "int8", "not one of"),
]


@pytest.mark.parametrize(("blocks", "says"), rest_is_long(BLOCKS, BLOCKS[:1]))
def test_a_block_range_that_is_none_is_refused(tmp_path, model, blocks, says):
    code, line = serve(tmp_path, model, f"--blocks={blocks}")
    assert (code, blocks in line, says in line) == (2, True, True), line


def test_blocks_out_of_range_name_the_range(tmp_path, model):
    code, line = serve(tmp_path, model, "--blocks", "4:9")
    assert code == 2
    assert "the model has blocks 0:6" in line


@pytest.mark.parametrize(("option", "value", "says"), OPTIONS)
def test_an_option_that_no_server_could_keep_is_refused(tmp_path, model, option, value, says):
    code, line = serve(tmp_path, model, "--blocks", "0:2", option, value)
    assert (code, says in line) == (2, True), line


AT_ONCE = [(f"--blocks={blocks}",) for blocks, _ in BLOCKS] + [("--blocks", "0:2", *option[:2]) for option in OPTIONS]


@pytest.mark.parametrize("number", rest_is_long(range(len(AT_ONCE)), [0, 4]))
def test_wrong_arguments_are_refused_before_torch_is_imported(tmp_path, model, number):
    code, line = serve_without_torch(tmp_path, model, *AT_ONCE[number])
    assert code == 2, line


@pytest.mark.parametrize("device", ["toaster", "cuda:99"])
def test_a_device_that_is_not_there_is_named(tmp_path, model, device):
    code, line = serve(tmp_path, model, "--blocks", "0:2", "--device", device)
    assert (code, f"--device {device}" in line) == (2, True), line


@pytest.mark.parametrize(
    ("arguments", "given", "says"),
    [
        (("/no/such/model",), b"def f(x):", "no such model"),
        (("/no/such/model",), bytes(range(128, 256)), "UTF-8"),
        (("/no/such/model",), b"", "the prompt is empty"),
        (("/no/such/model", "--network", "Not A Name"), b"", "small letters"),
        ((), b"x", "SWARM_MODEL"),
    ],
)
def test_swarm_generate_says_what_is_wrong_in_one_line(tmp_path, arguments, given, says):
    line = (*arguments, "--initial-peers", NOWHERE)
    code, printed = warm.start(tmp_path, "swarm.client.cli", *line, given=given).ended(DEADLINE_S)
    errors = printed.splitlines()
    assert (code, len(errors), says in errors[-1]) == (2, 1, True), printed


@pytest.mark.parametrize("after_s", rest_is_long([0.1, 0.4, 0.7, 1.0], [0.4]))
def test_an_interrupt_while_libraries_are_imported_is_no_error(after_s):
    program = "from swarm.client.cli import main; print('begins', flush=True); main()"
    line = (sys.executable, "-c", program, "/no/such/model", "--prompt", "x", "--initial-peers", NOWHERE)
    run = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "begins\n"
    time.sleep(after_s)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in errors, errors
    assert run.returncode in {130, 2}, "2: it was done before"


def test_a_missing_model_says_what_a_model_is(tmp_path):
    code, line = serve(tmp_path, tmp_path / "nothing", "--blocks", "0:1")
    assert code == 2
    assert "no such model" in line
    code, line = serve_without_torch(tmp_path, "--blocks", "0:1")
    assert code == 2
    assert "SWARM_MODEL" in line


def test_a_model_of_pickles_is_refused(tmp_path, model):
    folder = tmp_path / "pickles"
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    code, line = serve(tmp_path, folder, "--blocks", "0:1")
    assert code == 2
    assert "safetensors" in line


def test_an_architecture_that_cannot_be_split_is_named(tmp_path):
    folder = tmp_path / "recurrent"
    AutoModelForCausalLM.from_config(make("recurrent_gemma")).save_pretrained(folder)
    code, line = serve(tmp_path, folder, "--blocks", "0:1")
    assert code == 2
    assert "recurrent_gemma" in line


def test_a_port_in_use_is_named(tmp_path, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = serve(tmp_path, model, "--blocks", "0:1", "--listen", f"127.0.0.1:{port}")
        assert (code, str(port) in line) == (2, True), line
        code, line = serve(tmp_path, model, "--blocks", "0:1", "--p2p-listen", f"127.0.0.1:{port}")
        assert (code, str(port) in line) == (2, True), line


def test_unreachable_initial_peers_are_reported_within_15_s(tmp_path, model):
    code, line = serve(tmp_path, model, "--blocks", "0:1", "--initial-peers", NOWHERE)
    assert code == 1
    assert NOWHERE in line
    began = time.monotonic()
    with pytest.raises(Unreachable):
        AutoDistributedModel.from_pretrained(model, initial_peers=[NOWHERE])
    assert time.monotonic() - began < 15


def test_a_load_that_outlives_a_server_that_could_not_start_ends_silently(monkeypatch):
    """The way in fails, or Ctrl-C ends the wait, while a checkpoint is read: its thread ends after the loop."""
    started, released = threading.Event(), threading.Event()
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)

    def load():
        started.set()
        released.wait(DEADLINE_S)

    async def give_up():
        waiting = asyncio.ensure_future(in_thread(load))
        await asyncio.to_thread(started.wait, DEADLINE_S)
        waiting.cancel()

    asyncio.run(give_up())
    [thread] = [thread for thread in threading.enumerate() if thread.name == "load"]
    released.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not failed


def test_a_malformed_peer_address_is_a_usage_error(model):
    with pytest.raises(UsageError, match="12D3KooW"):
        AutoDistributedModel.from_pretrained(model, initial_peers=["1.2.3.4:31337"])


def test_no_initial_peers_say_where_they_can_come_from(model, monkeypatch):
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
    with pytest.raises(BadConfiguration, match="SWARM_INITIAL_PEERS"):
        AutoDistributedModel.from_pretrained(model, lan=False)


@pytest.fixture(scope="module")
def namesake(tmp_path_factory, model):
    """Other files under the same name as the swarm's."""
    other = tmp_path_factory.mktemp("other") / model.name
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(make("llama")).save_pretrained(other)
    return other


@pytest.mark.long
def test_server_starts_whatever_is_announced_under_its_name(tmp_path, namesake, swarm):
    ready, peers = tmp_path / "ready", ",".join(swarm.initial_peers)
    line = line_of(tmp_path, (namesake, "--blocks", "0:1", "--initial-peers", peers, "--ready-file", ready))
    server = warm.start(tmp_path, "swarm.server.cli", *line, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    try:
        eventually(lambda: ready.exists() or server.process.poll() is not None, DEADLINE_S)
        assert ready.exists(), server.printed()
        eventually(lambda: swarm.servers[0].ready["root"] in server.printed(), DEADLINE_S)  # a warning: it answers
    finally:
        server.process.terminate()
        server.ended(DEADLINE_S)


def test_client_names_the_other_root_that_is_announced_under_its_name(namesake, swarm):
    with (
        AutoDistributedModel.from_pretrained(
            namesake, initial_peers=swarm.initial_peers, network=swarm.network
        ) as distributed,
        pytest.raises(NoRoute, match=swarm.servers[0].ready["root"]),
    ):
        distributed.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)


def test_blocks_that_nobody_serves_are_named(model, swarm):
    with (
        AutoDistributedModel.from_pretrained(
            model, initial_peers=swarm.initial_peers, network=swarm.network
        ) as distributed,
        pytest.raises(NoRoute, match="blocks 3:6") as caught,
    ):
        distributed.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    assert caught.value.missing == (3, 4, 5)


def test_another_dtype_than_anybody_serves_says_which_there_is(model, swarm):
    with (
        AutoDistributedModel.from_pretrained(
            model, initial_peers=swarm.initial_peers, network=swarm.network, dtype=torch.bfloat16
        ) as distributed,
        pytest.raises(NoRoute, match="bfloat16"),
    ):
        distributed.blocks[0:3](torch.zeros(1, 2, 64))


def test_a_prompt_longer_than_the_model_allows_is_refused(model, swarm):
    with AutoDistributedModel.from_pretrained(
        model, initial_peers=swarm.initial_peers, network=swarm.network
    ) as distributed:
        limit = distributed.config.max_position_embeddings
        with pytest.raises(PromptTooLong, match=str(limit)):
            distributed(torch.full((1, limit + 1), 5))
        with pytest.raises(BadBlocks):
            distributed.blocks[2:9]
        with pytest.raises(UsageError):
            distributed.blocks[0:3](torch.zeros(1, 2, 65))


def test_bad_settings_name_the_setting(tmp_path, model):
    code, line = serve(tmp_path, model, "--blocks", "0:1", SWARM_NETWORK="Not Allowed")
    assert (code, "network" in line) == (2, True), line
    code, line = serve(tmp_path, model, "--blocks", "0:1", "--cache-tokens", "none")
    assert (code, "cache-tokens" in line) == (2, True), line


def test_a_refused_start_leaves_no_ready_file_and_no_process(tmp_path, model):
    ready = tmp_path / "ready.json"
    ready.write_text(json.dumps({"stale": True}))
    code, _ = serve(tmp_path, model, "--blocks", "4:9", "--ready-file", ready)
    assert code == 2
    assert not ready.exists()
    children = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not re.search(re.escape(str(tmp_path)), children)
