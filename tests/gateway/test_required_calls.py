"""Required calls are valid, and the parser of the same family reads them back; both over HTTP, too."""

# ruff: noqa: RUF001 - marks of some families have wide characters

import json

import httpx
import jsonschema
import pytest

from swarm.errors import BadRequest
from swarm.gateway.app import Gateway
from swarm.gateway.chat import Tool, ToolChoice
from swarm.gateway.parsing import parser_for
from swarm.gateway.parts import Called
from tests.gateway.random_model import NAME, chat_of, leaning, made, random_model, said, tokenizer_of
from tests.gateway.scripted import CHATML, ScriptedModels, running
from tests.support.often import rest_is_long

pytestmark = pytest.mark.real_time  # compiling has the product's limit of time

TOOLS = (
    Tool(
        "get_weather",
        "",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 0, "maximum": 30},
                "unit": {"type": "string", "enum": ["c", "f"]},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
                "where": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
            },
            "required": ["city", "tags"],
        },
    ),
    Tool("now", "", {"type": "object", "properties": {}}),
    Tool("level", "", {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}}),
)
TEMPLATES = {  # what a template shows, and marks that are special tokens of the family
    "harmony": (
        "<|channel|><|message|>",
        ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>"),
    ),
    "kimi-k3": ("<|open|><|sep|>", ("<|open|>", "<|sep|>", "<|close|>")),
    "kimi-k2": (
        "<|tool_call_begin|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    ),
    "deepseek v3": ("<｜tool▁calls▁begin｜>```json", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    "deepseek v3.1": ("<｜tool▁calls▁begin｜>", ()),
    "deepseek v3.2": ("｜DSML｜ {{ mark }}function_calls>", ("｜DSML｜",)),
    "deepseek v4.1": ("｜DSML｜ {{ mark }} calls>", ("｜DSML｜",)),
    "gemma4": ("<|tool_call>", ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")),
    "mistral": ("[TOOL_CALLS][ARGS]", ("[TOOL_CALLS]", "[ARGS]")),
    "mistral before v11": ("[TOOL_CALLS]", ("[TOOL_CALLS]",)),
    "glm-4.5": ("<arg_key>", ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    "glm-4.7": ("<arg_key>k</arg_key><arg_value>", ("<tool_call>", "</tool_call>", "</arg_value>")),
    "qwen-xml": ("<function=<parameter=", ("<tool_call>", "</tool_call>")),
    "llama4": ("<|header_start|>", ()),
    "llama3": ("<|python_tag|>", ("<|python_tag|>",)),
    "hermes": ("<tool_call><think>", ("<tool_call>", "</tool_call>", "<think>", "</think>")),
    "hermes without special tokens": ("<tool_call>", ()),
}


def calls_of(tokenizer, chat, constraint, bias, seed, prompt=""):
    """(text, calls) of an output, or None if the length has ended it."""
    text = said(constraint, tokenizer, bias, seed, 300)
    if not constraint.is_complete:
        return None
    parser = parser_for(tokenizer, chat, prompt)
    parts = [*parser.feed(text), *parser.close()]
    return "".join(part for part in parts if isinstance(part, str)), [p for p in parts if isinstance(p, Called)]


@pytest.mark.parametrize(
    "family", rest_is_long(TEMPLATES, ["harmony", "kimi-k2", "deepseek v3.1", "gemma4", "mistral", "glm-4.5"])
)
def test_required_calls_are_valid_and_read_back(family):
    template, marks = TEMPLATES[family]
    tokenizer = tokenizer_of(template, marks)
    chat, bias = chat_of(tools=TOOLS, choice=ToolChoice("required")), leaning(tokenizer)
    make, outputs = made(chat, tokenizer), []
    for seed in range(10):
        output = calls_of(tokenizer, chat, make(), bias, seed)
        outputs += [] if output is None else [output]
    assert len(outputs) >= 3
    for text, calls in outputs:
        assert not text
        assert calls
        for call in calls:
            parameters = next(tool.parameters for tool in TOOLS if tool.name == call.name)
            jsonschema.validate(json.loads(call.arguments), {**parameters, "additionalProperties": False})


@pytest.mark.parametrize("family", ["hermes", "mistral", "kimi-k2"])
def test_named_tool_is_called_once(family):
    template, marks = TEMPLATES[family]
    tokenizer = tokenizer_of(template, marks)
    chat, bias = chat_of(tools=TOOLS, choice=ToolChoice("required", "level")), leaning(tokenizer)
    make = made(chat, tokenizer)
    outputs = [calls_of(tokenizer, chat, make(), bias, seed) for seed in range(6)]
    assert all([call.name for call in calls] == ["level"] for _, calls in filter(None, outputs))
    assert any(outputs)


def test_reasoning_that_the_template_began_comes_first():
    tokenizer = tokenizer_of(*TEMPLATES["hermes"])
    chat = chat_of({"type": "integer", "minimum": 1, "maximum": 9})
    constraint = made(chat, tokenizer, "user: hi\nassistant: <think>\n")()
    for token in tokenizer.encode("so it is</think>\n\n", add_special_tokens=False):
        assert constraint.mask()[token]
        constraint.take(token)
    assert not constraint.mask()[tokenizer.encode("x", add_special_tokens=False)[0]]
    constraint.take(tokenizer.encode("7", add_special_tokens=False)[0])
    assert constraint.is_complete
    without = made(chat, tokenizer, "user: hi\nassistant: <think>\n\n</think>\n\n")()
    assert not without.mask()[tokenizer.convert_tokens_to_ids("<think>")]


@pytest.mark.parametrize("family", ["hermes", "hermes without special tokens", "kimi-k2", "qwen-xml"])
def test_strict_tools_leave_text_free_and_bind_calls(family):
    template, marks = TEMPLATES[family]
    tokenizer = tokenizer_of(template, marks)
    strict = Tool("level", "", {"type": "object", "properties": {"a": {"const": 5}}, "required": ["a"]}, strict=True)
    chat = chat_of(tools=(strict,))
    make = made(chat, tokenizer)
    free = make()
    for token in [*tokenizer.encode("Just text.", add_special_tokens=False), tokenizer.eos_token_id]:
        assert free.mask()[token]
        free.take(token)
    assert free.is_complete
    required = made(chat_of(tools=(strict,), choice=ToolChoice("required")), tokenizer, "<think></think>")
    bound, text = make(), "So: " + said(required(), tokenizer, leaning(tokenizer))
    for token in tokenizer.encode(text, add_special_tokens=False):
        bound.take(token)
    assert not bound.is_over
    assert bound.is_complete
    wrong = make()
    for token in tokenizer.encode(text.replace("5", "6"), add_special_tokens=False):
        wrong.take(token)
    assert not wrong.is_complete
    with pytest.raises(BadRequest):
        wrong.mask()


def test_free_outputs_have_no_grammar():
    assert made(chat_of()) is None
    assert made(chat_of(tools=TOOLS)) is None
    assert made(chat_of(tools=TOOLS, choice=ToolChoice("none"))) is None


# --- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url():
    with running(Gateway(ScriptedModels(random_model(CHATML)))) as url:
        yield url


def post(url, **body):
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2000, **body}
    return httpx.post(url + "/v1/chat/completions", json=body, timeout=60)


def test_response_format_is_kept_in_every_choice(url):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}, "ok": {"type": "boolean"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    choices = post(url, response_format=wanted, n=4).json()["choices"]
    for choice in choices:
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        assert choice["finish_reason"] == "stop"


def test_required_call_is_reported_as_a_call(url):
    tool = {"type": "function", "function": {"name": "level", "parameters": TOOLS[2].parameters}}
    (choice,) = post(url, tools=[tool], tool_choice="required", parallel_tool_calls=False).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "level"
    jsonschema.validate(json.loads(call["function"]["arguments"]), TOOLS[2].parameters)


def test_length_that_ends_a_schema_is_told(url):
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "minLength": 500}}}
    (choice,) = post(url, response_format=wanted, max_tokens=5).json()["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_schema_that_cannot_be_enforced_is_a_bad_request(url, stream):
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}
    response = post(url, response_format=wanted, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize("name", ["tokenize", "tools", "chat_template", "add_generation_prompt"])
def test_template_variables_cannot_change_the_rendering(url, name):
    response = post(url, chat_template_kwargs={name: True}, max_tokens=1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template_kwargs"


def test_template_variables_of_the_model_are_taken(url):
    (choice,) = post(url, chat_template_kwargs={"enable_thinking": False}, max_tokens=1).json()["choices"]
    assert choice["message"]["role"] == "assistant"
