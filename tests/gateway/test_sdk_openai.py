"""OpenAI's own Python client against the gateway."""

import json
from contextlib import contextmanager

import pydantic
import pytest

from swarm.errors import NoRoute, StepTimeout
from swarm.gateway.api.problems import Problem, Rejected
from swarm.gateway.chat import Finished, Reasoning, Text, ToolCall
from tests.gateway.replying import CACHED, replying
from tests.gateway.scripted import NAME, scripted
from tests.support.later import later

openai = later("openai")

HELLO = [{"role": "user", "content": "Hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Tells the weather", "parameters": PARAMETERS, "strict": True}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSE_TOOL = {"type": "function", **FUNCTION}
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
    return [Reasoning(0, "A tool."), *calls, Finished(0, "tool_calls", 20, None, 4)]


@contextmanager
def client_of(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def says_ok():
    with scripted(lambda _: "All is well.") as (url, backend), client_of(url) as client:
        yield client, backend


@pytest.fixture(scope="module")
def client(says_ok):
    return says_ok[0]


@pytest.fixture(scope="module")
def calling():
    with replying(calls_or_says) as (url, model), client_of(url) as client:
        yield client, model


@pytest.fixture(scope="module")
def says_json():
    with scripted(lambda _: '{"city": "Paris", "people": 2100000}') as (url, _), client_of(url) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).object == "model"


# --- chat completions


def test_chat(client):
    answer = client.chat.completions.create(model=NAME, messages=HELLO)
    assert answer.choices[0].message.content == "All is well."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.system_fingerprint


def test_chat_stream(client):
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model=NAME, messages=HELLO, stream=True, stream_options=options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "All is well."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens > 0


def test_chat_stream_helper(client):
    with client.chat.completions.stream(model=NAME, messages=HELLO, logprobs=True) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.done"} <= kinds
    assert answer.choices[0].message.content == "All is well."
    assert "".join(token.token for token in answer.choices[0].logprobs.content) == "All is well."


def test_chat_choices_and_logprobs(client):
    answer = client.chat.completions.create(model=NAME, messages=HELLO, n=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert b"".join(bytes(token.bytes) for token in choice.logprobs.content) == b"All is well."
        assert {len(token.top_logprobs) for token in choice.logprobs.content} == {2}


def test_chat_sampling_arrives(says_ok):
    client, backend = says_ok
    answer = client.chat.completions.create(
        model=NAME,
        messages=HELLO,
        seed=7,
        stop=["wel"],
        logit_bias={"5": -100},
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        max_completion_tokens=20,
    )
    assert answer.choices[0].message.content == "All is "
    sampling = backend.asked[-1].sampling
    assert (sampling.seed, sampling.logit_bias, backend.asked[-1].tokens_max) == (7, {5: -100.0}, 20)
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)


def test_chat_parse(says_json):
    answer = says_json.chat.completions.parse(model=NAME, messages=HELLO, response_format=Capital)
    assert answer.choices[0].message.parsed == Capital(city="Paris", people=2_100_000)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
def test_chat_tools(calling, choice):
    client, model = calling
    answer = client.chat.completions.create(model=NAME, messages=HELLO, tools=[CHAT_TOOL], tool_choice=choice)
    message = answer.choices[0].message
    assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", None)
    assert [(call.id, call.type, call.function.name) for call in message.tool_calls] == [
        ("call_0", "function", "weather"),
        ("call_1", "function", "weather"),
    ]
    assert json.loads(message.tool_calls[1].function.arguments) == {"city": "Rome"}
    assert answer.usage.prompt_tokens_details.cached_tokens == CACHED
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    assert model.chats[-1].tool_choice.mode == ("auto" if choice == "auto" else "required")


def test_chat_tools_one_at_a_time(calling):
    tools = {"tools": [CHAT_TOOL], "parallel_tool_calls": False}
    answer = calling[0].chat.completions.create(model=NAME, messages=HELLO, **tools)
    assert len(answer.choices[0].message.tool_calls) == 1


def test_chat_tool_stream(calling):
    with calling[0].chat.completions.stream(model=NAME, messages=HELLO, tools=[CHAT_TOOL]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        answer = stream.get_final_completion()
    assert [(event.index, event.name, event.parsed_arguments) for event in done] == [
        (0, "weather", {"city": "Bern"}),
        (1, "weather", {"city": "Rome"}),
    ]
    assert [call.id for call in answer.choices[0].message.tool_calls] == ["call_0", "call_1"]


def test_chat_turn_with_a_tools_result(calling):
    client, model = calling
    tools = [CHAT_TOOL]
    first = client.chat.completions.create(model=NAME, messages=HELLO, tools=tools).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "wet"} for call in first.tool_calls]
    answer = client.chat.completions.create(model=NAME, messages=[*HELLO, first, *results], tools=tools)
    assert answer.choices[0].message.content == "It is wet."
    calls = model.chats[-1].messages[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Bern"}, {"city": "Rome"}]


# --- completions


def test_completions_echo_with_logprobs(client):
    answer = client.completions.create(model=NAME, prompt="Say this", max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == "Say this"
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs) == len(choice.logprobs.text_offset)


def test_completions_of_many_prompts(client):
    answer = client.completions.create(model=NAME, prompt=["One", "Two"], n=2, max_tokens=50)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(at, "All is well.") for at in range(4)]
    assert answer.usage.completion_tokens > 0


