"""Anthropic's dialect over HTTP, with a model that replies with given events or says given words."""

import json

import httpx
import pytest

from swarm.errors import NoRoute, StepTimeout
from swarm.gateway.api.problems import Problem, Rejected
from swarm.gateway.api.sse import StreamLimits
from swarm.gateway.app import GatewayLimits
from swarm.gateway.chat import Finished, ToolCall, ToolChoice
from tests.gateway.replying import CACHED, THINKS
from tests.gateway.scripted import NAME, scripted

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "weather",
    "description": "Tells the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = ToolCall(0, 0, "call_1", "weather", '{"city": "Bern"}')
REPLY = (
    *THINKS,
    CALL,
    ToolCall(0, 1, "call_2", "weather", "{}"),
    Finished(0, "tool_calls", 30, None, 5),
)


def post(url, body, path="/v1/messages", **options):
    return httpx.post(url + path, json={"model": NAME, "max_tokens": 100, **body}, timeout=30, **options)


def events(response):
    """Names and data of a stream's events."""
    blocks = [block.partition("\ndata: ") for block in response.text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data)) for name, _, data in blocks]


def asked(replies, **body):
    """The chat that a request becomes."""
    url, model = replies
    return model.asked(post(url, {"messages": HELLO, **body}))


def test_message_has_blocks_reason_and_usage(says_ok):
    response = post(says_ok[0], {"messages": HELLO}, "/v1/messages?beta=true")
    body = response.json()
    assert body["content"] == [{"type": "text", "text": "All is well.", "citations": None}]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", NAME)
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["input_tokens"] > 0
    assert body["usage"]["output_tokens"] > 0
    assert response.headers["request-id"].startswith("req_")


def test_thoughts_text_and_calls_are_blocks(replies):
    body = post(replies[0], {"messages": HELLO, "tools": [WEATHER]}).json()
    thinking, text, first, second = body["content"]
    assert (thinking["type"], thinking["thinking"], thinking["signature"]) == (
        *("thinking", "I need a tool."),
        "unsigned",
    )
    assert text["text"] == "Let me look."
    assert (first["type"], first["id"], first["name"], first["input"]) == (
        *("tool_use", "call_1", "weather"),
        {"city": "Bern"},
    )
    assert second["input"] == {}
    assert body["stop_reason"] == "tool_use"
    usage = body["usage"]
    assert usage["cache_read_input_tokens"] == CACHED
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (30, {"thinking_tokens": 5})


def test_stream_adds_up_to_the_message(replies):
    url, _ = replies
    whole = post(url, {"messages": HELLO, "tools": [WEATHER]}).json()
    told = events(post(url, {"messages": HELLO, "tools": [WEATHER], "stream": True}))
    assert all(name == body["type"] for name, body in told)
    message, partial = told[0][1]["message"], ""
    for name, body in told:
        match name:
            case "content_block_start":
                assert body["index"] == len(message["content"])
                message["content"].append(dict(body["content_block"]))
                partial = ""
            case "content_block_delta":
                block, delta = message["content"][body["index"]], body["delta"]
                if delta["type"] == "input_json_delta":
                    partial += delta["partial_json"]
                    block["input"] = json.loads(partial)
                else:
                    (field,) = set(delta) - {"type"}
                    block[field] += delta[field]
            case "message_delta":
                message |= body["delta"]
                message["usage"] |= body["usage"]
    assert {**message, "id": ""} == {**whole, "id": ""}
    starts, stops = (
        [at for at, (name, _) in enumerate(told) if name == f"content_block_{end}"] for end in ("start", "stop")
    )
    assert len(starts) == len(stops) == len(whole["content"])
    assert all(start < stop < after for start, stop, after in zip(starts, stops, [*starts[1:], len(told)], strict=True))
    assert [name for name, _ in told[-2:]] == ["message_delta", "message_stop"]


def test_stop_sequence_is_told_and_not_sent(says_ok):
    body = post(says_ok[0], {"messages": HELLO, "stop_sequences": ["zzz", "wel"]}).json()
    assert body["content"][0]["text"] == "All is "
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "wel")


def test_tokens_max_is_told(says_ok):
    body = post(says_ok[0], {"messages": HELLO, "max_tokens": 1}).json()
    assert (body["stop_reason"], body["usage"]["output_tokens"]) == ("max_tokens", 1)


def test_turn_with_a_tools_result_becomes_messages_of_templates(replies):
    chat = asked(
        replies,
        tools=[WEATHER],
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            *HELLO,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "A tool.", "signature": "unsigned"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Wait."},
                    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "Rain"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    function = {"name": "weather", "arguments": {"city": "Bern"}}
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "A tool.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "Rain", "tool_call_id": "call_1", "name": "weather"},
        {"role": "user", "content": "And?"},
    ]
    (tool,) = chat.tools
    assert (tool.name, tool.description, tool.parameters) == tuple(WEATHER.values())


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto", None, parallel=False)),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "weather"}, ToolChoice("required", "weather")),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_tool_choice_is_the_one_of_all_dialects(replies, given, choice):
    assert asked(replies, tools=[WEATHER], tool_choice=given).tool_choice == choice


