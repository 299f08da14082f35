"""Ollama's dialect over HTTP, with a scripted model, and through Ollama's own client."""

import json
import socket
import time
from urllib.parse import urlparse

import httpx
import pytest

from swarm.errors import HopFailed, NoRoute, StepTimeout
from swarm.gateway.api.ollama_requests import ChatRequest, GenerateRequest, messages_of
from swarm.gateway.api.sse import StreamLimits
from swarm.gateway.app import GatewayLimits
from swarm.gateway.generation import Rerouted
from tests.gateway.scripted import NAME, scripted
from tests.support.swarms import eventually

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def post(url, path, body, **options):
    return httpx.post(url + path, json={"model": NAME, **body}, timeout=30, **options)


def lines(response):
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_chat_streams_lines_and_ends_with_counts(says_ok):
    *pieces, last = lines(post(says_ok[0], "/api/chat", {"messages": HELLO}))
    assert {piece["done"] for piece in pieces} == {False}
    assert {piece["message"]["role"] for piece in pieces} == {"assistant"}
    assert "".join(piece["message"]["content"] for piece in pieces) == "All is well."
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["eval_count"] > 0
    assert last["prompt_eval_count"] > 0
    durations = [last[f"{part}_duration"] for part in ("load", "prompt_eval", "eval")]
    assert all(isinstance(duration, int) for duration in durations)
    assert 0 < sum(durations) <= last["total_duration"] < 30e9


def test_chat_answers_whole(says_ok):
    body = post(says_ok[0], "/api/chat", {"messages": HELLO, "stream": False}).json()
    assert body["message"] == {"role": "assistant", "content": "All is well."}
    assert (body["model"], body["done"], body["done_reason"]) == (NAME, True, "stop")


def test_generate_streams_and_answers_whole(says_ok):
    url, backend = says_ok
    *pieces, last = lines(post(url, "/api/generate", {"prompt": "Hello", "system": "Be brief."}))
    assert "".join(piece["response"] for piece in pieces) == "All is well."
    assert last["done"]
    asked = backend.tokenizer.decode(backend.asked[-1].prompt)
    assert asked.index("system\nBe brief.") < asked.index("user\nHello")
    body = post(url, "/api/generate", {"prompt": "Hello", "stream": False}).json()
    assert (body["response"], body["done"]) == ("All is well.", True)


def test_raw_prompt_gets_no_template(says_ok):
    url, backend = says_ok
    post(url, "/api/generate", {"prompt": "Once upon", "raw": True})
    assert backend.tokenizer.decode(backend.asked[-1].prompt) == "<|bos|>Once upon"


def test_options_decide_how_tokens_are_sampled(says_ok):
    url, backend = says_ok
    options = {
        **{"num_predict": 7, "temperature": 0.3, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 42, "num_ctx": 99},
        **{"repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6, "unknown": "x"},
    }
    post(url, "/api/chat", {"messages": HELLO, "options": options})
    asked = backend.asked[-1]
    sampling = asked.sampling
    assert asked.tokens_max == 7
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.3, 5, 0.5, 0.1)
    assert (sampling.seed, sampling.repetition_penalty) == (42, 1.3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.4, 0.6)


def test_defaults_are_those_of_ollama(says_ok):
    url, backend = says_ok
    post(url, "/api/chat", {"messages": HELLO, "options": {"num_predict": -1, "seed": -1}})
    asked = backend.asked[-1]
    assert asked.tokens_max == backend.positions_max - len(asked.prompt) + 1
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 40, 0.9)
    assert (sampling.seed, sampling.repetition_penalty) == (None, 1.0)


def test_stop_string_does_not_appear(says_ok):
    options = {"stop": ["wel", "zzz"]}
    body = post(says_ok[0], "/api/chat", {"messages": HELLO, "stream": False, "options": options}).json()
    assert (body["message"]["content"], body["done_reason"]) == ("All is ", "stop")


def test_num_predict_ends_with_length(says_ok):
    *_, last = lines(post(says_ok[0], "/api/generate", {"prompt": "Hello", "options": {"num_predict": 1}}))
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 1)


def test_logprobs_have_bytes_and_the_likeliest(says_ok):
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "stream": False}
    logprobs = post(says_ok[0], "/api/chat", asked).json()["logprobs"]
    assert b"".join(bytes(token["bytes"]) for token in logprobs) == b"All is well."
    assert {len(token["top_logprobs"]) for token in logprobs} == {2}


def test_request_without_a_prompt_only_loads(says_ok):
    url, backend = says_ok
    asked = len(backend.asked)
    assert post(url, "/api/chat", {"messages": []}).json()["done_reason"] == "load"
    assert post(url, "/api/generate", {}).json()["done_reason"] == "load"
    assert post(url, "/api/generate", {"keep_alive": 0}).json()["done_reason"] == "unload"
    assert len(backend.asked) == asked


def test_names_may_have_the_tag_latest(says_ok):
    url, _ = says_ok
    (model,) = httpx.get(url + "/api/tags").json()["models"]
    assert model["name"] == model["model"] == f"{NAME}:latest"
    for name in (NAME, f"{NAME}:latest"):
        assert post(url, "/api/chat", {"model": name, "messages": HELLO, "stream": False}).json()["model"] == name
    for name in (f"{NAME}:7b", "other", ""):
        response = post(url, "/api/chat", {"model": name, "messages": HELLO})
        assert (response.status_code, set(response.json())) == (404, {"error"})


def test_models_are_shown_with_context_and_capabilities(says_ok):
    url, backend = says_ok
    shown = post(url, "/api/show", {}).json()
    assert shown["model_info"]["llama.context_length"] == backend.positions_max
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["template"] == backend.tokenizer.chat_template
    (running,) = httpx.get(url + "/api/ps").json()["models"]
    assert (running["model"], len(running["digest"])) == (f"{NAME}:latest", 64)
    assert httpx.get(url + "/api/version").json()["version"].count(".") == 2
    assert httpx.head(url + "/").status_code == 200


