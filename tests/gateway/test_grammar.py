"""Outputs are what schemas say, whatever the model would rather say, and hostile schemas cost little."""

import asyncio
import json
import time
from contextlib import suppress

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from swarm.compute.scheduler import Part
from swarm.compute.thread import run
from swarm.errors import BadRequest
from swarm.gateway.chat import Tool, ToolChoice
from swarm.gateway.generation import Sampling
from swarm.gateway.grammar import GrammarLimits, Grammars
from swarm.gateway.head import Head
from swarm.gateway.sampler import Sampler
from swarm.gateway.schemas import SchemaLimits, closed
from tests.gateway.random_model import EOS, LEANING, PADDING, PLAIN, chat_of, made, said, tokenizer_of, walk

pytestmark = pytest.mark.real_time  # compiling has the product's limit of time

LLAMA3 = ("<|python_tag|>", ("<|python_tag|>",))

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
    ended_by_length = not constraint.is_over
    event(f"ended by the length: {ended_by_length}")
    if ended_by_length:
        return
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


QUIET = settings(suppress_health_check=list(HealthCheck))


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
    assert closed(inner) == {
        "type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False,
    }  # fmt: skip
    assert closed({"type": "array", "items": inner})["items"]["additionalProperties"] is False
    assert closed({"properties": {"properties": {"type": "object"}}})["properties"]["properties"] == {"type": "object"}
    for kept in (
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"allOf": [inner, {"type": "object", "properties": {"c": {}}}]},
        {"enum": [{"properties": {"format": "date"}}]},
    ):
        assert "additionalProperties" not in json.dumps({**closed(kept), "additionalProperties": None})[:-30]


ONE_OF_TWO = [
    {"properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["x"]},
    {"properties": {"y": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["y"]},
]
SPOKEN_OF_TWICE = {
    "branches": {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"], "anyOf": ONE_OF_TWO},
    "one branch": {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"], "oneOf": ONE_OF_TWO},
    "a reference": {
        "$defs": {"base": {"type": "object", **ONE_OF_TWO[0]}}, "$ref": "#/$defs/base", **ONE_OF_TWO[1],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SPOKEN_OF_TWICE)
def test_objects_of_which_several_parts_speak_are_possible(name):
    schema = SPOKEN_OF_TWICE[name]
    assert "additionalProperties" not in json.dumps(closed(schema))
    make, whole = made(chat_of(schema)), 0
    for seed in range(40):
        constraint = make()
        text = said(constraint, seed=seed)
        if constraint.is_complete:
            whole += 1
            jsonschema.validate(json.loads(text), schema)
    assert whole


def assert_has_failed(constraint):
    for _ in range(2):
        with pytest.raises(BadRequest, match="too long to follow"):
            constraint.mask()
    assert constraint.forced() == []
    assert not constraint.is_over
    assert not constraint.is_complete


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


def test_token_that_does_not_fit_fails_the_grammar(capfd):
    constraint = made(chat_of({"type": "integer"}))()
    constraint.take(PLAIN.encode("x", add_special_tokens=False)[0])
    assert_has_failed(constraint)
    constraint.take(0)
    assert "a grammar failed" in "".join(capfd.readouterr())


def test_no_token_is_free_where_a_mask_is_beyond_its_limit():
    limits = GrammarLimits(step_fuel=1, step_items=1)
    constraint = made(chat_of({"type": "string", "pattern": "^(a|b)*c(a|b){9}$"}), limits=limits)()
    with pytest.raises(BadRequest, match="too long to follow"):
        list(walk(constraint, LEANING, 0, 30))
    assert_has_failed(constraint)


def test_failure_among_forced_tokens_is_no_end():
    constraint = made(chat_of(TREE), limits=GrammarLimits(step_fuel=1, step_items=1))()
    constraint.take(PLAIN.encode("{", add_special_tokens=False)[0])
    assert constraint.forced() == []
    assert_has_failed(constraint)


def test_words_that_explain_do_not_count():
    schema = {"type": "integer", "minimum": 7, "maximum": 7, "description": "x" * 100_000, "default": 7}
    assert said(made(chat_of(schema))()) == "7"


def test_strict_tools_whose_calls_have_no_mark_are_refused_where_text_may_come_too():
    tools, llama3 = (Tool("f", "", {"type": "object", "properties": {}}, True),), tokenizer_of(*LLAMA3)
    assert made(chat_of(tools=tools, choice=ToolChoice("required")), llama3) is not None
    with pytest.raises(BadRequest, match="leave strict out"):
        made(chat_of(tools=tools), llama3)


async def test_schemas_that_wait_for_others_are_not_too_slow(monkeypatch):
    grammars = Grammars(PLAIN, len(PLAIN) + PADDING, EOS, GrammarLimits(compile_s=1.0, compilers=1))
    compiled = grammars._compiled

    def slowly(*given):
        time.sleep(0.4)
        return compiled(*given)

    monkeypatch.setattr(grammars, "_compiled", slowly)
    makers = await asyncio.gather(*(grammars.make(chat_of({"type": "integer", "maximum": n}), "") for n in range(5)))
    assert all(makers)


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


def test_schema_without_any_output_is_refused_at_once_or_in_its_call():
    with pytest.raises(BadRequest):
        made(chat_of(ENDLESS))
    constraint = made(chat_of(tools=(Tool("f", "", ENDLESS),), choice=ToolChoice("required")))()
    with pytest.raises(BadRequest):
        said(constraint)
    assert_has_failed(constraint)


class FlatEnds:
    """Ends of a model whose logits are all the same."""

    def logits(self, hidden):
        return torch.zeros(len(hidden), len(LEANING))

    def embed(self, ids, start):
        return torch.zeros(*ids.shape, 4)


@pytest.mark.parametrize("batch", [1, 2])
def test_batch_leaves_no_token_of_a_failed_grammar_free(batch):
    constraint, ends = made(chat_of(tools=(Tool("f", "", ENDLESS),), choice=ToolChoice("required")))(), FlatEnds()
    while tokens := constraint.forced():
        for token in tokens:
            constraint.take(token)
    samplers = [Sampler(Sampling(), [0], grammar) for grammar in (constraint, None)]
    heads = [Head(ends, sampler, torch.zeros(1, 1, 4), 5, "ada") for sampler in samplers[:batch]]
    failed = run([Part(head, 1, None, False) for head in heads])
    assert [type(error) for error in failed.values()] == [BadRequest]
    assert [head.result() is None for head in heads] == [True, False][:batch]


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
    with suppress(BadRequest):  # of compiling, or of a mask
        list(walk(made(chat_of(schema))(), LEANING, 0, 20, EOS))


def test_compiling_is_bounded_in_time_and_work():
    with pytest.raises(BadRequest, match="too long"):
        made(chat_of(TREE), limits=GrammarLimits(compile_s=0.0))
    costly = {"type": "string", "pattern": "(a|b)*a(a|b){200}"}
    small = [{name: 1} for name in ("lexer_fuel", "grammar_symbols", "schema_bytes", "given_bytes")]
    for each in [*small, {"schemas": SchemaLimits(members_max=1)}, {"schemas": SchemaLimits(depth_max=0)}]:
        limits = GrammarLimits(**each)
        with pytest.raises(BadRequest):
            made(chat_of({"type": "object", "properties": {"a": costly, "b": costly}}), limits=limits)
