"""OpenAI's responses over HTTP, with a model that replies with given events or says given words."""

import json

import httpx
import pytest

from swarm.errors import HopFailed, NoRoute, StepTimeout
from swarm.gateway.api.responses import SEALED
from swarm.gateway.api.sse import StreamLimits
from swarm.gateway.app import GatewayLimits
from swarm.gateway.chat import Finished, ToolCall, ToolChoice
from tests.gateway.replying import CACHED, THINKS
from tests.gateway.scripted import NAME, scripted

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
SPACE = {"type": "namespace", "name": "mcp__files", "description": "", "tools": [{**WEATHER, "name": "read"}]}
REPLY = (
    *THINKS,
    ToolCall(0, 0, "call_1", "weather", '{"city": "Bern"}'),
    ToolCall(0, 1, "call_2", "mcp__files__read", "{}"),
    ToolCall(0, 2, "call_3", "apply_patch", '{"input": "*** Begin"}'),
    Finished(0, "tool_calls", 30, None, 5),
)


def post(url, body, **options):
    return httpx.post(url + "/v1/responses", json={"model": NAME, "input": "Hello", **body}, timeout=30, **options)


def events(response):
    """The data of a stream's events."""
    blocks = [block for block in response.text.strip().split("\n\n") if not block.startswith(":")]
    told = [block.partition("\ndata: ") for block in blocks]
    bodies = [json.loads(data) for _, _, data in told]
    assert [name.removeprefix("event: ") for name, _, _ in told] == [body["type"] for body in bodies]
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    return bodies


def asked(replies, **body):
    """The chat that a request becomes."""
    url, model = replies
    return model.asked(post(url, body))


def without_ids(value):
    """A response without its ids and times."""
    if isinstance(value, dict):
        return {
            name: without_ids(each) for name, each in value.items() if name not in {"id", "created_at", "completed_at"}
        }
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def test_response_has_a_message_and_usage(says_ok):
    body = post(says_ok[0], {"metadata": {"a": "b"}, "max_output_tokens": 50}).json()
    (message,) = body["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "All is well.", "annotations": [], "logprobs": []}]
    assert (body["object"], body["status"], body["error"], body["store"]) == ("response", "completed", None, False)
    assert (body["metadata"], body["max_output_tokens"], body["tool_choice"]) == ({"a": "b"}, 50, "auto")
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_thoughts_text_and_calls_are_items(replies):
    body = post(replies[0], {"tools": [WEATHER, PATCH, SPACE]}).json()
    thought, message, call, spaced, custom = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I need a tool."}]
    assert message["content"][0]["text"] == "Let me look."
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "call_1", "weather")
    assert call["arguments"] == '{"city": "Bern"}'
    assert (spaced["namespace"], spaced["name"]) == ("mcp__files", "read")
    assert (custom["type"], custom["input"]) == ("custom_tool_call", "*** Begin")
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == CACHED
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}


@pytest.mark.parametrize("reasoning", [None, {"effort": "high", "summary": "auto"}])
def test_stream_adds_up_to_the_response(replies, reasoning):
    asking = {"tools": [WEATHER, PATCH, SPACE], "reasoning": reasoning, "include": ["reasoning.encrypted_content"]}
    whole = post(replies[0], asking).json()
    told = events(post(replies[0], {**asking, "stream": True}))
    assert [body["type"] for body in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1]["type"] == "response.completed"
    assert without_ids(told[-1]["response"]) == without_ids(whole)
    output = told[-1]["response"]["output"]
    texts = [""] * len(output)
    for body in told[2:-1]:
        kind, at = body["type"], body["output_index"]
        if kind == "response.output_item.added":
            assert body["item"]["type"] == output[at]["type"]
            assert body["item"]["id"] == output[at]["id"]
        elif kind == "response.output_item.done":
            assert body["item"] == output[at]
        else:
            assert body["item_id"] == output[at]["id"]
            texts[at] += body["delta"] if kind.endswith(".delta") else ""
    assert texts == ["I need a tool.", "Let me look.", '{"city": "Bern"}', "{}", "*** Begin"]


def test_events_of_a_message_are_openais(says_ok):
    kinds = [body["type"].removeprefix("response.") for body in events(post(says_ok[0], {"stream": True}))]
    assert [kind for at, kind in enumerate(kinds) if kind not in kinds[:at]] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]


