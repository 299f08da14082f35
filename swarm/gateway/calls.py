"""Reads calls of tools as models write them: JSON, tagged parameters, Gemma's objects, or Python's calls.

A reader takes the text behind the mark that opens a call, as often as there is more of it, and goes on where it was: a
call of 100 kB costs one pass. Its verdict is the end of the call and its content, or no content where it is broken.
"""

import ast
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import regex
from regex import Pattern

from swarm.gateway.parts import Called, called, new_id
from swarm.gateway.values import typed
from swarm.limits import limit

Schemas = Mapping[str, Mapping[str, Any]]
"""Parameters of all tools, by name."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Bounds of a call that a model writes."""

    depth_max: int = limit(200, "levels", "a call that nests deeper is text, because Python's own parsers recurse")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A call ends at `end`. calls: none where it is broken, and is text."""

    end: int
    calls: tuple[Called, ...]


class Reader(Protocol):
    """Reads one call."""

    def read(self, text: str, *, ended: bool) -> Verdict | None:
        """Return a verdict on the text so far; None where more is needed. ended: there is no more."""
        ...


@dataclass(frozen=True, slots=True)
class Nested:
    """A form whose calls are nested brackets.

    opening: the mark up to the first bracket; its groups `name` and `id` have the parts outside it. closing: the mark
    behind. dialect: how values are written. bare: no mark opens the call, so it must name a tool, and be where text
    would begin. id_length: characters of an id, where the family's templates take no other length.
    """

    opening: Pattern[str]
    closing: Pattern[str]
    dialect: Literal["json", "gemma", "python"] = "json"
    bare: bool = False
    id_length: int | None = None


@dataclass(frozen=True, slots=True)
class Tagged:
    """A form whose calls are tagged parameters.

    opening: up to the first parameter; group `name`, and `empty` for a call that is over with it. key: a parameter's
    beginning; group `key`, and `kind` where the model says a value's type. value_end: the end of its value. end: the
    call's end. cut_value_end: ends a value, too, at the end of the output. cut_end: ends a call where the rest of
    its end is missing. newline: a line break before a value is none of it. escapes: names and keys are written
    as in HTML.
    """

    opening: Pattern[str]
    key: Pattern[str]
    value_end: Pattern[str]
    end: Pattern[str]
    cut_value_end: Pattern[str] | None = None
    cut_end: Pattern[str] | None = None
    newline: bool = False
    escapes: bool = False


Form = Nested | Tagged


def reader_of(form: Form, groups: Mapping[str, str | None], tools: Schemas) -> Reader:
    """Return a reader for the text behind a mark that has these groups."""
    if isinstance(form, Tagged):
        return _TaggedReader(form, groups, tools)
    return _NestedReader(form, groups, tools)


# --- nested brackets -------------------------------------------------------------------------------------------------


class _NestedReader:
    _marks: ClassVar[Mapping[str, Pattern[str]]] = {  # outside strings, by dialect
        "json": regex.compile(r'[{}\[\]"]'),
        "python": regex.compile(r"""[{}\[\]()"']"""),
        "gemma": regex.compile(r'[{}\[\]]|<\|"\|>'),
    }
    _ends: ClassVar[Mapping[str, Pattern[str]]] = {  # of strings, by their beginning
        '"': regex.compile(r'["\\]'),
        "'": regex.compile(r"['\\]"),
        '<|"|>': regex.compile(r'<\|"\|>'),
    }

    def __init__(self, form: Nested, groups: Mapping[str, str | None], tools: Schemas) -> None:
        self._form = form
        self._groups = groups
        self._tools = tools
        self._at = 0
        self._depth = 0
        self._quote = ""
        self._end: int | None = None  # of the brackets

    def read(self, text: str, *, ended: bool) -> Verdict | None:
        if self._depth == 0 and text.strip()[:1] not in {"", "{", "["}:
            return Verdict(0, ())
        if self._end is None:
            self._end = self._brackets_end(text)
        if self._end is None:
            return Verdict(_first(self._form.closing, text), ()) if ended else None
        behind = self._form.closing.match(text, self._end, partial=not ended)
        if behind is not None and behind.partial and behind.end() == len(text) and not ended:
            return None
        end = behind.end() if behind is not None else self._end
        return Verdict(end, self._calls(text[: self._end]))

    def _brackets_end(self, text: str) -> int | None:
        while self._at < len(text):
            wanted = self._ends[self._quote] if self._quote else self._marks[self._form.dialect]
            found = wanted.search(text, self._at, partial=True)
            if found is None or found.partial:
                self._at = len(text) if found is None else found.start()
                return None
            mark, self._at = found.group(), found.end()
            if mark == "\\":
                if self._at == len(text):
                    self._at -= 1
                    return None
                self._at += 1
            elif self._quote or mark in self._ends:
                self._quote = "" if self._quote else mark
            elif mark in "{[(":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        return None

    def _calls(self, body: str) -> tuple[Called, ...]:
        try:
            value = _read(body, self._form.dialect)
            if self._form.dialect == "python":
                calls = [_called(name, arguments, None) for name, arguments in value]
            else:
                calls = _calls_in(value, self._groups)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return ()
        if self._form.bare and not all(call.name in self._tools for call in calls):
            return ()
        length = self._form.id_length
        return tuple(call if length in {None, len(call.id)} else replace(call, id=call.id[-length:]) for call in calls)


