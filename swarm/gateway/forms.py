"""Grammars of outputs in a family's own form: reasoning if there may be any, then an answer by a schema, or calls.

A grammar is text in llguidance's dialect of Lark. Marks that are special tokens of the model's tokenizer stand in it by
their ids, because text never matches those.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import regex

from swarm.gateway.chat import Tool
from swarm.gateway.values import types_of
from swarm.gateway.writings import Writing


class Forms:
    """Writes grammars for one model."""

    def __init__(self, writing: Writing, specials: Mapping[str, int], calls_max: int) -> None:
        """specials: ids of the tokens that text does not match, by their text. calls_max: in one answer."""
        self._writing = writing
        self._calls_max = calls_max
        self._specials = specials
        found = "|".join(regex.escape(mark) for mark in sorted(specials, key=len, reverse=True))
        self._special = regex.compile(f"({found})" if found else "(?!)")

    def output(self, schema: Mapping[str, Any] | None, tools: Sequence[Tool], prompt: str, *, parallel: bool) -> str:
        """Return the grammar of an answer by a schema, or of calls of these tools, or of either.

        prompt: its end shows how the template has begun.
        """
        writing = self._writing
        choices, rules = [], []
        if schema is not None:
            begin, end = writing.answer
            choices.append(f"{self._begun(begin, prompt)} {_json(schema)} {self._text(end)}")
        if tools:
            more = ""
            if parallel and writing.between is not None:
                more = f"({self._text(writing.between)} call){{0,{self._calls_max - 1}}}"
            choices.append(f"{self._begun(writing.begin, prompt)} call {more} {self._text(writing.end)}")
            rules = self._call_rules(tools)
        thought = self._thought(prompt)
        lines = [f"start: {thought} ({' | '.join(choices)})", *rules]
        if thought:
            assert writing.thought is not None
            lines += ["BLANK: /\\n{0,2}/", *self._until("thought", writing.thought[1])]
        return self._ended(lines)

    def text_or_calls(self, tools: Sequence[Tool]) -> str | None:
        """Return the grammar of text with calls of these tools in it; None where no mark of its own begins a call."""
        writing = self._writing
        mark = regex.match(r"<[^<>\n]+>|\[[A-Z_]+\]", writing.begin + writing.call)
        if mark is None or writing.between is None or writing.answer != ("", ""):
            return None
        opening = mark.group()
        if writing.begin:
            between = self._text(writing.between)
            called = (
                f"{self._text(writing.begin.removeprefix(opening))} call ({between} call)* {self._text(writing.end)}"
            )
        else:
            called = "call"
        thoughts = [self._text(each) for each in writing.thought or () if each in self._specials]
        lines = [
            f"start: (mark {called})* free",
            f"free: TEXT (({' | '.join(thoughts)}) TEXT)*" if thoughts else "free: TEXT",
            *self._until("mark", opening, "free" if thoughts and opening in self._specials else "TEXT"),
            *self._call_rules(tools, without="" if writing.begin else opening),
        ]
        return self._ended(lines)

    # Parts

    def _ended(self, lines: Sequence[str]) -> str:
        """Return a whole grammar from its first rules."""
        return "\n".join([*lines, *self._any_value(), "TEXT: /(.|\\n)*/"]) + "\n"

    def _any_value(self) -> list[str]:
        """Return the rules of any value, in dialects that are not JSON."""
        match self._writing.arguments:
            case "gemma":
                quote = self._writing.quote
                return [
                    'any: gstring | %json {"type": ["number", "boolean", "null"]}',
                    '  | "[" (any ("," any)*)? "]" | "{" (pair ("," pair)*)? "}"',
                    'pair: /[A-Za-z_]\\w*/ ":" any',
                    f"gstring: {self._text(quote)} gstring_end",
                    *self._until("gstring_end", quote),
                ]
            case "python":
                return [
                    'any: %json {"type": ["string", "number"]} | "True" | "False" | "None"',
                    '  | "[" (any (", " any)*)? "]" | "{" (pair (", " pair)*)? "}"',
                    'pair: %json {"type": "string"} ": " any',
                ]
        return []

    def _thought(self, prompt: str) -> str:
        """Return the rule of reasoning before the output: needed where the template has begun it."""
        marks, end, answer = self._writing.thought, prompt.rstrip(), self._writing.answer[0]
        if marks is None or end.endswith(marks[1]) or (answer and end.endswith(answer)):
            return ""
        behind = f"thought BLANK {self._text(self._writing.behind_thought)}"
        if end.endswith(marks[0].rstrip()):
            return behind
        return f"({self._text(marks[0])} {behind})?"

    def _begun(self, text: str, prompt: str) -> str:
        """Return the rest of a text whose beginning may be the prompt's end."""
        for length in range(len(text), 0, -1):
            if prompt.endswith(text[:length]):
                return self._text(text[length:])
        return self._text(text)

    def _text(self, text: str) -> str:
        """Return Lark that matches a text, with its special tokens."""
        parts = [part for part in self._special.split(text) if part]
        return " ".join(f"<[{self._specials[part]}]>" if part in self._specials else json.dumps(part) for part in parts)

    def _until(self, name: str, mark: str, before: str = "TEXT") -> list[str]:
        """Return rules for text up to a mark, and the mark."""
        first, *rest = [part for part in self._special.split(mark) if part]
        if first in self._specials:
            return [f"{name}: {before} {self._text(mark)}"]
        return [f"{name}: {name}_lazy {self._text(''.join(rest))}", f"{name}_lazy[lazy]: TEXT {json.dumps(first)}"]

    # Calls

    def _call_rules(self, tools: Sequence[Tool], without: str = "") -> list[str]:
        """Return the rules of calls. without: a mark that has been matched before them."""
        rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
        for index, tool in enumerate(tools):
            rules += self._call(f"call_{index}", tool, without)
        if "{index}" in self._writing.call:
            rules.append("INDEX: /[0-9]{1,2}/")
        return rules

    def _call(self, rule: str, tool: Tool, without: str) -> list[str]:
        """Return the rules of one tool's call."""
        writing = self._writing
        before, _, behind = writing.call.removeprefix(without).replace("{name}", tool.name).partition("{index}")
        begin = self._text(before) + (f" INDEX {self._text(behind)}" if "{index}" in writing.call else "")
        if writing.arguments == "json":
            arguments = _json(tool.parameters, lenient=not tool.strict)
            return [f"{rule}: {begin} {arguments} {self._text(writing.end_call)}"]
        shared = {word: tool.parameters[word] for word in ("$defs", "definitions") if word in tool.parameters}
        body, rules = self._members(rule, tool.parameters, shared, self._argument)
        return [f"{rule}: {begin} {body} {self._text(writing.end_call)}", *rules]

    def _members(
        self, rule: str, schema: Mapping[str, Any], shared: Mapping[str, Any], member: Callable[..., list[str]]
    ) -> tuple[str, list[str]]:
        """Return Lark that matches an object's properties in their order, and the rules of each."""
        given = schema.get("properties")
        properties: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        required = set(schema.get("required") or ())
        names, rules = [], []
        for index, (key, value) in enumerate(properties.items()):
            name = f"{rule}_{index}"
            rules += member(name, key, value, shared)
            names.append((name, key in required))
        if self._writing.arguments == "tags":
            return " ".join(name if is_required else f"{name}?" for name, is_required in names), rules
        return f"{rule}_first_0", rules + _separated(rule, names, self._comma)

    @property
    def _comma(self) -> str:
        return '","' if self._writing.arguments == "gemma" else '", "'

    def _argument(self, rule: str, key: str, schema: object, shared: Mapping[str, Any]) -> list[str]:
        """Return the rules of one argument, its key included."""
        writing, types = self._writing, types_of(schema)
        if writing.arguments != "tags":
            between = ":" if writing.arguments == "gemma" else "="
            return [f"{rule}: {json.dumps(key + between)} {rule}_value", *self._value(f"{rule}_value", schema, shared)]
        is_text = "string" in types
        kind = {"flag": "true" if is_text else "false", "type": _kind(types)}.get(writing.kinds, "")
        begin = self._text(writing.key.replace("{key}", key).replace("{kind}", kind))
        if not is_text:
            return [f"{rule}: {begin} {_json(schema, shared, lenient=True)} {self._text(writing.end_value)}"]
        words = _words(schema)
        if words:
            return [f"{rule}: {begin} ({words}) {self._text(writing.end_value)}"]
        return [f"{rule}: {begin} {rule}_end", *self._until(f"{rule}_end", writing.end_value)]

    # Dialects that are not JSON. Unions, references and patterns are not enforced: any value is taken for them.

    def _pair(self, rule: str, key: str, schema: object, shared: Mapping[str, Any]) -> list[str]:
        written = f"{key}:" if self._writing.arguments == "gemma" else json.dumps(key) + ": "
        return [f"{rule}: {json.dumps(written)} {rule}_value", *self._value(f"{rule}_value", schema, shared)]

    def _value(self, rule: str, schema: object, shared: Mapping[str, Any]) -> list[str]:
        """Return the rules of a value."""
        types = types_of(schema)
        if not isinstance(schema, Mapping) or len(types) != 1:
            return [f"{rule}: any"]
        is_gemma = self._writing.arguments == "gemma"
        match types.pop():
            case "string" if is_gemma:
                quote, words = self._text(self._writing.quote), _words(schema)
                return [f"{rule}: {quote} ({words}) {quote}" if words else f"{rule}: gstring"]
            case "boolean" | "null" as kind if not is_gemma:
                return [f"{rule}: " + ('"True" | "False"' if kind == "boolean" else '"None"')]
            case "array":
                return self._list(rule, schema, shared)
            case "object" if schema.get("properties"):
                body, rules = self._members(rule, schema, shared, self._pair)
                return [f'{rule}: "{{" {body} "}}"', *rules]
            case "object":
                return [f'{rule}: "{{" (pair ({self._comma} pair)*)? "}}"']
        return [f"{rule}: {_json(schema, shared, lenient=True)}"]

    def _list(self, rule: str, schema: Mapping[str, Any], shared: Mapping[str, Any]) -> list[str]:
        least, most = schema.get("minItems") or 0, schema.get("maxItems")
        times = f"{{{max(0, least - 1)},{'' if most is None else max(0, most - 1)}}}"
        body = f"{rule}_item ({self._comma} {rule}_item){times}"
        if most == 0:
            return [f'{rule}: "[]"']
        if least == 0:
            body = f"({body})?"
        return [f'{rule}: "[" {body} "]"', *self._value(f"{rule}_item", schema.get("items"), shared)]


