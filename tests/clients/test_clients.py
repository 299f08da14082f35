"""Programs and libraries that speak to such servers, unchanged and in environments of their own (`make clients`)."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.clients.agent import Agent
from tests.gateway.scripted import NAME, scripted
from tests.support.gateways import gateway
from tests.support.swarms import DEMO_CHECKPOINT, DEMO_SPANS, REPOSITORY, world

pytestmark = pytest.mark.long
SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENTS = REPOSITORY / ".venv-clients"
NOWHERE = "http://127.0.0.1:9"  # a proxy that no one listens at: a client that asks the internet fails
TOKENS = 32  # that load generators ask for in each request

CHOICES = [
    {"question": "def add(a, b):\n    return a +", "choices": ["b", "c", "a * b"], "answer": 0},
    {"question": "for i in range(", "choices": ["10):", "n):\n    print(i)", "):"], "answer": 0},
    {"question": "import", "choices": ["os", "numpy as np", "is"], "answer": 0},
    {"question": "The quick brown fox jumps over the lazy", "choices": ["dog", "cats and dogs"], "answer": 0},
]


@pytest.fixture(scope="module")
def url():
    agent = Agent(AutoTokenizer.from_pretrained(DEMO_CHECKPOINT))
    with scripted(agent) as (url, _):
        yield url


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A gateway over three servers of the demo's checkpoint: the local model, the URL, the model's name."""
    home = tmp_path_factory.mktemp("demo")
    with world(DEMO_CHECKPOINT, home, DEMO_SPANS) as served, gateway(served.swarm, DEMO_CHECKPOINT, home) as ready:
        (name,) = ready["models"]
        yield served.full, ready["url"], name


def python(environment):
    program = ENVIRONMENTS / environment / "bin" / "python"
    if not program.exists():
        pytest.skip("the clients' environments are made by `make clients`")
    return program


def run(folder, environment, *arguments, timeout_s=240):
    """Run a client's Python, with no settings and no files of ours and no way to the internet."""
    env = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    env |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE)
    env |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HOME": str(folder), "LLM_USER_PATH": str(folder)}
    env["GUIDELLM__MAX_WORKER_PROCESSES"] = "1"  # of ten, each of which imports torch for every rate
    command = [str(python(environment)), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.parametrize(
    ("environment", "script", "options"),
    [
        ("openai3", "with_openai", ()),
        ("openai3", "with_anthropic", ()),
        ("openai3", "with_ollama", ("--tools",)),
        ("openai3", "with_litellm", ()),
        ("openai3", "with_langchain", ()),
        ("openai3", "with_langchain", ("--responses",)),
        ("openai2", "with_llama_index", ()),
        ("openai2", "with_instructor", ()),
        ("openai3", "with_pydantic_ai", ()),
        ("openai3", "with_pydantic_ai", ("--responses",)),
        ("openai3", "with_openai_agents", ()),
        ("openai3", "with_openai_agents", ("--chat",)),
        ("openai3", "with_llm", ("--tools",)),
        ("openai3", "with_inspect", ("--tools",)),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, tuple) else value,
)
def test_client_gets_what_it_asks_for(url, tmp_path, environment, script, options):
    done = run(tmp_path, environment, SCRIPTS / f"{script}.py", url, NAME, *options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize(
    ("form", "path", "options", "images"),
    [
        ("openai-chat", "/v1", (), "chat-image-input"),
        ("open-responses", "/v1", (), "image-input"),
        (
            *("anthropic", "/v1"),
            ("--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"),
            "anth-image-input",
        ),
    ],
)
def test_interface_complies_except_that_it_reads_no_images(url, tmp_path, form, path, options, images):
    asked = ("-u", url + path, "-k", "none", "-m", NAME, "--format", form, "--json", *options)
    done = run(tmp_path, "openai3", "-m", "llm_comply.cli", *asked)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    failed = {each["id"]: each["errors"] for each in report["results"] if each["status"] == "failed"}
    assert set(failed) == {images}, failed
    assert report["summary"]["passed"] >= 6


def test_loglikelihoods_are_those_of_the_local_model(demo, tmp_path):
    full, url, name = demo
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps(each) for each in CHOICES))
    done = run(tmp_path, "openai3", SCRIPTS / "with_lm_eval.py", url, name, DEMO_CHECKPOINT, questions)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
    assert len(rows) == len(CHOICES)
    for row, each in zip(rows, CHOICES, strict=True):
        expected = [scored(full, tokenizer, each["question"], f" {choice}") for choice in each["choices"]]
        assert row == pytest.approx(expected, abs=1e-4)


# Not `sweep`: guidellm 0.8.1 loses count there of requests that end at one moment, as those of one batch do.
@pytest.mark.parametrize(("profile", "requests"), [("concurrent,streams=4", 20), ("constant,rate=2", 8)])
def test_guidellm_counts_all_tokens_and_no_error(demo, tmp_path, profile, requests):
    _, url, name = demo
    report = tmp_path / "report.json"
    asked = (
        *("--backend", f"kind=openai_http,target={url},model={name}", "--profile", f"kind={profile}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO_CHECKPOINT}"),
        *("--constraint", f"kind=max_requests,count={requests}", "--output", f"kind=json,path={report}"),
    )
    done = run(tmp_path, "guidellm", "-m", "guidellm", "run", "--disable-console", *asked)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = {"successful": requests, "errored": 0, "incomplete": 0, "total": requests}
    assert benchmark["metrics"]["request_totals"] == totals
    assert [row["output_tokens"] for row in benchmark["requests"]["successful"]] == [TOKENS] * requests


@pytest.mark.parametrize("interface", ["chat", "completions"])
def test_aiperf_counts_all_tokens_and_no_error(demo, tmp_path, interface):
    _, url, name = demo
    asked = (
        *("--url", url, "--model", name, "--endpoint-type", interface, "--streaming", "--tokenizer", DEMO_CHECKPOINT),
        *("--isl", 64, "--isl-stddev", 0, "--osl", TOKENS, "--osl-stddev", 0, "--extra-inputs", "ignore_eos:true"),
        *("--concurrency", 4, "--request-count", 20, "--use-server-token-count"),
        *("--ui", "none", "--no-gpu-telemetry", "--artifact-dir", tmp_path / "report"),
    )
    done = run(tmp_path, "aiperf", "-m", "aiperf", "profile", *asked)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    report = json.loads((tmp_path / "report" / "profile_export_aiperf.json").read_text())
    assert (report["is_complete"], report["was_cancelled"], report["error_summary"]) == (True, False, [])
    assert report["request_error_rate"]["avg"] == 0
    assert report["request_count"]["avg"] == 20
    tokens = report["usage_completion_tokens"]
    assert (tokens["min"], tokens["max"], tokens["sum"]) == (TOKENS, TOKENS, 20 * TOKENS)


def scored(full, tokenizer, context, continuation):
    """The local model's logarithm of the probability of a continuation, without a token that begins the text."""
    whole = tokenizer.encode(context + continuation, add_special_tokens=False, return_tensors="pt")
    begins = len(tokenizer.encode(context, add_special_tokens=False))
    with torch.inference_mode():
        logprobs = full(whole).logits[0].log_softmax(dim=-1)
    return sum(float(logprobs[at - 1, whole[0, at]]) for at in range(begins, whole.shape[1]))