def _first(closing: Pattern[str], text: str) -> int:
    """Return where the first closing mark ends; the whole length where there is none, or where it is optional."""
    found = None if closing.match("") else closing.search(text)
    return len(text) if found is None else int(found.end())


def _calls_in(value: Any, groups: Mapping[str, str | None]) -> list[Called]:  # noqa: ANN401 - JSON
    """Return the calls of a JSON value. Raises ValueError where it is none."""
    name, call_id = groups.get("name"), groups.get("id")
    if name is None and call_id is not None:  # the id says the name: functions.NAME:INDEX
        name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id
    if name is not None:
        return [_called(name, value, call_id)]
    calls = []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict):
            raise ValueError("a call is an object")
        inner: dict[str, Any] = each["function"] if isinstance(each.get("function"), dict) else each
        arguments = inner.get("arguments", inner.get("parameters", {}))
        calls.append(_called(inner.get("name"), arguments, each.get("id")))
    return calls


def _called(name: Any, arguments: Any, call_id: Any) -> Called:  # noqa: ANN401 - JSON
    if isinstance(arguments, str):
        arguments = json.loads(arguments, strict=False)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    own = call_id if isinstance(call_id, str) and call_id else new_id()
    return called(own, name, arguments)


def _read(body: str, dialect: str) -> Any:  # noqa: ANN401 - JSON
    """Return the value that nested brackets write. Raises ValueError, SyntaxError or RecursionError."""
    if dialect == "gemma":
        return _Gemma(body).value()
    if dialect == "python":
        return _python_calls(body)
    return json.loads(body, strict=False)


