"""Reasoning and calls are taken out of an output, in pieces of any length, and nothing of it is lost."""

# ruff: noqa: RUF001 - marks of some families have wide characters

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.gateway.chat import Chat, Tool, ToolChoice
from swarm.gateway.families import FAMILIES, family_of
from swarm.gateway.parsing import FamilyParser, parser_for
from swarm.gateway.parts import Called, Mark, Thought
from tests.gateway.random_model import tokenizer_of

TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}, "g": {}}
WHOLE = 1 << 30


def parts_of(parser, text, size=WHOLE):
    parts = [part for start in range(0, len(text), size) for part in parser.feed(text[start : start + size])]
    return parts + list(parser.close())


def merged(parts):
    """(thought, text, calls) of an output."""
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    text = "".join(part for part in parts if isinstance(part, str))
    calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Called)]
    return thought, text, calls


def read(template, text, *, prompt="", size=WHOLE, tools=TOOLS):
    return merged(parts_of(FamilyParser(family_of(template), prompt, tools), text, size))


CASES = {  # template, output, thought, text, calls
    "hermes": (
        "<think><tool_call>",
        '<think>\nhm\n</think>\n\nSo:\n<tool_call>\n{"name": "f", "arguments": {"s": "</tool_call>"}}\n</tool_call>\n',
        ("hm", "So:", [("f", {"s": "</tool_call>"})]),
    ),
    "a list of calls, as SmolLM2 writes them": (
        "<tool_call>",
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_call>',
        ("", "", [("f", {"a": 1}), ("g", {})]),
    ),
    "arguments as text": (
        "<tool_call>",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", "", [("f", {"a": 1})]),
    ),
    "qwen-xml": (
        "<function=<parameter=",
        "ok<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n</parameter> x\n</parameter>\n"
        "</function>\n</tool_call>",
        ("", "ok", [("f", {"a": 1, "s": "</parameter> x"})]),
    ),
    "gemma4": (
        "<|tool_call>",
        '<|channel>thought\nhm<channel|>hi<|tool_call>call:f{s:<|"|>}<|"|>,a:[1,{b:null}]}<tool_call|>',
        ("hm", "hi", [("f", {"s": "}", "a": [1, {"b": None}]})]),
    ),
    "llama3": ("<|python_tag|>", ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        ("", "", [("f", {"a": 1}), ("g", {})])),
    "llama3 with its tag": (
        "<|python_tag|>", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', ("", "", [("f", {})]),
    ),
    "llama4": ("<|header_start|>", "[f(a=1, s='x'), g()]", ("", "", [("f", {"a": 1, "s": "x"}), ("g", {})])),
    "mistral": (
        "[TOOL_CALLS]", '[THINK]hm[/THINK]ok[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        ("hm", "ok", [("f", {"a": 1}), ("g", {})]),
    ),
    "mistral before v11": (
        "[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', ("", "", [("f", {"a": 1})]),
    ),
    "deepseek v3": (
        "<｜tool▁calls▁begin｜>",
        "<think>hm</think>ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("hm", "ok", [("f", {"a": 1}), ("g", {})]),
    ),
    "deepseek v3.2": (
        "｜DSML｜",
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">7'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ("", "", [("f", {"s": "7"})]),
    ),
    "glm": (
        "<arg_key>",
        "\n<think>hm</think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>s</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
        ("hm", "", [("f", {"a": 1, "s": "2"}), ("g", {})]),
    ),
    "kimi": (
        "<|tool_call_begin|>",
        "ok <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"s": "<|tool_call_end|>"}<|tool_call_end|><|tool_calls_section_end|>',
        ("", "ok ", [("f", {"s": "<|tool_call_end|>"})]),
    ),
    "kimi k3": (
        "<|open|><|sep|>",
        '<|open|>response<|sep|>ok<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="g" index="2"<|sep|><|open|>json type="object"<|sep|>{}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        ("", "ok", [("f", {"a": 1}), ("g", {})]),
    ),
    "harmony": (
        "<|channel|><|message|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>final<|message|>done',
        ("hm", "done", [("f", {"a": 1})]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, WHOLE])
@pytest.mark.parametrize("case", CASES)
def test_family_is_read_in_pieces_of_any_length(case, size):
    template, text, expected = CASES[case]
    assert read(template, text, size=size) == expected


@pytest.mark.parametrize("opened", ["<think>", "<think>\n"])
def test_reasoning_that_the_template_began_is_reasoning(opened):
    assert read("<think>", "hm\n</think>\n\nyes", prompt="user: hi\n" + opened) == ("hm", "yes", [])
    assert read("<think>", "hm", prompt=opened) == ("hm", "", [])
    assert read("<think>", "yes", prompt=opened + "\n</think>\n\n") == ("", "yes", [])


QUOTED = [
    ("<think>ok</think>\n\nPut `<think>` first, `</think>` last.", "ok", "Put `<think>` first, `</think>` last."),
    ('{"tag": "<think>", "n": 1}', "", '{"tag": "<think>", "n": 1}'),
    ("\n <think>ok</think>yes", "ok", "yes"),
]


@pytest.mark.parametrize("size", [1, 3, WHOLE])
@pytest.mark.parametrize("template", ["<think>", "<think><tool_call>", "<arg_key>", "[TOOL_CALLS]"])
def test_mark_that_an_answer_quotes_is_text(template, size):
    for text, thought, said in QUOTED:
        assert read(template, text, size=size) == (thought, said, [])
        assert read(template, text, size=size, tools=None) == (thought, said, [])


@pytest.mark.parametrize("size", [1, 3, WHOLE])
def test_reasoning_begins_behind_a_call_and_behind_reasoning(size):
    call = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    text = f"<think>a</think>\n<think>b</think>ok\n{call}\n\n<think>c</think>\n{call}<think>d</think>`<think>`"
    assert read("<think><tool_call>", text, size=size) == ("abcd", "ok`<think>`", [("g", {})] * 2)
    assert read("[TOOL_CALLS]", "ok [THINK]hm[/THINK] yes", size=size) == ("hm", "ok yes", [])


def test_ids_are_those_of_the_family_or_random():
    kimi = parts_of(FamilyParser(family_of("<|tool_call_begin|>"), "", TOOLS), CASES["kimi"][1])
    assert [part.id for part in kimi if isinstance(part, Called)] == ["functions.f:0"]
    mistral = '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}'
    assert parts_of(FamilyParser(family_of("[TOOL_CALLS]"), "", TOOLS), mistral)[0].id == "123456789"
    without = mistral.replace("[CALL_ID]123456789", "")
    assert len(parts_of(FamilyParser(family_of("[TOOL_CALLS]"), "", TOOLS), without)[0].id) == 9
    hermes = parts_of(FamilyParser(family_of("<tool_call>"), "", TOOLS), CASES["hermes"][1].partition("</think>")[2])
    assert hermes[-1].id.startswith("call_")
    assert len(hermes[-1].id) == 29


def test_texts_of_calls_are_those_that_utf8_can_have():
    half, whole = r"\ud83d", r"\ud83d\ude00"
    (call,) = parts_of(
        FamilyParser(family_of("<tool_call>"), "", TOOLS),
        f'<tool_call>{{"name": "f{half}", "id": "{half}", "arguments": {{"{half}": "{half}x{whole}"}}}}</tool_call>',
    )
    assert (call.id, call.name, json.loads(call.arguments)) == ("\ufffd", "f\ufffd", {"\ufffd": "\ufffdx\U0001f600"})
    assert read("<|header_start|>", f"[f(s='{half}{whole}')]") == ("", "", [("f", {"s": "\ufffd\U0001f600"})])
    tokenizer = tokenizer_of("no marks")
    tokenizer.response_template = SHIPPED
    chat = Chat(model="m", messages=[], tools=(Tool("f", "", TOOLS["f"]),))
    for arguments in (f'{{"s": "{half}"}}', f'"{{\\"s\\": \\"\\{half}\\"}}"'):
        (call,) = parts_of(parser_for(tokenizer, chat, ""), f'<c>{{"name": "f", "arguments": {arguments}}}</c>')
        assert call.arguments == '{"s": "\ufffd"}'


BROKEN = {
    "<tool_call>": [
        "<tool_call>not JSON</tool_call> and more",
        '<tool_call>{"name": "f"</tool_call> and more',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call> and more',
        '<tool_call>{"name": "f", "arguments": 7}</tool_call> and more',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call> and more',
        '<tool_call>{"name": "f", "arguments": {"s": "cut',
        "<tool_call>" + "[" * 100_000,
    ],
    "<function=<parameter=": ["<tool_call>\n<function=f>\n<parameter=a>\n1", "<function=f>junk</function> and more"],
    "<|tool_call>": ["<|tool_call>call:f no braces<tool_call|> and more", '<|tool_call>call:f{s:<|"|>cut'],
    "<|python_tag|>": ['{"name": "unknown", "parameters": {}} and more', '{"answer": 42}', '{"name": "f", "par'],
    "<|header_start|>": [
        "[f(1)]",
        "[f(a=b)]",
        "[f(a={1,2})]",
        "[f(a={[1]:2})]",
        "[f(a=1",
        "[unknown(a=1)]",
        "[" + "f(a=" * 3000 + ")" * 3000 + "]",
    ],
    "[TOOL_CALLS]": ["[TOOL_CALLS] no call", '[TOOL_CALLS]f[ARGS]{"a": '],
    "<arg_key>": ["<tool_call>f<arg_key>a</arg_key><arg_value>1", "<tool_call>a < b and more"],
}


@pytest.mark.parametrize("size", [1, 3, WHOLE])
@pytest.mark.parametrize(("template", "text"), [(template, text) for template in BROKEN for text in BROKEN[template]])
def test_broken_call_is_text(template, text, size):
    if len(text) > 10_000:
        size = max(size, 1000)
    assert read(template, text, size=size) == ("", text, [])


def test_call_behind_a_broken_one_is_a_call():
    text = 'a <tool_call>{]</tool_call> b <tool_call>{"name": "g", "arguments": {}}</tool_call> c'
    for size in (1, 3, WHOLE):
        assert read("<tool_call>", text, size=size) == ("", "a <tool_call>{]</tool_call> b c", [("g", {})])


def test_without_tools_calls_are_text():
    text = '<think>hm</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read("<think><tool_call>", text, tools=None) == ("hm", text.partition("</think>")[2], [])


MARKS = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', "<function=f>",
        "<parameter=a>", "\n1\n", "</parameter>", "</function>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>",
        "[TOOL_CALLS]", "f[ARGS]", "[THINK]", "[/THINK]", "<|tool_call>", "call:f{a:1}", "<tool_call|>", '<|"|>',
        "<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>assistant", " to=functions.f", "[g()]",
        "<|python_tag|>", ";", " ", "\n", "x", '"', "\\", "{", "}",
    ]
)  # fmt: skip


