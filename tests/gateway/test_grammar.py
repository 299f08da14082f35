"""Outputs are what schemas and required calls say, whatever the model would rather say."""

# ruff: noqa: RUF001 - marks of some families have wide characters

import asyncio
import json
import math

import httpx
import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from swarm.errors import BadRequest
from swarm.gateway.app import Gateway
from swarm.gateway.chat import Chat, Tool, ToolChoice
from swarm.gateway.grammar import GrammarLimits, Grammars
from swarm.gateway.parsing import parser_for
from swarm.gateway.parts import Called
from swarm.gateway.schemas import closed
from tests.gateway.random_model import NAME, PADDING, leaning, random_model, tokenizer_of, walk
from tests.gateway.scripted import CHATML, ScriptedModels, running

PLAIN = tokenizer_of("plain")
EOS = frozenset({PLAIN.eos_token_id})
PLAIN_GRAMMARS = Grammars(PLAIN, len(PLAIN) + PADDING, EOS)
LEANING = leaning(PLAIN)


def chat_of(schema=None, tools=(), choice=None) -> Chat:
    return Chat(model="m", messages=[], schema=schema, tools=tools, tool_choice=choice or ToolChoice())


def made(chat: Chat, grammars: Grammars = PLAIN_GRAMMARS, prompt: str = ""):
    """What makes a constraint for each choice of a request."""
    return asyncio.run(fresh(grammars).make(chat, prompt))


def fresh(grammars: Grammars) -> Grammars:
    """The same in a new loop."""
    grammars._own = None
    return grammars


def said(constraint, tokenizer=PLAIN, bias=LEANING, seed=0, tokens_max=400) -> str:
    """The text of one output."""
    ids = [token for token in walk(constraint, bias, seed, tokens_max, EOS) if token not in EOS]
    return tokenizer.decode(ids, skip_special_tokens=False)


# --- schemas ---------------------------------------------------------------------------------------------------------

WORDS = st.text('abc "\\é{}', min_size=1, max_size=6)
STRINGS = st.one_of(
    st.just({"type": "string"}),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 9)] * 2
    ),
    st.sampled_from([{"type": "string", "format": name} for name in ("date", "date-time", "uuid", "ipv4")]),
    st.sampled_from([{"type": "string", "pattern": p} for p in ("^[a-z]{2,4}$", "^(ab|cd)+x?$", r"^\d{3}-\d{2}$")]),
)
NUMBERS = st.one_of(
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
              st.integers(-999, 999), st.integers(0, 99)),
    st.builds(lambda low, more: {"type": "number", "minimum": low, "maximum": low + more},
              st.integers(-99, 99), st.integers(1, 99)),
    st.sampled_from([{"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 99}, {"type": "integer"}]),
)  # fmt: skip
LEAVES = st.one_of(
    STRINGS,
    NUMBERS,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {"const": "x"}]),
    st.lists(WORDS, min_size=1, max_size=4, unique=True).map(lambda words: {"enum": words}),
)


def _objects(inner):
    def built(properties, required_first, is_open):
        names = list(properties)
        schema = {"type": "object", "properties": properties, "required": names[:required_first]}
        return {**schema, "additionalProperties": {"type": "integer"}} if is_open else schema

    return st.builds(built, st.dictionaries(WORDS, inner, max_size=4), st.integers(0, 4), st.booleans())


def _arrays(inner):
    return st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner, st.integers(0, 2), st.integers(0, 3),
    )  # fmt: skip


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner), _arrays(inner), st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each})
    ),
    max_leaves=8,
)


def check_random_schema(schema, seed):
    constraint = made(chat_of(schema))()
    text = said(constraint, seed=seed)
    ended_by_length = not constraint.is_complete and not constraint._has_failed
    event(f"ended by the length: {ended_by_length}")
    if ended_by_length:
        return
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(QUIET, max_examples=25)
@given(SCHEMAS, st.integers(0, 1 << 30))
def test_random_schemas_have_valid_outputs(schema, seed):
    check_random_schema(schema, seed)


@pytest.mark.long
@settings(QUIET, max_examples=500)
@given(SCHEMAS, st.integers(0, 1 << 30))
def test_500_random_schemas_have_valid_outputs(schema, seed):
    check_random_schema(schema, seed)


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value", "children"],
        }
    },
}


def test_recursive_schema_has_valid_outputs():
    make, whole = made(chat_of(TREE)), 0
    for seed in range(20):
        constraint = make()
        text = said(constraint, seed=seed)
        if constraint.is_complete:
            whole += 1
            jsonschema.validate(json.loads(text), TREE)
    assert whole >= 10


def test_json_object_is_any_object():
    for seed in range(5):
        constraint = made(chat_of({}))()
        text = said(constraint, seed=seed)
        assert not constraint.is_complete or isinstance(json.loads(text), dict)


def test_json_has_one_space_and_no_keys_of_its_own():
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [1, 2]}}, "required": ["a", "b"]}
    assert said(made(chat_of(schema))()) == '{"a": 1, "b": [1, 2]}'


