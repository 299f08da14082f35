"""One request's account: its owner, its model, and the tokens that were computed for it."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from math import inf

from starlette.requests import Request
from starlette.types import Scope

from swarm.gateway.admission import AdmissionLimits, GenerationLimits, Slots, TenantLimits
from swarm.gateway.answering import Model
from swarm.gateway.api.problems import Problem, Rejected
from swarm.gateway.generation import Backend, Emitted, Generation, Rerouted, Started, Token
from swarm.gateway.grant import Grant
from swarm.gateway.keys import ANYONE, Tenant
from swarm.gateway.recorder import ModelFigures, Recorder


@dataclass(slots=True, eq=False)
class Account:
    """The gateway's knowledge of a request while it is answered. The middleware makes it, and logs it at the end."""

    id: str
    tenant: Tenant = ANYONE
    grant: Grant = field(default_factory=Grant)
    model: str = ""  # in the catalogue's words; "" until it is known to be there
    prompt: int = 0  # tokens that were computed
    cached: int = 0  # tokens that sessions had already
    output: int = 0
    first_s: float | None = None  # from the arrival to the first token
    ending: AsyncExitStack = field(default_factory=AsyncExitStack)  # closed when the request is over
    began: float = field(default_factory=time.monotonic)

    def check(self, model: str) -> None:
        """Raise Rejected where the owner may not name a model."""
        if not self.tenant.may_use(model):
            raise Rejected(Problem(403, "permission", f"this key may not use {model!r}", "model_not_allowed"))


def account_of(request: Request) -> Account:
    """Return a request's account."""
    return account_in(request.scope)


def account_in(scope: Scope) -> Account:
    """Return the account of the request of this scope."""
    account: Account = scope["state"]["account"]
    return account


class Meter:
    """Counts generations' tokens: for their request, for their tenant's limits, for the figures of their model."""

    def __init__(self, recorder: Recorder, requests: Slots, limits: GenerationLimits) -> None:
        """requests: charged with the tokens of their tenants. limits: of the generations, which take turns."""
        many = 1 << 30  # those that wait belong to requests, whose number is bounded
        turns = AdmissionLimits(limits.running_max, many, many, wait_s=inf)
        self.turns = Slots(turns, time.monotonic)
        self.requests = requests
        self._recorder = recorder
        self._figures: dict[str, ModelFigures] = {}

    def metered(self, model: Model, account: Account) -> Model:
        """Return a model whose generations are counted for a request."""
        account.model = model.name
        figures = self._figures.setdefault(model.name, self._recorder.of(model.name))
        return model.served_by(_Metered(model.backend, account, figures, self))


class _Metered:
    """A backend whose generations wait for their turn and are counted."""

    def __init__(self, backend: Backend, account: Account, figures: ModelFigures, meter: Meter) -> None:
        self.positions_max = backend.positions_max
        self.vocabulary = backend.vocabulary
        self._backend = backend
        self._account = account
        self._figures = figures
        self._meter = meter

    async def generate(self, generation: Generation) -> AsyncGenerator[Emitted, bool | None]:
        """Generate as the backend does."""
        account, last, count, prompt = self._account, time.monotonic(), 0, len(generation.prompt)
        turn = self._meter.turns.held(account.tenant.name, TenantLimits())
        async with AsyncExitStack() as entered:
            async with account.grant.valid():
                await entered.enter_async_context(turn)
            emitted = await entered.enter_async_context(aclosing(self._backend.generate(generation)))
            enough: bool | None = None
            try:
                while True:
                    async with account.grant.valid():
                        each = await emitted.asend(enough)
                    match each:
                        case Started(cached):
                            self._prompt(prompt - cached, cached)
                            prompt = 0
                        case Token():
                            now = time.monotonic()
                            self._figures.token(now - last, is_first=count == 0)
                            last, count = now, count + 1
                            if account.first_s is None:
                                account.first_s = now - account.began
                        case Rerouted():
                            self._figures.repair()
                    enough = yield each
            except StopAsyncIteration:
                return
            except (asyncio.CancelledError, GeneratorExit):
                if prompt:  # who leaves before the first token has had servers compute it all the same
                    self._prompt(prompt, 0)
                raise
            finally:
                account.output += count
                self._meter.requests.charge(account.tenant.name, count)

    def _prompt(self, computed: int, cached: int) -> None:
        self._account.prompt += computed
        self._account.cached += cached
        self._figures.prompt(computed, cached)
        self._meter.requests.charge(self._account.tenant.name, computed)
