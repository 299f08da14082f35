"""The rest of the gateway's view of a dialect: its paths, and the form of its errors."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from swarm.gateway.account import Meter, account_of
from swarm.gateway.answering import Model
from swarm.gateway.api.problems import Problem
from swarm.gateway.api.sse import StreamLimits


@dataclass(frozen=True, slots=True)
class Dialect:
    """An interface that programs speak.

    prefixes: of its paths. error_body: its form of an error. stream_type: the media type of its streams.
    """

    prefixes: tuple[str, ...]
    error_body: Callable[[Problem], Mapping[str, Any]]
    stream_type: str = "text/event-stream"

    def speaks(self, path: str) -> bool:
        """Whether a path belongs to it."""
        return path.startswith(self.prefixes)

    def problem(self, problem: Problem) -> Response:
        """Return the answer to a request that failed before its first byte."""
        return JSONResponse(self.error_body(problem), problem.status, problem.headers)


@dataclass(frozen=True, slots=True)
class About:
    """A model as its checkpoint declares it, without the weights. positions_max: None where it declares no limit."""

    root: str  # 64 hex digits
    family: str
    n_blocks: int
    hidden_size: int
    positions_max: int | None


class Catalogue(Protocol):
    """The models that requests can name."""

    @property
    def names(self) -> list[str]:
        """Their names."""
        ...

    def check(self, name: str) -> None:
        """Raise ModelNotFound where a request cannot say this name."""
        ...

    def about(self, name: str) -> About:
        """Describe a model, which need not be loaded. Raises ModelNotFound."""
        ...

    def loaded(self) -> list[Model]:
        """Return the models whose weights are here."""
        ...

    async def routes(self) -> dict[str, str]:
        """Return why each model has no route now; "" for one that has. A model that is missing is not known yet."""
        ...

    async def get(self, name: str, until: AsyncExitStack) -> Model:
        """Return a model, and load it if need be. Raises ModelNotFound or CheckpointError.

        until: the model stays in memory until that is closed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """The means by which dialects answer. elsewhere: names of the models that upstreams have now."""

    models: Catalogue
    started: float  # when the gateway began, in seconds since 1970
    meter: Meter
    streams: StreamLimits
    elsewhere: Callable[[], list[str]] = list

    def names(self, request: Request) -> list[str]:
        """Return the names that requests of OpenAI's dialect can say with this request's key."""
        elsewhere = (name for name in self.elsewhere() if name not in self.models.names)
        return allowed([*self.models.names, *elsewhere], request)

    async def model(self, name: str, request: Request) -> Model:
        """Return a model, loaded, whose generations are counted for a request.

        Raises ModelNotFound, CheckpointError, or Rejected where the request's key may not use it.
        """
        account = account_of(request)
        self.models.check(name)
        account.check(name)
        return self.meter.metered(await self.models.get(name, account.ending), account)


def allowed(names: Sequence[str], request: Request) -> list[str]:
    """Return those of the models that a request's key may use."""
    tenant = account_of(request).tenant
    return [name for name in names if tenant.may_use(name)]


def owner_of(request: Request) -> str:
    """Return the tenant that a request belongs to: sessions are continued for the same one alone."""
    owner: str = getattr(request.state, "owner", "")
    return owner


def conversation_of(request: Request) -> str | None:
    """Return the conversation that a request's headers name, if they do."""
    return request.headers.get("x-session-id") or request.headers.get("x-session-affinity")


Chunks = AsyncGenerator[bytes, None]