def test_objects_are_closed_where_that_leaves_them_possible():
    inner = {"type": "object", "properties": {"a": {"type": "string", "format": "no-such-format"}}}
    assert closed(inner, 9) == {
        "type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False,
    }  # fmt: skip
    assert closed({"type": "array", "items": inner}, 9)["items"]["additionalProperties"] is False
    assert closed({"properties": {"properties": {"type": "object"}}}, 9)["properties"]["properties"] == {
        "type": "object"
    }
    for kept in (
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"allOf": [inner, {"type": "object", "properties": {"c": {}}}]},
        {"enum": [{"properties": {"format": "date"}}]},
    ):
        assert "additionalProperties" not in json.dumps({**closed(kept, 9), "additionalProperties": None})[:-30]


# --- masks -----------------------------------------------------------------------------------------------------------


def test_mask_allows_no_padding_no_special_token_and_the_end_when_whole():
    constraint = made(chat_of({"type": "integer", "minimum": 1, "maximum": 99}))()
    mask = constraint.mask()
    assert mask.dtype == torch.bool
    assert len(mask) == len(PLAIN) + PADDING
    assert not mask[len(PLAIN) :].any()
    assert not mask[PLAIN.all_special_ids].any()
    constraint.take(PLAIN.encode("7", add_special_tokens=False)[0])
    assert constraint.is_complete
    assert not constraint.is_over
    assert constraint.mask()[PLAIN.eos_token_id]
    constraint.take(PLAIN.eos_token_id)
    assert constraint.is_over
    assert constraint.mask() is None


def test_forced_tokens_are_those_that_must_come():
    schema = {"type": "object", "properties": {"a_long_name": {"type": "boolean"}}, "required": ["a_long_name"]}
    constraint = made(chat_of(schema))()
    tokens = constraint.forced()
    assert '{"a_long_name": '.startswith(PLAIN.decode(tokens))
    assert len(tokens) >= 3
    assert constraint.forced() == tokens  # asking takes nothing
    for token in tokens:
        assert constraint.mask()[token]
        constraint.take(token)
    assert not constraint.is_over


def test_token_that_does_not_fit_ends_the_grammar(capfd):
    constraint = made(chat_of({"type": "integer"}))()
    constraint.take(PLAIN.encode("x", add_special_tokens=False)[0])
    assert constraint.is_over
    assert not constraint.is_complete
    assert constraint.mask() is None
    assert constraint.forced() == []
    constraint.take(0)
    assert "a grammar failed" in "".join(capfd.readouterr())


def test_mask_beyond_its_limit_ends_the_grammar():
    grammars = Grammars(PLAIN, len(PLAIN), EOS, GrammarLimits(step_fuel=1, step_items=1))
    constraint = made(chat_of({"type": "string", "pattern": "^(a|b)*c(a|b){9}$"}), grammars)()
    list(walk(constraint, LEANING[: len(PLAIN)], 0, 30))
    assert constraint.is_over
    assert not constraint.is_complete


def test_words_that_explain_do_not_count():
    schema = {"type": "integer", "minimum": 7, "maximum": 7, "description": "x" * 100_000, "default": 7}
    assert said(made(chat_of(schema))()) == "7"


def test_each_choice_has_a_state_of_its_own():
    make = made(chat_of({"const": "a long constant"}))
    first, second = make(), make()
    assert said(first) == said(second) == '"a long constant"'