class _Gemma:
    """Reads Gemma's objects: keys and words without quotation marks, strings between <|"|>."""

    _quote = '<|"|>'
    _word = regex.compile(r"[^,{}\[\]]*")
    _space = regex.compile(r"\s*")

    def __init__(self, text: str, limits: CallLimits | None = None) -> None:
        self._limits = limits or CallLimits()
        self._text = text
        self._at = 0
        self._depth = 0

    def value(self) -> Any:  # noqa: ANN401 - JSON
        self._skip()
        if self._takes(self._quote):
            return self._until(self._quote)
        if self._takes("{"):
            return dict(self._items("}", self._pair))
        if self._takes("["):
            return self._items("]", self.value)
        word = self._word.match(self._text, self._at)
        assert word is not None
        self._at = word.end()
        try:
            return json.loads(word.group())
        except ValueError:
            return word.group().strip()

    def _pair(self) -> tuple[str, Any]:
        self._skip()
        if self._takes(self._quote):
            key = self._until(self._quote)
            self._skip()
            if not self._takes(":"):
                raise ValueError("a key has a value")
        else:
            key = self._until(":").strip().strip('"')
        return key, self.value()

    def _items(self, end: str, item: Any) -> list[Any]:  # noqa: ANN401 - either of two methods
        self._depth += 1
        if self._depth > self._limits.depth_max:
            raise ValueError("too deep")
        items: list[Any] = []
        while True:
            self._skip()
            if self._takes(end):
                self._depth -= 1
                return items
            items.append(item())
            self._skip()
            if not self._takes(",") and not self._text.startswith(end, self._at):
                raise ValueError("an item ends with a comma")

    def _skip(self) -> None:
        space = self._space.match(self._text, self._at)
        assert space is not None
        self._at = space.end()

    def _takes(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _until(self, mark: str) -> str:
        end = self._text.index(mark, self._at)
        taken, self._at = self._text[self._at : end], end + len(mark)
        return taken


def _python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return name and arguments of calls in a list: [f(a=1), g()]. Raises ValueError or SyntaxError."""
    tree = ast.parse(text.strip(), mode="eval").body
    calls = []
    for each in tree.elts if isinstance(tree, ast.List) else []:
        if not isinstance(each, ast.Call) or each.args:
            raise ValueError("a list of calls with names for all arguments")
        arguments = {word.arg: ast.literal_eval(word.value) for word in each.keywords if word.arg is not None}
        calls.append((ast.unparse(each.func), arguments))
    return calls


# --- tagged parameters -----------------------------------------------------------------------------------------------


class _TaggedReader:
    def __init__(self, form: Tagged, groups: Mapping[str, str | None], tools: Schemas) -> None:
        self._form = form
        self._name = self._plain(groups.get("name") or "")
        self._is_over = bool(groups.get("empty"))
        self._types: Mapping[str, Any] = {}
        properties = tools.get(self._name, {}).get("properties")
        if isinstance(properties, Mapping):
            self._types = properties
        self._at = 0  # text before it is read
        self._seen = 0  # where a value's end may be
        self._key: tuple[str, str | None] | None = None  # the parameter whose value comes
        self._arguments: dict[str, Any] = {}

    def read(self, text: str, *, ended: bool) -> Verdict | None:
        while not self._is_over:
            moved = self._value(text, ended) if self._key is not None else self._next(text, ended)
            if moved is not True:
                return moved
        return Verdict(self._at, self._whole())

    def _whole(self) -> tuple[Called, ...]:
        try:
            return (_called(self._name, self._arguments, None),)
        except ValueError:
            return ()

    def _next(self, text: str, ended: bool) -> Verdict | Literal[True] | None:
        """Read the beginning of a parameter, or the call's end. Returns True if either is there."""
        form, waits = self._form, False
        for pattern in (form.key, form.end):
            found = pattern.match(text, self._at, partial=not ended)
            if found is not None and not found.partial:
                self._at = self._seen = found.end()
                if pattern is form.key:
                    self._key = (self._plain(found["key"]), found.groupdict().get("kind"))
                self._is_over = pattern is form.end
                return True
            waits = waits or found is not None
        if waits:
            return None
        found = form.cut_end.match(text, self._at) if form.cut_end is not None else None
        if found is not None:
            self._at, self._is_over = found.end(), True
            return True
        return Verdict(len(text) if ended else self._at, ())

    def _value(self, text: str, ended: bool) -> Verdict | Literal[True] | None:
        """Read a value. Returns True if its end is there."""
        found = self._form.value_end.search(text, self._seen, partial=not ended)
        if found is None and ended and self._form.cut_value_end is not None:
            found = self._form.cut_value_end.search(text, self._seen)
        if found is None or found.partial:
            if ended:
                return Verdict(len(text), ())
            self._seen = len(text) if found is None else found.start()
            return None
        assert self._key is not None
        key, kind = self._key
        value = text[self._at : found.start()]
        if self._form.newline:
            value = value.removeprefix("\n")
        self._arguments[key] = typed(value, kind, self._types.get(key))
        self._at, self._key = found.end(), None
        return True

    def _plain(self, name: str) -> str:
        return html.unescape(name) if self._form.escapes else name