def test_completions_stream(client):
    chunks = list(client.completions.create(model=NAME, prompt=[5, 6], max_tokens=50, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "All is well."
    assert chunks[-1].choices[0].finish_reason == "stop"


# --- responses


def test_response(client):
    answer = client.responses.create(model=NAME, input="Hello", instructions="Be brief.", store=False)
    assert (answer.output_text, answer.status) == ("All is well.", "completed")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_response_stream(client):
    told = list(client.responses.create(model=NAME, input="Hello", stream=True))
    assert "".join(event.delta for event in told if event.type == "response.output_text.delta") == "All is well."
    assert told[-1].type == "response.completed"
    assert told[-1].response.output_text == "All is well."


def test_response_stream_helper(calling):
    with calling[0].responses.stream(model=NAME, input="Hello", tools=[RESPONSE_TOOL]) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
        answer = stream.get_final_response()
    assert [event.arguments for event in done] == [call.arguments for call in CALLS]
    thought, *calls = answer.output
    assert thought.content[0].text == "A tool."
    assert [call.parsed_arguments for call in calls] == [{"city": "Bern"}, {"city": "Rome"}]


def test_response_parse(says_json):
    answer = says_json.responses.parse(model=NAME, input="Hello", text_format=Capital)
    assert answer.output_parsed == Capital(city="Paris", people=2_100_000)


def test_response_turn_with_a_tools_result(calling):
    client, model = calling
    asking = {"model": NAME, "tools": [RESPONSE_TOOL], "store": False, "include": ["reasoning.encrypted_content"]}
    first = client.responses.create(input=HELLO, **asking)
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "wet"} for call in calls]
    answer = client.responses.create(input=[*HELLO, *first.output, *results], **asking)
    assert answer.output_text == "It is wet."
    turn = model.chats[-1].messages[1]
    assert (turn["reasoning_content"], len(turn["tool_calls"])) == ("A tool.", 2)


# --- errors


def test_bad_request(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=HELLO, temperature=9)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")


def test_prompt_that_is_too_long(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=NAME, input="word " * 9000)
    assert caught.value.code == "context_length_exceeded"


def test_model_that_is_not_there(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_path_that_is_not_there(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=NAME, input="Hello")


@pytest.mark.parametrize(
    ("error", "cls"),
    [
        (Rejected(Problem(429, "rate_limit", "slowly", "rate_limit_exceeded", retry_after_s=7)), "RateLimitError"),
        (Rejected(Problem(401, "authentication", "no key", "invalid_api_key")), "AuthenticationError"),
        (NoRoute("m", (3,)), "InternalServerError"),
        (StepTimeout("peer", "0:4", 5.0), "InternalServerError"),
    ],
)
def test_errors_have_their_classes(error, cls):
    def script(_):
        raise error

    with scripted(script) as (url, _), client_of(url) as client:
        for stream in (False, True):
            with pytest.raises(getattr(openai, cls)):
                client.chat.completions.create(model=NAME, messages=HELLO, stream=stream)
            with pytest.raises(getattr(openai, cls)):
                client.responses.create(model=NAME, input="Hello", stream=stream)


def test_stream_that_breaks_raises():
    with scripted(lambda _: ["All is", StepTimeout("peer", "0:4", 5.0)]) as (url, _), client_of(url) as client:
        for stream in (
            client.chat.completions.create(model=NAME, messages=HELLO, stream=True),
            client.completions.create(model=NAME, prompt="Hello", stream=True),
            client.responses.create(model=NAME, input="Hello", stream=True),
        ):
            with pytest.raises(openai.APIError, match="peer"):
                list(stream)
