"""Tools of OpenAI's responses: functions, functions in namespaces, and tools that take free text.

The model knows functions alone. A function of a namespace has both names in one, and a tool that takes free text is a
function with one text. The answer has them as they were given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from swarm.errors import BadRequest
from swarm.gateway.api.requests import REQUEST, Given
from swarm.gateway.chat import Tool, ToolChoice

INPUT = "input"  # the parameter of a tool that takes free text


class _Function(Given):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools that the model may call. texts: names of those that take free text. spaces: namespace and name, by name."""

    tools: tuple[Tool, ...] = ()
    texts: frozenset[str] = frozenset()
    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """As the model says them."""
        return {tool.name for tool in self.tools}

    def only(self, names: set[str]) -> "Tools":
        """Return those with these names."""
        return Tools(tuple(tool for tool in self.tools if tool.name in names), self.texts, self.spaces)


def tools_of(given: Sequence[Mapping[str, Any]]) -> Tools:
    """Return the tools of a request. Raises BadRequest."""
    tools: list[Tool] = []
    texts: set[str] = set()
    spaces: dict[str, tuple[str, str]] = {}
    for each in given:
        match each.get("type"):
            case "function":
                tools.append(_tool(each))
            case "custom":
                tools.append(_text_tool(each))
                texts.add(tools[-1].name)
            case "namespace":
                space = str(each.get("name"))
                for inner in _listed(each, "tools"):
                    if inner.get("type") != "function":
                        raise BadRequest("tools", "a namespace has functions")
                    name = spaced(space, str(inner.get("name")))
                    tools.append(_tool({**inner, "name": name}))
                    spaces[name] = (space, str(inner.get("name")))
            case "web_search" | "web_search_preview" | "image_generation" | "tool_search":
                pass  # OpenAI's own programs, which Codex always offers: a model calls them or does not
            case kind:
                raise BadRequest("tools", f"tools of the type {str(kind)[:40]!r} are not supported, only functions")
    if len(tools) > REQUEST.tools_max:
        raise BadRequest("tools", f"there are at most {REQUEST.tools_max}")
    return Tools(tuple(tools), frozenset(texts), spaces)


def spaced(space: str, name: str) -> str:
    """Return the name of a function of a namespace as the model says it."""
    return f"{space}{name}" if space.endswith("__") else f"{space}__{name}"


def choice_of(given: str | Mapping[str, Any] | None, tools: Tools, *, parallel: bool) -> tuple[Tools, ToolChoice]:
    """Return the tools that the model may call, and which of them it must. Raises BadRequest."""
    if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        tools = tools.only({_named(each, tools) for each in _listed(given, "tool_choice")})
        given = str(given.get("mode") or "auto")
    match given:
        case None | "auto":
            return tools, ToolChoice("auto", None, parallel)
        case "none":
            return tools, ToolChoice("none", None, parallel)
        case "required":
            if not tools.tools:
                raise BadRequest("tool_choice", "a call is required, and there are no functions among the tools")
            return tools, ToolChoice("required", None, parallel)
        case Mapping():
            return tools, ToolChoice("required", _named(given, tools), parallel)
    raise BadRequest("tool_choice", "it is auto, none, required or a function")


def _listed(given: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    """Return the tools that a namespace or a choice has. Raises BadRequest."""
    tools = given.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRequest(field, "tools is a list of objects")
    return tools


def _named(given: Mapping[str, Any], tools: Tools) -> str:
    kind, name = given.get("type"), str(given.get("name"))
    if kind not in ("function", "custom"):  # it may be a list or an object, which no set takes
        raise BadRequest("tool_choice", f"tools of the type {str(kind)[:40]!r} are not supported, only functions")
    if given.get("namespace"):
        name = spaced(str(given["namespace"]), name)
    if name not in tools.names:
        raise BadRequest("tool_choice", f"there is no tool {name!r} among the tools")
    return name


def _tool(given: Mapping[str, Any]) -> Tool:
    try:
        function = _Function.model_validate(given)
    except ValidationError:
        raise BadRequest("tools", "a function has a name, a description and parameters") from None
    parameters = function.parameters or {"type": "object", "properties": {}}
    return Tool(function.name, function.description or "", parameters, bool(function.strict))


def _text_tool(given: Mapping[str, Any]) -> Tool:
    """Return a tool that takes free text as a function. Its grammar is told to the model, and not enforced."""
    description = str(given.get("description") or "")
    form = given.get("format") or {}
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        description += f"\nThe input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return Tool(str(given.get("name")), description, parameters, strict=True)