# --- hostile schemas -------------------------------------------------------------------------------------------------


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chained(word):
    """Two references each, thirty levels: 2**30 paths."""
    link = {f"d{i}": {word: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(30)}
    return {"$ref": "#/$defs/d0", "$defs": {**link, "d30": {"type": "integer"}}}


REFUSED = {
    "deep": deep(100),
    "deeper than Python recurses": deep(100_000),
    "many properties": {"properties": {f"p{i}": {"type": "string"} for i in range(1100)}},
    "many alternatives": {"anyOf": [{"const": i} for i in range(1100)]},
    "more bytes than are compiled": {"enum": ["x" * 99] * 1000},
    "more bytes than are read": {"type": "integer", "description": "x" * (1 << 20)},
    "a product of alternatives": {
        "allOf": [{"anyOf": [{"properties": {f"x{i}": {"const": k}}} for k in range(8)]} for i in range(12)]
    },
    "circular": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}},
    "an address": {"$ref": "http://127.0.0.1:9/schema.json"},
    "no such type": {"type": "banana"},
    "a pattern that is none": {"type": "string", "pattern": "("},
    "impossible": {"type": "string", "pattern": "^a$", "minLength": 5},
    "not enforced": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "no JSON schema": {"type": "object", "properties": 7},
    "names that are none": {"type": "object", "properties": {"a": {}}, "required": [{}]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_schema_is_refused(name):
    with pytest.raises(BadRequest) as refused:
        made(chat_of(REFUSED[name]))
    assert refused.value.field == "response_format"
    with pytest.raises(BadRequest) as refused:
        made(chat_of(tools=(Tool("f", "", REFUSED[name], True),), choice=ToolChoice("required")))
    assert refused.value.field == "tools"


ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


def test_schema_without_any_output_is_refused_or_ends_its_call():
    with pytest.raises(BadRequest):
        made(chat_of(ENDLESS))
    constraint = made(chat_of(tools=(Tool("f", "", ENDLESS),), choice=ToolChoice("required")))()
    said(constraint)
    assert constraint.is_over
    assert not constraint.is_complete


@pytest.mark.parametrize(
    "schema",
    [
        deep(50),
        chained("anyOf"),
        {"type": "string", "pattern": "^(.*a.{20}|.*b.{20}|.*c.{20})$"},
        {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
        {"enum": [f"value {i}" for i in range(5000)]},
    ],
    ids=["deep", "chained", "pattern", "repeated", "long", "list", "enumeration"],
)
def test_costly_schema_stays_within_the_limits_of_a_mask(schema):
    try:
        constraint = made(chat_of(schema))()
    except BadRequest:
        return
    for _ in walk(constraint, LEANING, 0, 20, EOS):
        pass  # a mask that reaches a limit ends the grammar; it raises nothing


def test_compiling_is_bounded_in_time_and_work():
    with pytest.raises(BadRequest, match="too long"):
        made(chat_of(TREE), Grammars(PLAIN, len(PLAIN), EOS, GrammarLimits(compile_s=0.0)))
    costly = {"type": "string", "pattern": "(a|b)*a(a|b){200}"}
    for name in ("lexer_fuel", "grammar_symbols", "schema_bytes", "given_bytes", "members"):
        limits = GrammarLimits(**{name: 1})
        with pytest.raises(BadRequest):
            made(
                chat_of({"type": "object", "properties": {"a": costly, "b": costly}}),
                Grammars(PLAIN, len(PLAIN), EOS, limits),
            )


# --- calls -----------------------------------------------------------------------------------------------------------

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
    "deepseek v3": ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    "deepseek v3.1": ("<｜tool▁calls▁begin｜>", ()),
    "deepseek v3.2": ("｜DSML｜function_calls", ("｜DSML｜",)),
    "deepseek v4.1": ("｜DSML｜ calls", ("｜DSML｜",)),
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


@pytest.mark.parametrize("family", TEMPLATES)
def test_required_calls_are_valid_and_read_back(family):
    template, marks = TEMPLATES[family]
    tokenizer = tokenizer_of(template, marks)
    grammars = Grammars(tokenizer, len(tokenizer) + PADDING, EOS)
    chat, bias = chat_of(tools=TOOLS, choice=ToolChoice("required")), leaning(tokenizer)
    make, outputs = made(chat, grammars), []
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
    make = made(chat, Grammars(tokenizer, len(tokenizer) + PADDING, EOS))
    outputs = [calls_of(tokenizer, chat, make(), bias, seed) for seed in range(6)]
    assert all([call.name for call in calls] == ["level"] for _, calls in filter(None, outputs))
    assert any(outputs)


def test_reasoning_that_the_template_began_comes_first():
    tokenizer = tokenizer_of(*TEMPLATES["hermes"])
    grammars = Grammars(tokenizer, len(tokenizer) + PADDING, EOS)
    chat = chat_of({"type": "integer", "minimum": 1, "maximum": 9})
    constraint = made(chat, grammars, "user: hi\nassistant: <think>\n")()
    for token in tokenizer.encode("so it is</think>\n\n", add_special_tokens=False):
        assert constraint.mask()[token]
        constraint.take(token)
    assert not constraint.mask()[tokenizer.encode("x", add_special_tokens=False)[0]]
    constraint.take(tokenizer.encode("7", add_special_tokens=False)[0])
    assert constraint.is_complete
    without = made(chat, grammars, "user: hi\nassistant: <think>\n\n</think>\n\n")()
    assert not without.mask()[tokenizer.convert_tokens_to_ids("<think>")]


@pytest.mark.parametrize("family", ["hermes", "hermes without special tokens", "kimi-k2", "qwen-xml"])
def test_strict_tools_leave_text_free_and_bind_calls(family):
    template, marks = TEMPLATES[family]
    tokenizer = tokenizer_of(template, marks)
    strict = Tool("level", "", {"type": "object", "properties": {"a": {"const": 5}}, "required": ["a"]}, strict=True)
    chat = chat_of(tools=(strict,))
    make = made(chat, Grammars(tokenizer, len(tokenizer) + PADDING, EOS))
    free = make()
    for token in [*tokenizer.encode("Just text.", add_special_tokens=False), tokenizer.eos_token_id]:
        assert free.mask()[token]
        free.take(token)
    assert free.is_complete
    required = said(made(chat_of(tools=(strict,), choice=ToolChoice("required")),
                         Grammars(tokenizer, len(tokenizer) + PADDING, EOS), "<think></think>")(),
                    tokenizer, leaning(tokenizer))  # fmt: skip
    bound, text = make(), "So: " + required
    for token in tokenizer.encode(text, add_special_tokens=False):
        bound.take(token)
    assert not bound._has_failed
    wrong = make()
    for token in tokenizer.encode(text.replace("5", "6"), add_special_tokens=False):
        wrong.take(token)
    assert wrong.is_over
    assert not wrong.is_complete


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
    assert math.isfinite(response.elapsed.total_seconds())