def _words(schema: object) -> str:
    """Return Lark that matches the strings of an enumeration; "" where it is none."""
    words = schema.get("enum") if isinstance(schema, Mapping) else None
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        return ""
    return " | ".join(json.dumps(word) for word in words)


def _separated(rule: str, values: Sequence[tuple[str, bool]], comma: str) -> list[str]:
    """Return rules for values in their order, with commas between those that are there."""
    rules = [f'{rule}_first_{len(values)}: ""', f'{rule}_next_{len(values)}: ""']
    for index, (name, is_required) in enumerate(values):
        for state, before in (("first", ""), ("next", comma)):
            without = "" if is_required else f" | {rule}_{state}_{index + 1}"
            rules.append(f"{rule}_{state}_{index}: {before} {name} {rule}_next_{index + 1}{without}")
    return rules


def _json(schema: object, shared: Mapping[str, Any] | None = None, *, lenient: bool = False) -> str:
    """Return Lark that matches JSON by a schema. lenient: words of it that cannot be enforced are left out."""
    whole = {**(shared or {}), **schema} if isinstance(schema, Mapping) else {}
    # with flexible blanks, small models fill their answers with blanks
    style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
    return "%json " + json.dumps({**whole, "x-guidance": {**style, "lenient": lenient}})


def _kind(types: set[str]) -> str:
    named = types - {"null"} or types
    kind = named.pop() if len(named) == 1 else "string" if "string" in named else "object"
    return "number" if kind == "integer" else kind