OPENED = [(family, "") for family in FAMILIES]
OPENED += [(family, begun) for family in FAMILIES if family.thought is not None for begun in family.thought.opened]


@settings(max_examples=300)
@given(st.lists(MARKS, max_size=12), st.sampled_from(OPENED), st.integers(1, 7))
def test_pieces_make_no_difference_and_words_are_kept(marks, opened, size):
    text, (family, prompt) = "".join(marks), opened
    whole = merged(parts_of(FamilyParser(family, prompt, TOOLS), text))
    assert merged(parts_of(FamilyParser(family, prompt, TOOLS), text, size)) == whole
    thought, said, calls = whole
    assert (thought + said).count("x") >= text.count("x") or calls


def test_parser_is_chosen_by_the_template():
    tool = Tool("f", "", TOOLS["f"])
    chat = Chat(model="m", messages=[], tools=(tool,))
    assert parser_for(tokenizer_of("no marks"), Chat(model="m", messages=[]), "") is None
    assert parser_for(tokenizer_of("no marks"), chat, "") is not None
    assert parser_for(tokenizer_of("<think>"), Chat(model="m", messages=[]), "") is not None
    never = Chat(model="m", messages=[], tools=(tool,), tool_choice=ToolChoice("none"))
    assert parser_for(tokenizer_of("<tool_call>"), never, "").feed('<tool_call>{"n') == ['<tool_call>{"n']


SHIPPED = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<r>", "close": "</r>"},
        "tool_calls": {
            "open": "<c>",
            "close": "</c>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}


@pytest.mark.parametrize("size", [1, 3, WHOLE])
def test_unknown_family_is_read_by_the_template_that_it_ships(size, capfd):
    tokenizer = tokenizer_of("no marks")
    tokenizer.response_template = SHIPPED
    chat = Chat(model="m", messages=[], tools=(Tool("f", "", TOOLS["f"]),))
    text = '<r>hm</r>a<c>{"name": "f", "arguments": {"a": 1}}</c>'
    assert merged(parts_of(parser_for(tokenizer, chat, ""), text, size)) == ("hm", "a", [("f", {"a": 1})])
    kinds = [type(part) for part in parts_of(parser_for(tokenizer, chat, ""), text)]
    assert kinds == [Thought, Mark, str, Called]
    thought, said, calls = merged(parts_of(parser_for(tokenizer, chat, ""), "a<c>{broken}</c> b", size))
    assert (thought, calls) == ("", [])
    assert "{broken}" in said
    log = "".join(capfd.readouterr())
    assert "does not fit" in log
    assert "broken" not in log  # it is the answer's text
    assert said.endswith(" b")
