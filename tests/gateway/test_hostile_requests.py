"""Requests of people who mean harm, or whose program is broken: they get an error that says why, and cost little."""

import asyncio
import json
import socket
import time
from contextlib import ExitStack, aclosing, suppress
from urllib.parse import urlparse

import httpx
import pytest
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from swarm.gateway.account import Account, Meter
from swarm.gateway.admission import AdmissionLimits, GenerationLimits, Slots
from swarm.gateway.api.chat import ChatRequest
from swarm.gateway.api.completions import CompletionRequest
from swarm.gateway.api.messages import MessagesRequest
from swarm.gateway.api.ollama_requests import ChatRequest as OllamaRequest
from swarm.gateway.api.ollama_requests import messages_of
from swarm.gateway.api.requests import REQUEST
from swarm.gateway.api.responses import ResponseRequest
from swarm.gateway.api.responses_events import _text_in
from swarm.gateway.api.sse import StreamLimits, streamed
from swarm.gateway.api.turns import Turns
from swarm.gateway.app import Gateway
from swarm.gateway.generation import Generation
from swarm.gateway.recorder import Recorder
from swarm.web import Http
from tests.gateway.scripted import CHATML, NAME, ScriptedModels, running, scripted, scripted_model

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TWO_CALLS = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2


@pytest.fixture(scope="module")
def url():
    with running(Gateway(ScriptedModels(scripted_model(lambda _: "All is well.")))) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((path, {"messages": [{"role": [], "content": "x"}], "max_tokens": 9}) for path in (CHAT, MESSAGES, OLLAMA)),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": []}]}]}),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}),
        (CHAT, {"messages": [USER], "logit_bias": {"1" * 5000: 1}}),
        (CHAT, {"messages": [USER], "logit_bias": dict.fromkeys(map(str, range(REQUEST.biases_max + 1)), 1)}),
        (CHAT, {"messages": [1] * 100_000}),
        (CHAT, {"messages": [USER] * (REQUEST.items_max + 1)}),
        (RESPONSES, {"input": [{"type": "reasoning", "content": "text"}]}),
        (RESPONSES, {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": ["x"]}]}),
        (RESPONSES, {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": 5}]}),
        (RESPONSES, {"input": "x", "tool_choice": {"type": "allowed_tools", "tools": ["x"]}}),
        (RESPONSES, {"input": "x", "tool_choice": {"type": []}}),
        (RESPONSES, {"input": "x", "tool_choice": {"type": "allowed_tools", "tools": [{"type": {}}]}}),
        ("/v1/completions", {"prompt": ["x"] * 100, "n": 8}),
    ],
    ids=str,
)
def test_a_broken_request_is_told_so(url, path, body):
    answer = httpx.post(url + path, json={"model": NAME, **body}, timeout=30)
    assert answer.status_code == 400, answer.text
    assert len(answer.text) < 500


def told(path, arguments):
    """The conversation of a request in which the model has called a tool with these arguments."""
    if path == RESPONSES:
        return {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}]}
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [called]}]}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_arguments_that_nest_too_deep_are_refused(url, path):
    answer = httpx.post(url + path, json={"model": NAME, **told(path, "[" * 3000)}, timeout=30)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_half_of_a_character_in_arguments_is_replaced(path):
    with scripted(lambda _: "All is well.") as (url, backend):
        body = {"model": NAME, **told(path, '{"a": "x\\ud83d y\\ud83d\\ude00"}')}
        assert httpx.post(url + path, json=body, timeout=30).status_code == 200
        prompt = backend.tokenizer.decode(backend.asked[0].prompt)
    assert "x\ufffd y\U0001f600" in prompt


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999"])
@pytest.mark.parametrize(
    "field",
    [
        '"tools": [{"type": "custom", "name": "g", "format": {"x": NUMBER}}]',
        '"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h", "x": NUMBER}]}]',
        '"tool_choice": {"type": "allowed_tools", "x": NUMBER}',
        '"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object", "default": NUMBER}}}',
    ],
)
def test_numbers_that_json_has_not_are_refused(url, field, number):
    body = f'{{"model": "{NAME}", "input": "x", {field.replace("NUMBER", number)}}}'
    answer = httpx.post(url + RESPONSES, content=body, headers={"Content-Type": "application/json"}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_type_that_is_none_is_ignored_where_values_are_read():
    model = scripted_model(
        lambda _: "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", template=CHATML + "<arg_key>"
    )
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": 5}}}}
    with running(Gateway(ScriptedModels(model))) as url:
        body = {"model": NAME, "messages": [USER], "tools": [{"type": "function", "function": function}]}
        (choice,) = httpx.post(url + CHAT, json=body, timeout=30).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("request_", "body"),
    [
        (ChatRequest, {"messages": [1] * 999}),
        (ChatRequest, {"messages": [USER], "tools": [1] * 250}),
        (ChatRequest, {"messages": [USER], "stop": [1] * 999}),
        (ChatRequest, {"messages": [USER], "modalities": [1] * 999}),
        (ChatRequest, {"messages": [USER], "logit_bias": dict.fromkeys(map(str, range(9999)), "x")}),
        (MessagesRequest, {"messages": [1] * 999, "max_tokens": 9}),
        (MessagesRequest, {"messages": [USER], "max_tokens": 9, "system": [1] * 999}),
        (MessagesRequest, {"messages": [USER], "max_tokens": 9, "stop_sequences": [1] * 999}),
        (ResponseRequest, {"input": [1] * 999}),
        (ResponseRequest, {"input": "x", "include": [1] * 999}),
        (ResponseRequest, {"input": "x", "metadata": dict.fromkeys(map(str, range(9999)), 1)}),
        (CompletionRequest, {"prompt": [None] * 9999}),
        (CompletionRequest, {"prompt": [[None] * 9999]}),
        (OllamaRequest, {"messages": [1] * 999}),
    ],
)
def test_a_list_is_read_to_its_first_error(request_, body):
    with pytest.raises(ValidationError) as refused:
        request_.model_validate({"model": NAME, **body})
    assert refused.value.error_count() <= 5  # one for each form that it may have


