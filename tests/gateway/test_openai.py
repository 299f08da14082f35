"""OpenAI's dialect over HTTP, with a scripted model."""

import json
import socket
import time
from urllib.parse import urlparse

import httpx
import pytest

from swarm.errors import HopFailed, NoRoute, StepTimeout
from swarm.gateway.api.completions import logprobs_body
from swarm.gateway.api.sse import StreamLimits
from swarm.gateway.app import GatewayLimits
from swarm.gateway.chat import Finished, Reasoning, Text, TokenText
from swarm.gateway.generation import Rerouted
from tests.gateway.replying import replying
from tests.gateway.scripted import CHATML, NAME, scripted
from tests.support.swarms import eventually

HELLO = [{"role": "user", "content": "Hello"}]


def post(url, path, body, **options):
    return httpx.post(url + path, json={"model": NAME, **body}, timeout=30, **options)


def events(response):
    """The data of a stream's events; the last is "[DONE]" or a dict."""
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    datas = [block.partition("data: ")[2] for block in blocks]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def test_answer_has_text_reason_and_usage(says_ok):
    body = post(says_ok[0], "/v1/chat/completions", {"messages": HELLO}).json()
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "All is well.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_stream_ends_with_reason_usage_and_done(says_ok):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(post(says_ok[0], "/v1/chat/completions", {"messages": HELLO, **options}))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "All is well."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-1:]] == ["stop"]


def test_tokens_max_is_told_as_length(says_ok):
    body = post(says_ok[0], "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


def test_tokens_max_is_clamped_to_the_context(says_ok):
    url, backend = says_ok
    post(url, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 10**9})
    asked = backend.asked[-1]
    assert asked.tokens_max == backend.positions_max - len(asked.prompt) + 1


def test_stop_string_does_not_appear(says_ok):
    body = post(says_ok[0], "/v1/chat/completions", {"messages": HELLO, "stop": ["wel", "zzz"]}).json()
    assert body["choices"][0]["message"]["content"] == "All is "
    assert body["choices"][0]["finish_reason"] == "stop"


def test_logprobs_have_bytes_and_the_likeliest(says_ok):
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    body = post(says_ok[0], "/v1/chat/completions", asked).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content) == b"All is well."
    assert {len(token["top_logprobs"]) for token in content} == {2}


