"""Reads the usage that an upstream tells out of its answer, and takes it out of a stream that is not to have it."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class UsageLimits:
    """Bounds of what is kept of an answer."""

    kept_bytes_max: int = limit(4 << 20, "bytes", "a longer event, or whole answer, of an upstream has no usage")


Count = Annotated[int, Field(ge=0, le=1 << 40)]


class _Cached(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    cached_tokens: Count | None = None


class Usage(BaseModel):
    """The tokens of an answer, in the words of chat completions or of responses."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    prompt: Count = Field(0, validation_alias=AliasChoices("prompt_tokens", "input_tokens"))
    output: Count = Field(0, validation_alias=AliasChoices("completion_tokens", "output_tokens"))
    details: _Cached | None = Field(
        None, validation_alias=AliasChoices("prompt_tokens_details", "input_tokens_details")
    )

    @property
    def cached(self) -> int:
        """The tokens of the prompt that were not computed."""
        return min(self.prompt, (self.details and self.details.cached_tokens) or 0)


def asking(body: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    """Return a request that asks for the usage of its stream; None where it does, or needs not."""
    options = body.get("stream_options") or {}
    is_told = body.get("stream") is not True or path.endswith("/responses")
    if is_told or not isinstance(options, dict) or options.get("include_usage") is True:
        return None
    return {**body, "stream_options": {**options, "include_usage": True}}


class Reader:
    """Passes an answer on, and keeps its usage. usage: None until it is told. events: of the stream so far."""

    def __init__(self, *, is_stream: bool, hides: bool, limits: UsageLimits | None = None) -> None:
        """hides: whether the stream is to go on without its usage, which the client has not asked for."""
        self.usage: Usage | None = None
        self.events = 0
        self.is_stream = is_stream
        self._hides = hides
        self._limits = limits or UsageLimits()
        self._kept = bytearray()
        self._searched = 0  # bytes of them that have no blank line
        self._is_long = False  # the rest of this event, or answer, is not read

    @property
    def counted(self) -> Usage:
        """The usage; where none was told, as by an answer that was broken off, a token for each event."""
        return self.usage or Usage.model_validate({"output_tokens": self.events})

    def feed(self, part: bytes) -> bytes:
        """Take bytes of the upstream. Returns the bytes that go on: of a stream, in whole events."""
        if self.is_stream:
            self._kept += part
            return b"".join(self._events())
        self._is_long = self._is_long or len(self._kept) + len(part) > self._limits.kept_bytes_max
        self._kept = bytearray() if self._is_long else self._kept + part
        return part

    def close(self) -> bytes:
        """Take the end of the answer. Returns the bytes that have not gone on."""
        if self.is_stream:
            return bytes(self._kept)
        self._note(_parsed(bytes(self._kept)))
        return b""

    def _events(self) -> Iterator[bytes]:
        at = 0
        blank_line = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")  # ends an event
        for end in [found.end() for found in blank_line.finditer(self._kept, self._searched)]:
            event, at = bytes(self._kept[at:end]), end
            yield event if self._is_long else self._event(event)
            self._is_long = False
        del self._kept[:at]
        self._searched = max(0, len(self._kept) - 3)  # the longest beginning of a blank line
        if len(self._kept) > self._limits.kept_bytes_max:
            self._is_long = True
            yield bytes(self._kept)
            self._kept.clear()
            self._searched = 0

    def _event(self, event: bytes) -> bytes:
        data = b"\n".join(re.findall(rb"^data:[ ]?(.*?)\r?$", event, re.MULTILINE))
        self.events += bool(data) and data != b"[DONE]"
        body = _parsed(data) if b'"usage"' in data else None
        self._note(body)
        if not self._hides or not isinstance(body, dict) or "usage" not in body:
            return event
        if body["usage"] is not None and not body.get("choices"):
            return b""  # the chunk that is there for the usage alone
        plain = {name: value for name, value in body.items() if name != "usage"}
        return b"data: " + json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def _note(self, body: Any) -> None:  # noqa: ANN401 - JSON of an upstream
        """Keep the usage of an answer, or of one of its events."""
        whole = body.get("response", body) if isinstance(body, dict) else None  # responses have it within
        usage = whole.get("usage") if isinstance(whole, dict) else None
        with suppress(ValidationError):
            self.usage = Usage.model_validate(usage) if isinstance(usage, dict) else self.usage


def _parsed(data: bytes) -> Any:  # noqa: ANN401 - JSON of an upstream
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