def test_fields_that_change_the_answer_arrive(replies):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat = asked(
        replies,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        metadata={"user_id": "user_1_session_2"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        context_management={"edits": []},
        service_tier="auto",
    )
    sampling = chat.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, chat.tokens_max) == (0.5, 0.9, 7, 100)
    assert chat.conversation == "user_1_session_2"
    assert chat.template == {"enable_thinking": True}
    assert chat.schema == schema
    assert asked(replies, thinking={"type": "disabled"}).template == {"enable_thinking": False}
    assert asked(replies).template == {}


def test_line_for_the_vendors_accounts_is_no_part_of_the_prompt(replies):
    lines = ["x-anthropic-billing-header: cc_version=2.1; cch=12ab3;", "You help."]
    chat = asked(replies, system=[{"type": "text", "text": line} for line in lines])
    assert chat.messages[0] == {"role": "system", "content": "You help."}


def test_later_instructions_become_a_note_to_the_user(replies):
    chat = asked(replies, messages=[*HELLO, {"role": "system", "content": "Be brief."}])
    note = "Hello\n\n<system-reminder>\nBe brief.\n</system-reminder>"
    assert chat.messages == [{"role": "user", "content": note}]


def test_answer_continues_text_that_the_client_began(says_ok):
    url, backend = says_ok
    post(url, {"messages": [*HELLO, {"role": "assistant", "content": "Well: "}]})
    prompt = backend.tokenizer.decode(backend.asked[-1].prompt)
    assert prompt.rstrip().endswith("assistant\nWell:")


def test_tokens_are_counted_as_the_answer_counts_them(says_ok):
    url, _ = says_ok
    body = {"messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    count = httpx.post(url + "/v1/messages/count_tokens", json={"model": NAME, **body}).json()
    assert count == {"input_tokens": post(url, body).json()["usage"]["input_tokens"]}


def test_head_of_the_root_is_there(says_ok):
    assert httpx.head(says_ok[0] + "/").status_code == 200


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "status", "kind", "says"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": HELLO, "max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error", "'image'"),
        ({"messages": [{"role": "wizard", "content": ""}]}, 400, "invalid_request_error", "wizard"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "invalid_request_error", "'text'"),
        ({"messages": HELLO, "tools": [{"type": "bash_20250124", "name": "b"}]}, 400, "invalid_request_error", "bash"),
        ({"messages": HELLO, "tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"messages": HELLO, "model": "other"}, 404, "not_found_error", "other"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "invalid_request_error", "> 8192 maximum"),
    ],
)
def test_bad_request_is_told_in_anthropics_form(says_ok, body, status, kind, says):
    response = post(says_ok[0], body)
    told = response.json()
    assert (response.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert says in told["error"]["message"]
    assert told["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (NoRoute("m", (3,)), 529, "overloaded_error"),
        (StepTimeout("peer", "0:4", 5.0), 504, "timeout_error"),
        (Rejected(Problem(429, "rate_limit", "slowly", retry_after_s=7)), 429, "rate_limit_error"),
        (Rejected(Problem(401, "authentication", "no key")), 401, "authentication_error"),
        (RuntimeError("a secret path"), 500, "api_error"),
    ],
)
def test_error_has_anthropics_status_before_the_first_byte(error, status, kind):
    def script(_):
        raise error

    with scripted(script) as (url, _):
        for stream in (False, True):
            response = post(url, {"messages": HELLO, "stream": stream})
            assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
            assert "secret" not in response.text


def test_error_after_the_first_byte_is_an_event_and_no_clean_end():
    with scripted(lambda _: ["All is", StepTimeout("peer", "0:4", 5.0)]) as (url, _):
        told = events(post(url, {"messages": HELLO, "stream": True}))
    assert told[0][0] == "message_start"
    assert told[-1][0] == "error"
    assert told[-1][1]["error"]["type"] == "timeout_error"
    assert "message_stop" not in dict(told)


def test_body_that_is_too_long_is_refused_in_its_form(says_ok):
    response = httpx.post(says_ok[0] + "/v1/messages", content=b"x" * (9 << 20), timeout=30)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")


@pytest.mark.real_time
def test_slow_model_is_pinged_for():
    limits = GatewayLimits(streams=StreamLimits(keep_alive_s=0.02))
    with scripted(lambda _: "All is well.", token_s=0.2, limits=limits) as (url, _):
        told = events(post(url, {"messages": HELLO, "stream": True, "max_tokens": 2}))
    names = [name for name, _ in told]
    assert names.count("ping") >= 2
    assert [name for name in names if name != "ping"][-1] == "message_stop"
