"""Takes reasoning and tool calls out of an output's text, as the model's family writes them.

The parser is one machine for all families: it looks for the next mark, holds text back that may become one, and hands
the text of a call to a reader. Broken and incomplete calls are text in the end: no text of the model is lost, only
marks and the blanks around them. Output in pieces of any length gives the same as in one.
"""

from collections.abc import Generator, Iterator, Sequence
from functools import lru_cache
from typing import Literal

import regex
from regex import Match, Pattern
from transformers import PreTrainedTokenizerBase

from swarm.gateway.calls import Nested, Reader, Schemas, reader_of
from swarm.gateway.chat import Chat
from swarm.gateway.families import FAMILIES, Family, family_of, template_of
from swarm.gateway.parts import Called, Mark, OutputParser, Parsed, Thought
from swarm.gateway.shipped import ShippedParser


def parser_for(tokenizer: PreTrainedTokenizerBase, chat: Chat, prompt: str) -> OutputParser | None:
    """Return a parser for one output of this model; None where there is nothing to take out.

    prompt: the rendered conversation; its end shows whether the template has begun the reasoning.
    """
    family = family_of(template_of(tokenizer))
    takes_calls = bool(chat.tools) and chat.tool_choice.mode != "none"
    if family.is_guess and getattr(tokenizer, "response_template", None):
        return ShippedParser(tokenizer, prompt, chat.tools if takes_calls else ())
    if family.thought is None and family.drops is None and not takes_calls:
        return None
    tools = {tool.name: tool.parameters for tool in chat.tools}
    return FamilyParser(family, prompt, tools if takes_calls else None)