def test_body_is_json_whatever_its_header_says(says_ok):
    content = json.dumps({"model": NAME, "messages": HELLO, "stream": False})
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    body = httpx.post(says_ok[0] + "/api/chat", content=content, headers=headers).json()
    assert body["message"]["content"] == "All is well."


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("chat", {"messages": [{"role": "user", "content": "", "images": ["aGk="]}]}, "images"),
        ("chat", {"messages": [{"role": "wizard"}]}, "role"),
        ("chat", {"messages": [{"role": "user", "content": ["parts"]}]}, "content"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "tool call"),
        ("chat", {"messages": HELLO, "format": "yaml"}, "format"),
        ("chat", {"messages": HELLO, "options": {"mirostat": 1}}, "options.mirostat"),
        ("chat", {"messages": HELLO, "options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "repeat_last_n"),
        ("chat", {"messages": HELLO, "options": {"temperature": "hot"}}, "options.temperature"),
        ("chat", {"messages": "Hello"}, "messages"),
        ("generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "x", "context": [1, 2]}, "context"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
        ("generate", {"prompt": "x", "raw": True, "format": "json"}, "format"),
    ],
)
def test_bad_request_names_its_field(says_ok, path, body, named):
    response = post(says_ok[0], f"/api/{path}", body)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert named in response.json()["error"]


def test_paths_that_are_not_there_answer_in_ollamas_form(says_ok):
    response = post(says_ok[0], "/api/embed", {"input": "text"})
    assert (response.status_code, set(response.json())) == (404, {"error"})


def test_results_of_tools_find_their_calls():
    def call(name, **more):
        return {"function": {"name": name, "arguments": {"city": "Rome"}}, **more}

    user, called, second, first = messages_of(
        [
            {"role": "user", "content": "Hi", "thinking": ""},
            {"role": "assistant", "thinking": "Hm.", "tool_calls": [call("weather"), call("time", id="abc")]},
            {"role": "tool", "tool_name": "time", "content": "noon"},
            {"role": "tool", "content": "sun"},
        ]
    )
    assert user == {"role": "user", "content": "Hi"}
    assert called["reasoning_content"] == "Hm."
    weather, told = called["tool_calls"]
    assert weather["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert (second["tool_call_id"], second["name"]) == ("abc", "time")
    assert (first["tool_call_id"], first["name"]) == (weather["id"], "weather")
    assert told["id"] == "abc"


@pytest.mark.parametrize(
    ("think", "expected"),
    [(None, {}), (False, {"enable_thinking": False}), ("high", {"enable_thinking": True, "reasoning_effort": "high"})],
)
def test_think_goes_to_the_template(think, expected):
    request = ChatRequest.model_validate({"model": NAME, "messages": HELLO, "think": think})
    assert request.asked("", None, NAME).template == expected


@pytest.mark.parametrize(
    ("form", "schema"), [(None, None), ("", None), ("json", {"type": "object"}), ({"type": "array"}, {"type": "array"})]
)
def test_format_is_a_schema_of_the_answer(form, schema):
    request = GenerateRequest.model_validate({"model": NAME, "prompt": "x", "format": form})
    assert request.asked("", None, NAME).schema == schema


@pytest.mark.parametrize(
    ("error", "status"),
    [(NoRoute("m", (3,)), 503), (HopFailed("peer", "0:4", "gone"), 502), (RuntimeError("a secret path"), 500)],
)
def test_error_before_the_first_line_has_its_status(error, status):
    def script(_):
        raise error

    with scripted(script) as (url, _):
        for stream in (False, True):
            response = post(url, "/api/chat", {"messages": HELLO, "stream": stream})
            assert (response.status_code, set(response.json())) == (status, {"error"})
            assert "secret" not in response.text


def test_error_after_the_first_line_is_a_line_and_no_clean_end():
    with scripted(lambda _: ["All is", StepTimeout("peer", "0:4", 5.0)]) as (url, _):
        *pieces, last = lines(post(url, "/api/chat", {"messages": HELLO}))
        assert set(last) == {"error"}
        assert not any(piece["done"] for piece in pieces)
        assert post(url, "/api/chat", {"messages": HELLO, "stream": False}).status_code == 504


def test_long_pause_is_filled_with_lines_without_text():
    limits = GatewayLimits(streams=StreamLimits(keep_alive_s=0.02))
    with scripted(lambda _: ["All ", "is well."], token_s=0.1, limits=limits) as (url, _):
        pieces = lines(post(url, "/api/chat", {"messages": HELLO}))
    assert "".join(piece["message"]["content"] for piece in pieces) == "All is well."
    assert sum(not piece["message"]["content"] for piece in pieces[:-1]) > 3


def test_change_of_the_route_is_not_told():
    changed = Rerouted(("left",), ("new 0:4",), 0.4)
    with scripted(lambda _: ["All ", changed, "is well."]) as (url, _):
        pieces = lines(post(url, "/api/chat", {"messages": HELLO}))
    assert "".join(piece["message"]["content"] for piece in pieces) == "All is well."


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_ends_its_generation(stream):
    with scripted(lambda _: "word " * 2000, token_s=0.01) as (url, backend):
        body = json.dumps({"model": NAME, "messages": HELLO, "stream": stream}).encode()
        head = f"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((urlparse(url).hostname, urlparse(url).port)) as connection:
            connection.sendall(head.encode() + body)
            eventually(lambda: backend.running == 1, 5)
            time.sleep(0.1)
        eventually(lambda: backend.running == 0, 1)
