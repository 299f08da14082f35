"""The fields that requests of several interfaces share, with their bounds: sampling, stop strings, streams."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from swarm.errors import BadRequest
from swarm.gateway.chat import Sampling
from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of the parts of one request."""

    items_max: int = limit(16384, "items", "of a conversation; a request with more is refused")
    biases_max: int = limit(1024, "tokens", "with a logit bias; a request with more is refused")
    sequences_max: int = limit(128, "sequences", "of one completion: its prompts, times n")
    choices_max: int = limit(8, "choices", "a request for more is refused")
    logprobs_max: int = limit(20, "tokens", "reported beside each token; a request for more is refused")
    prompts_max: int = limit(128, "prompts", "of one completion; a request with more is refused")
    tools_max: int = limit(256, "tools", "a request with more is refused")
    stops_max: int = limit(16, "strings", "that end an output; a request with more is refused")
    stop_sequences_max: int = limit(64, "strings", "that end an output, in Anthropic's dialect")
    routes_s: float = limit(0.5, "s", "a list of models says nothing of routes that take longer to plan")


REQUEST = RequestLimits()
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # as OpenAI takes them
# A list ends at its first error: each of a million would be written down, and a million times in vain.
Stops = str | Annotated[list[str], Field(max_length=REQUEST.stops_max, fail_fast=True)]
Items = Annotated[list[dict[str, Any]], Field(max_length=REQUEST.items_max, fail_fast=True)]
Words = Annotated[list[str], Field(fail_fast=True)]


def at_most(count: int) -> BeforeValidator:
    """Return what refuses an object with more entries, before any of them is looked at."""

    def checked(given: object) -> object:
        if isinstance(given, Mapping) and len(given) > count:
            raise ValueError(f"it has at most {count} entries, not {len(given)}")
        return given

    return BeforeValidator(checked)


class Given(BaseModel):
    """A part of a request. Unknown fields are left out, as the vendors' own servers do with most."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class StreamOptions(Given):
    """Further events of a stream."""

    include_usage: bool | None = None


class AnswerRequest(Given):
    """The fields of every request of OpenAI's dialect."""

    model: str
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    user: str | None = None

    def sampling(self, logprobs: int | None) -> Sampling:
        """Return how tokens are chosen. logprobs: as `Sampling` has them. Raises BadRequest."""
        penalties = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
        named = {"temperature", "top_p", "top_k", "min_p", "seed", *penalties}
        return Sampling(logprobs=logprobs, **self.model_dump(include=named, exclude_none=True))


class SampledRequest(AnswerRequest):
    """The fields that chat completions and completions share."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=REQUEST.choices_max)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, at_most(REQUEST.biases_max)] = (
        None
    )
    ignore_eos: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, logprobs: int | None) -> Sampling:
        """Return how tokens are chosen. logprobs: as `Sampling` has them. Raises BadRequest."""
        return replace(super().sampling(logprobs), logit_bias=biases(self.logit_bias or {}))


def biases(given: Mapping[str, float]) -> dict[int, float]:
    """Return logit biases by token id. Raises BadRequest."""
    if not all(token.isdecimal() and len(token) < 16 for token in given):
        raise BadRequest("logit_bias", "its keys are token ids")
    return {int(token): bias for token, bias in given.items()}
