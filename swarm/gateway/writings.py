"""How families of models write calls, reasoning and answers: the table that grammars of required calls are made from.

A parser takes more forms than these: its marks are in `swarm.gateway.families`.
"""

# ruff: noqa: RUF001 - marks of some families have wide characters

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from swarm.gateway.families import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How a family writes calls.

    begin, end: around all of them. call, end_call: around the arguments of one; `{name}` stands for the tool's name,
    and `{index}` for a number. between: two calls; None where an answer has one only. arguments: how they are written;
    with tags, each is between `key` and `end_value`, with `{key}` and `{kind}` in it. quote: around strings. answer:
    around an answer that is no call. thought: marks around reasoning. behind_thought: text between it and the answer.
    """

    begin: str = ""
    call: str
    end_call: str
    between: str | None = None
    end: str = ""
    arguments: Literal["json", "tags", "gemma", "python"] = "json"
    key: str = ""
    end_value: str = ""
    kinds: Literal["", "flag", "type"] = ""
    quote: str = '"'
    answer: tuple[str, str] = ("", "")
    thought: tuple[str, str] | None = None
    behind_thought: str = ""


_THINK = ("<think>", "</think>")
_BRACKETS = ("[THINK]", "[/THINK]")
_HERMES = Writing(
    call='<tool_call>\n{"name": "{name}", "arguments": ', end_call="}\n</tool_call>", between="\n", thought=_THINK
)

_WRITINGS = {
    "harmony": Writing(
        call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        end_call="",
        answer=("<|channel|>final<|message|>", ""),
        thought=("<|channel|>analysis<|message|>", "<|end|>"),
        behind_thought="<|start|>assistant",
    ),
    "kimi-k3": Writing(
        begin="<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>",
        call='<|open|>call tool="{name}" index="{index}"<|sep|>',
        end_call="<|close|>call<|sep|>",
        between="",
        end="<|close|>tools<|sep|>",
        arguments="tags",
        key='<|open|>argument key="{key}" type="{kind}"<|sep|>',
        end_value="<|close|>argument<|sep|>",
        kinds="type",
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        thought=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    "kimi-k2": Writing(
        begin="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
        end_call="<|tool_call_end|>",
        between="",
        end="<|tool_calls_section_end|>",
        thought=_THINK,
    ),
    "deepseek-dsml": Writing(
        begin="<｜DSML｜tool_calls>\n",
        call='<｜DSML｜invoke name="{name}">\n',
        end_call="</｜DSML｜invoke>",
        between="\n",
        end="\n</｜DSML｜tool_calls>",
        arguments="tags",
        key='<｜DSML｜parameter name="{key}" string="{kind}">',
        end_value="</｜DSML｜parameter>\n",
        kinds="flag",
        thought=_THINK,
    ),
    "deepseek": Writing(
        begin="<｜tool▁calls▁begin｜>",
        call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        end_call="<｜tool▁call▁end｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
        thought=_THINK,
    ),
    "gemma4": Writing(
        call="<|tool_call>call:{name}{",
        end_call="}<tool_call|>",
        between="",
        arguments="gemma",
        quote='<|"|>',
        thought=("<|channel>thought\n", "<channel|>"),
    ),
    "mistral": Writing(call="[TOOL_CALLS]{name}[ARGS]", end_call="", between="", thought=_BRACKETS),
    "glm": Writing(
        call="<tool_call>{name}",
        end_call="</tool_call>",
        between="",
        arguments="tags",
        key="<arg_key>{key}</arg_key><arg_value>",
        end_value="</arg_value>",
        thought=_THINK,
    ),
    "qwen-xml": Writing(
        call="<tool_call>\n<function={name}>\n",
        end_call="</function>\n</tool_call>",
        between="\n",
        arguments="tags",
        key="<parameter={key}>\n",
        end_value="\n</parameter>\n",
        thought=_THINK,
    ),
    "llama4": Writing(begin="[", call="{name}(", end_call=")", between=", ", end="]", arguments="python"),
    "llama3": Writing(call='{"name": "{name}", "parameters": ', end_call="}"),
    "hermes": _HERMES,
    "thinking": _HERMES,
    "plain": _HERMES,
}


def writing_of(family: Family, template: str) -> Writing:
    """Return how a model with this chat template writes calls: a family has older and newer forms."""
    writing = _WRITINGS[family.name]
    match family.name:
        case "deepseek" if "```json" in template:
            writing = replace(
                writing,
                call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
                end_call="\n```<｜tool▁call▁end｜>",
                between="\n",
            )
        case "deepseek-dsml":
            for section in ("function_calls", " calls"):
                if f"{section}>" in template:  # behind the mark, or behind a variable that stands for it
                    writing = _dsml(writing, section)
        case "mistral" if "[ARGS]" not in template:
            writing = replace(
                writing,
                begin="[TOOL_CALLS] [",
                call='{"name": "{name}", "arguments": ',
                end_call="}",
                between=", ",
                end="]",
            )
        case "glm" if "</arg_key><arg_value>" not in template:
            writing = replace(
                writing,
                call="<tool_call>{name}\n",
                key="<arg_key>{key}</arg_key>\n<arg_value>",
                end_value="</arg_value>\n",
                between="\n",
            )
    thought = writing.thought
    if thought in (_THINK, _BRACKETS) and thought[0] not in template and thought[1] not in template:
        writing = replace(writing, thought=_THINK if _THINK[0] in template else None)
    return writing


def _dsml(writing: Writing, section: str) -> Writing:
    """Return the form of another version: its section's name, and a space behind the mark where the name has one."""
    mark = "｜DSML｜ " if section.startswith(" ") else "｜DSML｜"
    changed: Any = {
        each.name: value.replace("｜DSML｜tool_calls", f"｜DSML｜{section}")
        if "tool_calls" in value
        else value.replace("｜DSML｜", mark)
        for each in fields(writing)
        if isinstance(value := getattr(writing, each.name), str)
    }
    return replace(writing, **changed)
