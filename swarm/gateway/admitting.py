"""The middleware that holds a request back until its turn has come, and its slot until its stream has ended."""

from contextlib import AsyncExitStack

from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.gateway.account import account_in
from swarm.gateway.admission import Slots
from swarm.gateway.api.problems import Rejected
from swarm.gateway.doors import Answer


class Admitting:
    """Gives every POST a slot: the others read figures and lists. A client that goes away loses its place."""

    def __init__(self, app: ASGIApp, slots: Slots, answer: Answer) -> None:
        self._app = app
        self._slots = slots
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        account = account_in(scope)
        tenant = account.tenant
        try:
            async with AsyncExitStack() as entered:
                async with account.grant.valid():
                    await entered.enter_async_context(self._slots.held(tenant.name, tenant.limits))
                await self._app(scope, receive, send)
        except Rejected as error:  # from the slots: the app has answered all of its own
            await self._answer(scope["path"], error.problem)(scope, receive, send)
