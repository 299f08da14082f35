"""From an error to an HTTP client's answer: a status, a kind and a code that dialects write in their own form."""

from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from swarm.errors import (
    BadRequest,
    ModelNotFound,
    NetworkError,
    NoRoute,
    PromptTooLong,
    Refused,
    StepTimeout,
    SwarmError,
    UsageError,
)

Kind = Literal[
    "invalid_request", "not_found", "authentication", "permission", "rate_limit", "overloaded", "timeout", "internal"
]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a request has no answer.

    retry_after_s: when it is worth trying again; None where that is unknown. too_long: the tokens of a prompt that is
    too long, and how many fit.
    """

    status: int
    kind: Kind
    message: str
    code: str | None = None
    field: str | None = None
    retry_after_s: float | None = None
    too_long: tuple[int, int] | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, round(self.retry_after_s)))}


class Rejected(SwarmError):
    """A request that is refused before it gets to a model."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


_SIMPLE: tuple[tuple[type[SwarmError], int, Kind, str | None, float | None], ...] = (
    (ModelNotFound, 404, "not_found", "model_not_found", None),
    (NoRoute, 503, "overloaded", "no_route", 5.0),
    (StepTimeout, 504, "timeout", "timeout", 5.0),
    (UsageError, 400, "invalid_request", None, None),
    (NetworkError, 503, "overloaded", "swarm_unreachable", 5.0),
    (SwarmError, 502, "internal", "swarm_error", None),
)


def problem_of(error: BaseException) -> Problem:
    """Return the problem of any error. A foreign error's text is left out: it may hold paths or prompts."""
    match error:
        case Rejected():
            return error.problem
        case ValidationError():
            return _invalid(error)
        case BadRequest():
            return Problem(400, "invalid_request", str(error), error.code, error.field)
        case PromptTooLong():
            counts = (error.positions, error.limit)
            return Problem(
                400, "invalid_request", _too_long(error), "context_length_exceeded", "messages", too_long=counts
            )
        case Refused():
            return Problem(503, "overloaded", str(error), error.code, retry_after_s=error.retry_after_s or 5.0)
    for cls, status, kind, code, retry_after_s in _SIMPLE:
        if isinstance(error, cls):
            return Problem(status, kind, str(error), code, retry_after_s=retry_after_s)
    return Problem(500, "internal", "the gateway failed; its log says why")


def _too_long(error: PromptTooLong) -> str:
    """Return the text in the words that agents look for."""
    return (
        f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
        f"{error.positions} tokens. Please reduce the length of the messages."
    )


def _invalid(error: ValidationError) -> Problem:
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "tagged-"))) or "body"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return Problem(400, "invalid_request", f"{field}: {first['msg']}{more}", field=field)
