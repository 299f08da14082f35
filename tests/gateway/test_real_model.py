"""A small model with real weights, in spans on three servers, answers through `swarm-gateway`."""

import httpx
import pytest

from tests.support.gateways import gateway
from tests.support.swarms import world

pytestmark = pytest.mark.long


def test_answers_know_the_capital_of_france(real_model, tmp_path):
    with (
        world(real_model, tmp_path, ("0:10", "10:20", "20:30")) as served,
        gateway(served.swarm, real_model, tmp_path) as ready,
    ):
        (name,) = ready["models"]
        asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20}
        body = {"model": name, "temperature": 0, **asked}
        answer = httpx.post(ready["url"] + "/v1/chat/completions", json=body, timeout=120).json()
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
        assert answer["choices"][0]["finish_reason"] == "stop"
        raw = {"prompt": "The capital of France is", "raw": True, "options": {"temperature": 0, "num_predict": 2}}
        answer = httpx.post(ready["url"] + "/api/generate", json={"model": name, "stream": False, **raw}, timeout=120)
        assert answer.json()["response"].startswith(" Paris")