THOUGHT_AND_CALL = {  # what a template shows, an output, and its content
    "hermes": (
        "<tool_call><think>",
        '<think>\nHm.\n</think>\n\nSo it is:\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n',
        "So it is:",
    ),
    "kimi-k2": (
        "<|tool_call_begin|>",
        "<think>Hm.</think>So it is:\n<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "So it is:\n",
    ),
    "a quoted mark": ("<tool_call><think>", "<think>Hm.</think>\n\nPut <think> <tool_call> here", None),
    "a mark that is cut": ("<tool_call><think>", "<think>Hm.</think>So it is:\n<tool_call>", "So it is:"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", THOUGHT_AND_CALL)
def test_logprobs_are_those_of_the_content(family, stream):
    shown, output, content = THOUGHT_AND_CALL[family]
    content = content or output.partition("\n\n")[2]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    asked = {"messages": HELLO, "logprobs": True, "tools": tools, "stream": stream}
    with scripted(lambda _: output, template=CHATML + shown) as (url, _):
        response = post(url, "/v1/chat/completions", asked)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
        texts = [choice["delta"]["content"] for choice in choices[1:] if "content" in choice["delta"]]
        assert all(texts)
        tokens = [token for choice in choices for token in (choice["logprobs"] or {"content": []})["content"]]
    else:
        (choice,) = response.json()["choices"]
        texts, tokens = [choice["message"]["content"]], choice["logprobs"]["content"]
    assert "".join(texts) == content
    assert "".join(token["token"] for token in tokens) == content


def test_n_choices_come_with_a_seed_each(says_ok):
    url, backend = says_ok
    body = post(url, "/v1/chat/completions", {"messages": HELLO, "n": 3, "seed": 7}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [asked.sampling.seed for asked in backend.asked[-3:]] == [7, 8, 9]


def test_completions_take_texts_and_ids_and_echo_them(says_ok):
    url, _ = says_ok
    body = post(url, "/v1/completions", {"prompt": ["Say: ", "Tell: "], "max_tokens": 50, "echo": True}).json()
    assert [choice["text"] for choice in body["choices"]] == ["Say: All is well.", "Tell: All is well."]
    assert post(url, "/v1/completions", {"prompt": [5, 6, 7]}).status_code == 200
    assert post(url, "/v1/completions", {"prompt": [[5, 6], [7]]}).json()["choices"][1]["index"] == 1


def test_echo_with_logprobs_and_no_tokens_scores_the_prompt(says_ok):
    asked = {"prompt": "Say this", "max_tokens": 0, "echo": True, "logprobs": 1}
    (choice,) = post(says_ok[0], "/v1/completions", asked).json()["choices"]
    assert choice["text"] == "Say this"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(isinstance(each, float) for each in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == "<|bos|>Say this"
    assert len(logprobs["text_offset"]) == len(logprobs["tokens"])


@pytest.mark.parametrize("top", [(), (("b", b"b", -0.5),), (("b", b"b", -0.5), ("a", b"a", -2.0))])
def test_top_logprobs_of_completions_have_the_sampled_token(top):
    body = logprobs_body([TokenText("a", b"a", -2.0, top)])
    assert body["top_logprobs"] == [{**{text: logprob for text, _, logprob in top}, "a": -2.0}]
    assert logprobs_body([TokenText("a", b"a", float("nan"))])["top_logprobs"] == [None]


def test_models_are_listed_and_found(says_ok):
    url, _ = says_ok
    (model,) = httpx.get(url + "/v1/models").json()["data"]
    assert (model["id"], model["swarm"]) == (NAME, {"status": "healthy"})
    assert httpx.get(f"{url}/v1/models/{NAME}").json()["object"] == "model"
    assert httpx.get(f"{url}/v1/models/other").status_code == 404


def test_answer_goes_on_where_the_last_message_ends(says_ok):
    url, backend = says_ok
    said = [*HELLO, {"role": "assistant", "content": "All is "}]
    assert post(url, "/v1/chat/completions", {"messages": said, "continue_final_message": True}).status_code == 200
    assert backend.tokenizer.decode(backend.asked[-1].prompt).endswith("<|im_start|>assistant\nAll is ")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": HELLO, "n": 0}, 400, "n"),
        ({"messages": HELLO, "temperature": 3}, 400, "temperature"),
        ({"messages": [{"role": "wizard", "content": ""}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ({"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": HELLO, "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"messages": HELLO, "logit_bias": {"999999": 1}}, 400, "logit_bias"),
        ({"messages": HELLO, "seed": 2**63}, 400, "seed"),
        ({"messages": HELLO, "functions": [{"name": "f"}]}, 400, "functions"),
        ({"messages": HELLO, "modalities": ["text", "audio"]}, 400, "modalities"),
        ({"messages": HELLO, "web_search_options": {}}, 400, "web_search_options"),
        ({"messages": HELLO, "continue_final_message": True}, 400, "continue_final_message"),
        ({"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs"),
        ({"messages": HELLO, "model": "other"}, 404, None),
    ],
)
def test_bad_request_names_its_field(says_ok, body, status, param):
    response = post(says_ok[0], "/v1/chat/completions", body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", [[5, -1], [5, 999_999], [[5], [1763338]], [2**80]])
def test_ids_that_the_model_has_not_are_refused(says_ok, prompt, echo):
    response = post(says_ok[0], "/v1/completions", {"prompt": prompt, "echo": echo})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")


def test_prompt_beyond_the_context_is_told_in_the_words_of_agents(says_ok):
    messages = [{"role": "user", "content": "word " * 9000}]
    response = post(says_ok[0], "/v1/chat/completions", {"messages": messages})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 8192 tokens" in error["message"]


def test_body_that_is_too_long_or_no_json_is_refused(says_ok):
    url, _ = says_ok
    assert httpx.post(url + "/v1/chat/completions", content=b"x" * (9 << 20), timeout=30).status_code == 413
    response = httpx.post(url + "/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NoRoute("m", (3,)), 503),
        (StepTimeout("peer", "0:4", 5.0), 504),
        (HopFailed("peer", "0:4", "gone"), 502),
        (RuntimeError("a secret path"), 500),
    ],
)
def test_error_before_the_first_byte_has_its_status(error, status):
    def script(_):
        raise error

    with scripted(script) as (url, _):
        for stream in (False, True):
            response = post(url, "/v1/chat/completions", {"messages": HELLO, "stream": stream})
            assert response.status_code == status
            assert ("retry-after" in response.headers) == (status in {503, 504})
            assert "secret" not in response.text
            assert response.json()["error"]["type"] == "server_error"


def test_error_after_the_first_byte_is_an_event_and_no_clean_end():
    with scripted(lambda _: ["All is", StepTimeout("peer", "0:4", 5.0)]) as (url, _):
        *_, last = events(post(url, "/v1/chat/completions", {"messages": HELLO, "stream": True}))
    assert last["error"]["type"] == "server_error"


def test_change_of_the_route_is_told_to_those_who_ask():
    changed = Rerouted(("left",), ("new 0:4",), 0.4)
    with scripted(lambda _: ["All ", changed, "is well."]) as (url, _):
        asked = {"messages": HELLO, "stream": True}
        told = events(post(url, "/v1/chat/completions", asked, headers={"X-Swarm-Route": "show"}))
        routes = [chunk["swarm_route"] for chunk in told[:-1] if "swarm_route" in chunk]
        assert routes == [{"choice": 0, "left": ["left"], "hops": ["new 0:4"], "took_s": 0.4}]
        assert not [chunk for chunk in events(post(url, "/v1/chat/completions", asked))[:-1] if "swarm_route" in chunk]


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_ends_its_generation(stream):
    with scripted(lambda _: "word " * 2000, token_s=0.01) as (url, backend):
        body = json.dumps({"model": NAME, "messages": HELLO, "stream": stream}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((urlparse(url).hostname, urlparse(url).port)) as connection:
            connection.sendall(head.encode() + body)
            eventually(lambda: backend.running == 1, 5)
            time.sleep(0.1)
        eventually(lambda: backend.running == 0, 1)


def test_stream_that_pauses_between_tokens_is_kept_alive():
    limits = GatewayLimits(streams=StreamLimits(keep_alive_s=0.02))
    with scripted(lambda _: "All is well.", token_s=0.1, limits=limits) as (url, _):
        text = post(url, "/v1/chat/completions", {"messages": HELLO, "stream": True}).text
    first, last = text.index('"content":"'), text.rindex('"content":"')
    assert text[first:last].count(": the route is being repaired") >= 2
    assert text.endswith("data: [DONE]\n\n")


def test_client_that_leaves_during_a_long_prompt_ends_its_generation():
    """Its headers are sent: the first event has not come yet, and is waited for."""
    limits = GatewayLimits(streams=StreamLimits(keep_alive_s=0.02))
    with scripted(lambda _: "word", prompt_s=60, limits=limits) as (url, backend):
        with httpx.stream(
            "POST", url + "/v1/chat/completions", json={"model": NAME, "messages": HELLO, "stream": True}
        ):
            assert backend.running == 1
        eventually(lambda: backend.running == 0, 1)


def test_fields_that_are_null_are_as_if_absent(says_ok):
    names = ("stream", "stream_options", "n", "seed", "stop", "tools", "tool_choice", "response_format", "ignore_eos")
    body = {"messages": HELLO, **dict.fromkeys(names)}
    assert post(says_ok[0], "/v1/chat/completions", body).json()["object"] == "chat.completion"
    body = {"prompt": "x", **dict.fromkeys(("stream", "echo", "seed", "n", "best_of", "suffix", "logprobs"))}
    assert post(says_ok[0], "/v1/completions", body).json()["object"] == "text_completion"


def test_reasoning_is_counted_and_apart_from_the_content():
    with replying(lambda _: (Reasoning(0, "Hm. "), Text(0, "Yes."), Finished(0, "stop", 9, None, 3))) as (url, _):
        body = post(url, "/v1/chat/completions", {"messages": HELLO}).json()
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm. ")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_answers_of_the_same_weights_have_the_same_fingerprint(says_ok):
    bodies = [post(says_ok[0], "/v1/chat/completions", {"messages": HELLO}).json() for _ in range(2)]
    assert {body["system_fingerprint"] for body in bodies} == {"fp_0000000000"}
    told = events(post(says_ok[0], "/v1/chat/completions", {"messages": HELLO, "stream": True}))
    assert {chunk["system_fingerprint"] for chunk in told[:-1]} == {"fp_0000000000"}
