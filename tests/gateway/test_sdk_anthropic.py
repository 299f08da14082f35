"""Anthropic's own Python client against the gateway."""

from contextlib import contextmanager

import pydantic
import pytest

from swarm.errors import NoRoute, StepTimeout
from swarm.gateway.api.problems import Problem, Rejected
from swarm.gateway.chat import Finished, Reasoning, Text, ToolCall
from tests.gateway.replying import CACHED, replying
from tests.gateway.scripted import NAME, scripted
from tests.support.later import later

anthropic = later("anthropic")

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "name": "weather",
    "description": "Tells the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKING = {"model": NAME, "max_tokens": 100, "messages": HELLO}
CALLS = [ToolCall(0, at, f"call_{at}", "weather", f'{{"city": "{city}"}}') for at, city in enumerate(["Bern", "Rome"])]


class Capital(pydantic.BaseModel):
    """An answer with a schema."""

    city: str
    people: int


def calls_or_says(chat):
    """Call the tools first, then say what they have returned."""
    if chat.messages[-1]["role"] == "tool":
        return [Text(0, f"It is {chat.messages[-1]['content']}."), Finished(0, "stop", 5)]
    calls = CALLS if chat.tool_choice.parallel else CALLS[:1]
    return [Reasoning(0, "A "), Reasoning(0, "tool."), Text(0, "Wait."), *calls, Finished(0, "tool_calls", 20, None, 4)]


@contextmanager
def client_of(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client():
    with scripted(lambda _: "All is well.") as (url, _), client_of(url) as client:
        yield client


@pytest.fixture(scope="module")
def calling():
    with replying(calls_or_says) as (url, model), client_of(url) as client:
        yield client, model


def test_message(client):
    answer = client.messages.create(**ASKING, system="Be brief.", extra_body={"temperature": 0.5, "top_k": 5})
    assert [block.text for block in answer.content] == ["All is well."]
    assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("end_turn", None, NAME)
    assert answer.usage.output_tokens > 0
    assert answer._request_id.startswith("req_")


def test_stop_sequence(client):
    answer = client.messages.create(**ASKING, stop_sequences=["wel"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("All is ", "stop_sequence", "wel")


def test_stream(client):
    told = list(client.messages.create(**ASKING, stream=True))
    assert (told[0].type, told[-1].type) == ("message_start", "message_stop")
    assert told[-2].delta.stop_reason == "end_turn"


def test_stream_helper(client):
    with client.messages.stream(**ASKING) as stream:
        assert "".join(stream.text_stream) == "All is well."
        answer = stream.get_final_message()
    assert answer.content[0].text == "All is well."
    assert answer.usage.input_tokens > 0


def test_thinking_and_tools_in_a_stream(calling):
    with calling[0].messages.stream(**ASKING, tools=[TOOL], thinking={"type": "adaptive"}) as stream:
        told = list(stream)
        answer = stream.get_final_message()
    assert "".join(event.thinking for event in told if event.type == "thinking") == "A tool."
    assert "".join(event.text for event in told if event.type == "text") == "Wait."
    thinking, text, *calls = answer.content
    assert (thinking.thinking, thinking.signature, text.text) == ("A tool.", "unsigned", "Wait.")
    assert [(call.id, call.name, call.input) for call in calls] == [
        ("call_0", "weather", {"city": "Bern"}),
        ("call_1", "weather", {"city": "Rome"}),
    ]
    assert answer.stop_reason == "tool_use"
    assert answer.usage.cache_read_input_tokens == CACHED
    assert answer.usage.output_tokens_details.thinking_tokens == 4


@pytest.mark.parametrize(
    ("choice", "mode", "calls"),
    [
        ({"type": "auto"}, "auto", 2),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", 1),
        ({"type": "tool", "name": "weather"}, "required", 2),
    ],
)
def test_tool_choice(calling, choice, mode, calls):
    client, model = calling
    answer = client.messages.create(**ASKING, tools=[TOOL], tool_choice=choice)
    assert len([block for block in answer.content if block.type == "tool_use"]) == calls
    assert model.chats[-1].tool_choice.mode == mode


def test_turn_with_a_tools_result(calling):
    client, model = calling
    first = client.messages.create(**ASKING, tools=[TOOL])
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "wet"}
        for block in first.content
        if block.type == "tool_use"
    ]
    turns = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    answer = client.messages.create(**{**ASKING, "messages": turns}, tools=[TOOL])
    assert answer.content[0].text == "It is wet."
    turn = model.chats[-1].messages[1]
    assert (turn["reasoning_content"], turn["content"], len(turn["tool_calls"])) == ("A tool.", "Wait.", 2)


def test_parse():
    with scripted(lambda _: '{"city": "Paris", "people": 2100000}') as (url, _), client_of(url) as client:
        answer = client.messages.parse(**ASKING, output_format=Capital)
    assert answer.parsed_output == Capital(city="Paris", people=2_100_000)


def test_beta_messages(client):
    answer = client.beta.messages.create(**ASKING, betas=["context-management-2025-06-27"])
    assert answer.content[0].text == "All is well."


def test_count_tokens(client):
    count = client.messages.count_tokens(model=NAME, messages=HELLO, tools=[TOOL])
    assert count.input_tokens > client.messages.count_tokens(model=NAME, messages=HELLO).input_tokens > 0


def test_bad_request(client):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="'image'"):
        client.messages.create(**{**ASKING, "messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        client.messages.create(**{**ASKING, "messages": [{"role": "user", "content": "word " * 9000}]})


def test_model_that_is_not_there(client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASKING, "model": "other"})


@pytest.mark.parametrize(
    ("error", "cls"),
    [
        (Rejected(Problem(429, "rate_limit", "slowly", retry_after_s=7)), "RateLimitError"),
        (Rejected(Problem(401, "authentication", "no key")), "AuthenticationError"),
        (Rejected(Problem(403, "permission", "not here")), "PermissionDeniedError"),
        (NoRoute("m", (3,)), "OverloadedError"),
        (StepTimeout("peer", "0:4", 5.0), "GatewayTimeoutError"),
        (RuntimeError("a secret path"), "InternalServerError"),
    ],
)
def test_errors_have_their_classes(error, cls):
    def script(_):
        raise error

    with scripted(script) as (url, _), client_of(url) as client:
        for stream in (False, True):
            with pytest.raises(getattr(anthropic, cls)):
                client.messages.create(**ASKING, stream=stream)


def test_stream_that_breaks_raises():
    with scripted(lambda _: ["All is", StepTimeout("peer", "0:4", 5.0)]) as (url, _), client_of(url) as client:
        stream = client.messages.create(**ASKING, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="peer"):
            list(stream)