class FamilyParser:
    """Parses the output of one family's model."""

    reads_special = True

    def __init__(self, family: Family, prompt: str, tools: Schemas | None) -> None:
        """prompt: its end shows whether reasoning has begun. tools: parameters by name; None where calls are text."""
        self._family = family
        self._tools = tools or {}
        self._takes_calls = tools is not None
        opened = family.thought.opened if family.thought is not None else ()
        self._thinks = bool(opened) and prompt.rstrip().endswith(opened)
        self._text = ""  # not decided yet
        self._blanks = ""  # behind the last text: they may belong to a mark
        self._had_mark = self._thinks
        self._is_fresh = True  # nothing has been said since the beginning or the last mark
        self._strips = self._thinks  # blanks at the beginning belong to the mark before
        self._may_be_bare = self._takes_calls  # a call without a mark can begin here
        self._reader: Reader | None = None
        self._opening = ""  # of the call that is read

    def feed(self, text: str) -> list[Parsed]:
        """Take more of the output. Returns the parts that it completes."""
        self._text += text
        return list(self._parts(ended=False))

    def close(self) -> list[Parsed]:
        """Return the parts that are held back, at the end of the output."""
        cut = self._family.cut
        if self._reader is None and cut is not None and self._takes_calls and cut.fullmatch(self._text):
            self._text = ""
            parts = [*self._before_mark(belongs=self._family.trims), Mark()]
        else:
            parts = list(self._parts(ended=True))
        blanks, self._blanks = self._blanks, ""
        if blanks and not (self._is_fresh and self._had_mark):
            parts.append(self._as_part(blanks))
        return parts

    # The machine

    def _parts(self, *, ended: bool) -> Iterator[Parsed]:
        while self._text or self._reader is not None:
            if self._reader is not None:
                verdict = self._reader.read(self._text, ended=ended)
                if verdict is None:
                    return
                yield from self._judged(verdict.end, verdict.calls)
            elif not (yield from self._next_mark(ended=ended)):
                return

    def _judged(self, end: int, calls: Sequence[Called]) -> Iterator[Parsed]:
        """Go on behind a call, or behind text that seemed to be one."""
        raw, self._text = self._opening + self._text[:end], self._text[end:]
        self._reader = None
        if calls:
            yield from self._before_mark(belongs=self._family.trims)
            self._thinks = self._strips = False
            self._may_be_bare = True
            yield from calls
        else:
            self._may_be_bare = False
            yield from self._said(raw)

    def _next_mark(self, *, ended: bool) -> Generator[Parsed, None, bool]:
        """Say the text up to the next mark, and take the mark. Returns whether there was one."""
        found = None
        if self._may_be_bare and not self._thinks:
            found = _marks(self._family, "bare").match(self._text, partial=not ended)
        if found is None and self._is_fresh and not self._thinks:
            found = _begins(self._family).match(self._text, partial=not ended)
        if found is None:
            kind = "text" if self._takes_calls else "answer"
            pattern = _marks(self._family, "thought" if self._thinks else kind)
            found = pattern.search(self._text, partial=not ended)
        if found is None or found.partial:
            at = len(self._text) if found is None else found.start()
            text, self._text = self._text[:at], self._text[at:]
            yield from self._said(text)
            return False
        text, self._text = self._text[: found.start()], self._text[found.end() :]
        yield from self._said(text)
        yield from self._marked(found)
        return True

    def _marked(self, found: Match[str]) -> Iterator[Parsed]:
        """Take a mark."""
        groups = found.groupdict()
        for index, form in enumerate(self._family.calls):
            if groups.get(f"call{index}") is not None:
                self._opening = found.group()
                self._reader = reader_of(form, groups, self._tools)
                return
        closes = groups.get("closes") is not None
        yield from self._before_mark(belongs=closes or self._family.trims)
        yield Mark()
        if groups.get("drops") is None:
            self._thinks, self._strips = not closes, True
            self._may_be_bare = self._takes_calls

    # Text

    def _said(self, text: str) -> Iterator[Parsed]:
        """Say text, and hold back the blanks at its end."""
        if self._strips:
            text = text.lstrip()
        if text.strip():
            self._may_be_bare = self._strips = False
        text = self._blanks + text
        said = text.rstrip()
        self._blanks = text[len(said) :]
        if said:
            self._is_fresh = False
            yield self._as_part(said)

    def _before_mark(self, *, belongs: bool) -> Iterator[Parsed]:
        """Settle the blanks before a mark: they belong to it, or are text."""
        blanks, self._blanks = self._blanks, ""
        if blanks and not belongs and not self._is_fresh:
            yield self._as_part(blanks)
        self._is_fresh = self._had_mark = True

    def _as_part(self, text: str) -> Parsed:
        return Thought(text) if self._thinks else text


@lru_cache(maxsize=len(FAMILIES))
def _begins(family: Family) -> Pattern[str]:
    """Return the pattern of the mark that opens reasoning only where nothing has been said."""
    begins = None if family.thought is None else family.thought.begins
    return regex.compile("(?!)" if begins is None else rf"\s*(?P<begins>{begins.pattern})")


@lru_cache(maxsize=4 * len(FAMILIES))
def _marks(family: Family, state: Literal["text", "answer", "thought", "bare"]) -> Pattern[str]:
    """Return a parser's patterns: in text, in an answer without calls, in a thought, and where text begins.

    Each mark is a group, and groups of a call's form keep their names.
    """
    wanted: dict[str, Pattern[str]] = {}
    if state == "thought":
        if family.thought is not None:
            wanted["closes"] = family.thought.closes
    elif state != "bare":
        if family.thought is not None and family.thought.opens is not None:
            wanted["opens"] = family.thought.opens
        if family.drops is not None:
            wanted["drops"] = family.drops
    if state in {"text", "bare"} or (state == "thought" and family.call_ends_thought):
        for index, form in enumerate(family.calls):
            if (isinstance(form, Nested) and form.bare) == (state == "bare"):
                wanted[f"call{index}"] = form.opening
    if not wanted:
        return regex.compile("(?!)")
    return regex.compile("|".join(f"(?P<{name}>{mark.pattern})" for name, mark in wanted.items()))
