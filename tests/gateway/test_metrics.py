"""What operators read: figures for Prometheus, aliveness, and whether models have routes."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarm.gateway.app import Gateway
from swarm.gateway.generation import Rerouted
from swarm.gateway.health import Readiness
from swarm.version import __version__
from tests.gateway.scripted import NAME, ScriptedModels, running, scripted_model

HELLO = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"


def figures(url):
    """All samples, by name and labels."""
    families = text_string_to_metric_families(httpx.get(url + "/metrics").text)
    return {
        (sample.name.removeprefix("swarm_gateway_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def served():
    script = ["All is", Rerouted(("left",), ("new 0:4",), 0.4), " well."]
    model = scripted_model(lambda _: script)
    with running(Gateway(ScriptedModels(model))) as url:
        yield url


def test_requests_are_counted_by_path_status_and_model(served):
    httpx.post(served + CHAT, json=HELLO)
    httpx.post(served + CHAT, json={**HELLO, "n": 0})
    httpx.post(served + CHAT, json={**HELLO, "model": "other"})
    httpx.get(served + "/v1/models/a/b")
    httpx.get(served + "/no/such/path")
    found = figures(served)
    counted = {key[1:]: value for key, value in found.items() if key[0] == "requests_total"}
    assert counted == {
        (NAME, CHAT, "200"): 1,
        ("", CHAT, "400"): 1,
        ("", CHAT, "404"): 1,
        ("", "/v1/models/{name:path}", "404"): 1,
        ("", "other", "404"): 1,
    }


def test_tokens_times_and_repairs_are_those_of_the_answer(served):
    usage = httpx.post(served + CHAT, json=HELLO).json()["usage"]
    found = figures(served)
    assert found["tokens_total", "prompt", NAME] == usage["prompt_tokens"]
    assert found["tokens_total", "cached", NAME] == 0
    assert found["tokens_total", "output", NAME] == usage["completion_tokens"]
    assert found["ttft_seconds_count", NAME] == 1
    assert found["inter_token_seconds_count", NAME] == usage["completion_tokens"] - 1
    assert found["repairs_total", NAME] == 1


def test_tokens_that_a_kept_session_had_are_counted_apart():
    model = scripted_model(lambda _: "ok")
    model.backend.cached = 3
    with running(Gateway(ScriptedModels(model))) as url:
        usage = httpx.post(url + CHAT, json=HELLO).json()["usage"]
        found = figures(url)
    assert found["tokens_total", "cached", NAME] == usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert found["tokens_total", "prompt", NAME] == usage["prompt_tokens"] - 3


def test_gauges_return_to_zero(served):
    httpx.post(served + CHAT, json=HELLO)
    found = figures(served)
    names = ("requests_running", "requests_waiting", "sequences_running", "sequences_waiting")
    assert [found[name,] for name in names] == [0, 0, 0, 0]


def test_two_gateways_share_no_figures():
    model = scripted_model(lambda _: "ok")
    with running(Gateway(ScriptedModels(model))) as one, running(Gateway(ScriptedModels(model))) as other:
        httpx.post(one + CHAT, json=HELLO)
        assert ("tokens_total", "output", NAME) in figures(one)
        assert ("tokens_total", "output", NAME) not in figures(other)


@pytest.mark.parametrize(("is_ready", "why"), [(True, ""), (False, "blocks 3:4: no server has them")])
def test_readiness_tells_each_models_reason(is_ready, why):
    async def readiness():
        return Readiness(is_ready, {NAME: why})

    with running(Gateway(ScriptedModels(scripted_model(lambda _: "ok")), readiness=readiness)) as url:
        response = httpx.get(url + "/readyz")
        assert httpx.get(url + "/healthz").status_code == 200
    assert response.status_code == (200 if is_ready else 503)
    assert response.json() == {
        "ready": is_ready,
        "models": {NAME: {"ready": not why, "reason": why}},
        "problems": [],
        "version": __version__,
    }
