"""Options that would do nothing, or that cannot be meant, are refused with the reason, before anything is loaded."""

import importlib

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from swarm.client.hf.text import TextOptions, continue_prompt
from swarm.errors import BadConfiguration
from swarm.gateway.cli import Origin
from tests.support.swarms import DEMO_CHECKPOINT

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWKz4bXG9MkoPZ6do7b3r4Zy8W2LF94gLzxtYCSxMQSmDw"
REFUSED = {
    "sampling without a temperature": ("swarm.client.cli", "org/name --prompt a --top-p 0.9", "--temperature above 0"),
    "a seed without a temperature": ("swarm.client.cli", "org/name --prompt a --seed 7", "--temperature above 0"),
    "a seed below 0": ("swarm.client.cli", "org/name --prompt a --temperature 1 --seed -1", "is not in the range"),
    "a seed of 33 bits": (
        "swarm.client.cli",
        "org/name --prompt a --temperature 1 --seed 5000000000",
        "is not in the range",
    ),
    "evidence without audits": ("swarm.monitor.cli", f"--initial-peers {PEER} --audit-evidence here", "name a model"),
    "an anchor's port without an anchor": (
        "swarm.dht.cli",
        "--listen 127.0.0.1:0 --no-anchor --anchor-listen 127.0.0.1:0",
        "pass one of them",
    ),
    "two bounds of one pool": ("swarm.server.cli", "org/name --cache-tokens 9 --cache-memory 1GB", "pass one of them"),
    "moves of chosen blocks": ("swarm.server.cli", "org/name --blocks 0:2 --rebalance-every 9", "leave --blocks out"),
    "downloads where nothing is followed": (
        "swarm.gateway.cli",
        f"--initial-peers {PEER} --model a/b --allow-download c/d",
        "name all models by --model",
    ),
    "an origin without a scheme": ("swarm.gateway.cli", "--allow-origin chat.example", "https://chat.example"),
    "an origin with a path": ("swarm.gateway.cli", "--allow-origin https://chat.example/page", "https://chat.example"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_do_nothing_are_refused(case, tmp_path, monkeypatch):
    module, line, why = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    result = CliRunner().invoke(importlib.import_module(module).command, line.split())
    assert result.exit_code == 2, result.output
    assert why in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("https://chat.example/", "https://chat.example"),
        ("HTTPS://Chat.Example:8443", "https://chat.example:8443"),
        ("*", "*"),
    ],
)
def test_an_origin_is_written_as_browsers_send_it(given, taken):
    assert Origin().convert(given, None, None) == taken


@pytest.mark.parametrize(("template", "why"), [(None, "has no chat template"), ("{{ 1 / 0 }}", "refuses the prompt")])
def test_a_chat_that_no_template_takes_is_refused(template, why):
    tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
    tokenizer.chat_template = template
    options = TextOptions(max_new_tokens=1, temperature=0.0, top_p=1.0, seed=None, chat=True)
    with pytest.raises(BadConfiguration, match=why):
        continue_prompt(None, tokenizer, "Hello", options)