def test_pages_whose_origin_is_no_address_may_not_call(url):
    answer = httpx.post(url + CHAT, json={"model": NAME, "messages": [USER]}, headers={"Origin": "http://[x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")


# Calls


def test_results_answer_calls_by_id_by_name_and_else_in_their_order():
    calls = [("a", "f"), ("b", "g"), ("c", "f"), ("d", "h")]
    called = [{"id": each, "function": {"name": name, "arguments": {}}} for each, name in calls]
    results = [{"tool_call_id": "c"}, {"tool_name": "g"}, {}, {"tool_name": "f"}, {"tool_name": "z"}]
    said = [{"role": "assistant", "tool_calls": called}, *({"role": "tool", "content": "", **each} for each in results)]
    answered = [(message.get("tool_call_id"), message.get("name")) for message in messages_of(said)[1:]]
    assert answered == [("c", "f"), ("b", "g"), ("a", "f"), ("d", "f"), (None, "z")]


def test_texts_of_one_turn_are_joined():
    turns = Turns()
    for each in ("a", "", "b"):
        turns.user(each)
    turns.thought("hm")
    turns.assistant("")
    assert not turns.ends_in_text
    turns.assistant("So")
    assert turns.ends_in_text
    turns.call("1", "f", {})
    turns.result("1", "9")
    assert turns.messages == [
        {"role": "user", "content": "a\n\nb"},
        {
            "role": "assistant",
            "content": "So",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "content": "9", "tool_call_id": "1", "name": "f"},
    ]


def test_a_call_whose_text_has_another_name_stays_whole():
    assert _text_in('{"input": "a"}') == "a"
    assert _text_in('{"patch": "a"}') == '{"patch": "a"}'


@pytest.mark.parametrize(("parallel", "count"), [(None, 2), (True, 2), (False, 1)])
def test_an_answer_ends_behind_the_only_call(parallel, count):
    model = scripted_model(lambda _: TWO_CALLS)
    with running(Gateway(ScriptedModels(model))) as url:
        body = {"model": NAME, "messages": [USER], "tools": [TOOL], "parallel_tool_calls": parallel}
        (choice,) = httpx.post(url + CHAT, json=body, timeout=30).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == count
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_of_a_character_in_a_call_costs_that_character_alone(stream):
    model = scripted_model(lambda _: '<tool_call>{"name": "f", "arguments": {"a": "x \\ud83d y"}}</tool_call>')
    with running(Gateway(ScriptedModels(model))) as url:
        body = {"model": NAME, "messages": [USER], "tools": [TOOL], "stream": stream}
        answer = httpx.post(url + CHAT, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    assert "x \ufffd y" in answer.text
    assert '"tool_calls"' in answer.text
    assert not stream or answer.text.endswith("data: [DONE]\n\n")


# Accounts


def meter():
    slots = Slots(AdmissionLimits(), time.monotonic)
    return Meter(Recorder(), slots, GenerationLimits())


def test_requests_share_their_models_grammars():
    model = scripted_model(lambda _: "x")
    assert meter().metered(model, Account("1")).grammars is model.grammars


@pytest.mark.parametrize("starts", [False, True])
async def test_who_leaves_early_is_charged_with_the_prompt(starts):
    account, model = Account("1"), scripted_model(lambda _: "x", prompt_s=0.0 if starts else 60.0)
    served = meter().metered(model, account)
    async with aclosing(served.backend.generate(Generation(prompt=tuple(range(3, 40)), tokens_max=5))) as emitted:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(emitted)
    assert account.prompt == 37


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_client_that_does_not_read_is_left(is_silent):
    """Also one that has read the beginning, of an answer that waits for its next token."""
    closed, blocked = asyncio.Event(), []

    async def chunks():
        try:
            yield b"x"
            while True:
                await asyncio.sleep(60.0 if is_silent else 0.0)
                yield b"x"
        finally:
            closed.set()

    async def unread(message):
        if message["type"] == "http.response.body" and (message["body"] != b"x" or not is_silent):
            blocked.append(message["body"])
            await asyncio.Event().wait()

    response = await streamed(chunks(), lambda problem: b"", StreamLimits(unread_s=0.05, keep_alive_s=0.1))
    async with asyncio.timeout(10):
        with pytest.raises(ClientDisconnect):
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, None, unread)
    assert closed.is_set()
    assert len(blocked) == 1, "nothing is sent beside a message that is not taken"


# Connections


@pytest.mark.real_time
def test_connections_without_a_request_are_closed(monkeypatch):
    monkeypatch.setattr(Http, "head_s", 0.3)
    with running(Gateway(ScriptedModels(scripted_model(lambda _: "All is well.", prompt_s=1.5)))) as url:
        address = (urlparse(url).hostname, urlparse(url).port)
        body = json.dumps({"model": NAME, "messages": [USER]}).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        with ExitStack() as stack:
            silent, half, asking = (
                stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(3)
            )
            half.sendall(b"GET /healthz HTTP/1.1\r\nHost:")
            asking.sendall(head.encode() + b"\r\n\r\n" + body)
            assert silent.recv(100) == b""
            assert half.recv(100) == b""
            assert b" 200 " in asking.recv(100)  # its answer takes longer than that