def test_summary_is_given_to_those_who_ask(replies):
    thought = post(replies[0], {"reasoning": {"summary": "auto"}}).json()["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "I need a tool."}]
    assert "content" not in thought


def test_tokens_max_makes_the_response_incomplete(says_ok):
    for stream in (False, True):
        response = post(says_ok[0], {"max_output_tokens": 1, "stream": stream})
        last = events(response)[-1] if stream else {"type": "response.incomplete", "response": response.json()}
        assert last["type"] == "response.incomplete"
        body = last["response"]
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert body["output"][0]["status"] == "incomplete"


def test_answer_without_a_word_is_an_empty_message():
    with scripted(lambda _: "") as (url, _):
        (message,) = post(url, {}).json()["output"]
    assert message["content"][0]["text"] == ""


def test_logprobs_come_with_text(says_ok):
    asking = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (message,) = post(says_ok[0], asking).json()["output"]
    logprobs = message["content"][0]["logprobs"]
    assert "".join(token["token"] for token in logprobs) == "All is well."
    assert {len(token["top_logprobs"]) for token in logprobs} == {2}
    deltas = [body for body in events(post(says_ok[0], {**asking, "stream": True})) if "delta" in body]
    assert [token for body in deltas for token in body["logprobs"]] == logprobs


def test_items_become_messages_of_templates(replies):
    sealed = post(replies[0], {"include": ["reasoning.encrypted_content"]}).json()["output"][0]["encrypted_content"]
    assert sealed.startswith(SEALED)
    chat = asked(
        replies,
        instructions="Be brief.",
        tools=[WEATHER, PATCH, SPACE],
        input=[
            {"role": "developer", "content": "Be kind."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"role": "user", "content": "again"},
            {"type": "reasoning", "summary": [], "encrypted_content": sealed},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'},
            {"type": "function_call", "call_id": "c2", "namespace": "mcp__files", "name": "read", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c3", "name": "apply_patch", "input": "*** Begin"},
            {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "None"}]},
            {"type": "custom_tool_call_output", "call_id": "c3", "output": "Done"},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAA: another server's"},
            {"role": "developer", "content": "Faster."},
        ],
    )
    calls = [
        ("c1", "weather", {"city": "Bern"}),
        ("c2", "mcp__files__read", {}),
        ("c3", "apply_patch", {"input": "*** Begin"}),
    ]
    results = zip(calls, ("Rain", "None", "Done"), strict=True)
    assert chat.messages == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Hello\n\nagain"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "I need a tool.",
            "tool_calls": [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id_, name, arguments in calls
            ],
        },
        *({"role": "tool", "content": text, "tool_call_id": id_, "name": name} for (id_, name, _), text in results),
        {"role": "user", "content": "<system-reminder>\nFaster.\n</system-reminder>"},
    ]
    weather, patch, read = chat.tools
    assert (weather.name, weather.description, weather.strict) == ("weather", "Tells the weather", True)
    assert 'start: "x"' in patch.description
    assert read.name == "mcp__files__read"


@pytest.mark.parametrize(
    ("given", "names", "choice"),
    [
        (None, {"weather", "apply_patch"}, ToolChoice()),
        ("none", {"weather", "apply_patch"}, ToolChoice("none")),
        ("required", {"weather", "apply_patch"}, ToolChoice("required")),
        ({"type": "function", "name": "weather"}, {"weather", "apply_patch"}, ToolChoice("required", "weather")),
        ({"type": "custom", "name": "apply_patch"}, {"weather", "apply_patch"}, ToolChoice("required", "apply_patch")),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            {"weather"},
            ToolChoice("required"),
        ),
    ],
)
def test_tool_choice_is_the_one_of_all_dialects(replies, given, names, choice):
    chat = asked(replies, tools=[WEATHER, PATCH], tool_choice=given)
    assert ({tool.name for tool in chat.tools}, chat.tool_choice) == (names, choice)


def test_what_codex_sends_is_taken(replies):
    """The fields that its 0.169 was seen to send."""
    chat = asked(
        replies,
        instructions="You code.",
        input=[{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]}],
        tools=[WEATHER, PATCH, {"type": "web_search", "external_web_access": False}],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0199-session",
        client_metadata={"x": "y"},
        text={"verbosity": "low"},
    )
    assert [tool.name for tool in chat.tools] == ["weather", "apply_patch"]
    assert chat.tool_choice == ToolChoice("auto", None, parallel=False)
    assert chat.conversation == "0199-session"
    assert chat.template == {"reasoning_effort": "medium", "enable_thinking": True}


def test_format_is_a_schema(replies):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    assert asked(replies, text=given).schema == schema
    assert asked(replies, text={"format": {"type": "json_object"}}).schema == {"type": "object"}
    assert post(replies[0], {"text": given}).json()["text"] == {**given, "verbosity": "medium"}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, 400, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input"),
        ({"input": [{"role": "wizard", "content": ""}]}, 400, "input"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"background": True}, 400, "background"),
        ({"tools": [{"type": "file_search"}]}, 400, "tools"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, 400, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}}, 400, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, 400, "text.format"),
        ({"temperature": 3}, 400, "temperature"),
        ({"model": "other"}, 404, None),
    ],
)
def test_bad_request_names_its_field(says_ok, body, status, param):
    response = post(says_ok[0], body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (status, "invalid_request_error", param)


@pytest.mark.parametrize("stream", [False, True])
def test_error_before_the_first_byte_has_its_status(stream):
    def script(_):
        raise NoRoute("m", (3,))

    with scripted(script) as (url, _):
        response = post(url, {"stream": stream})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")
    assert "retry-after" in response.headers


def test_error_after_the_first_byte_fails_the_response():
    with scripted(lambda _: ["All is", StepTimeout("peer", "0:4", 5.0)]) as (url, _):
        told = events(post(url, {"stream": True}))
    error, failed = told[-2:]
    assert (error["type"], error["code"]) == ("error", "timeout")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"


@pytest.mark.real_time
def test_silent_stream_is_kept_alive_from_its_first_second():
    limits = GatewayLimits(streams=StreamLimits(keep_alive_s=0.02))
    with scripted(lambda _: "All is well.", prompt_s=0.2, limits=limits) as (url, _):
        response = post(url, {"stream": True})
        assert response.text.count(": the route is being repaired") >= 2
        assert events(response)[-1]["type"] == "response.completed"


def test_failure_of_a_long_prompt_is_an_event_behind_the_headers():
    def script(_):
        raise HopFailed("peer", "0:4", "gone")

    limits = GatewayLimits(streams=StreamLimits(keep_alive_s=0.02))
    with scripted(script, prompt_s=0.2, limits=limits) as (url, backend):
        response = post(url, {"stream": True})
        assert response.status_code == 200
        assert [body["type"] for body in events(response)] == ["error", "response.failed"]
        assert backend.running == 0
