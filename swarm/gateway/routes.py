"""Whether the gateway's models have a route now, as readiness and lists of models ask."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from swarm.blocks import Blocks
from swarm.client.session.membership import Membership
from swarm.errors import SwarmError
from swarm.gateway.resident import Loaded
from swarm.limits import limit
from swarm.model.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """Bounds of the question whether models have a route."""

    plan_s: float = limit(5.0, "s", "a model whose route takes longer to plan counts as one without")
    fresh_s: float = limit(2.0, "s", "an answer that is no older is given again")


class Routes:
    """Plans a route for every model, one round at a time, and keeps the answers for a while."""

    def __init__(
        self, planner: Callable[[Checkpoint], Membership], limits: RouteLimits, now: Callable[[], float]
    ) -> None:
        """planner: makes a membership that plans as sessions through a model will. now: in seconds."""
        self._planner = planner
        self._limits = limits
        self._now = now
        self._planning: dict[str, Membership] = {}  # of models that are not loaded, by their roots
        self._asking = asyncio.Lock()
        self._reasons: dict[str, str] = {}
        self._asked_at = -inf

    async def reasons(self, checkpoints: Mapping[str, Checkpoint], loaded: Mapping[str, Loaded]) -> dict[str, str]:
        """Return why each model has no route now; "" for one that has.

        checkpoints, loaded: all models and those in memory, by name; read when this call's turn has come.
        """
        async with self._asking:
            is_old = self._now() - self._asked_at > self._limits.fresh_s
            if is_old or self._reasons.keys() != checkpoints.keys():
                names = list(checkpoints)
                reasons = await asyncio.gather(*(self._reason(checkpoints[name], loaded) for name in names))
                self._reasons, self._asked_at = dict(zip(names, reasons, strict=True)), self._now()
            return self._reasons

    def forget(self, root: str) -> None:
        """Forget a model that has left."""
        self._planning.pop(root, None)

    async def _reason(self, checkpoint: Checkpoint, loaded: Mapping[str, Loaded]) -> str:
        try:
            async with asyncio.timeout(self._limits.plan_s):
                await self._membership(checkpoint, loaded).router.plan(Blocks(0, checkpoint.n_blocks))
        except SwarmError as error:
            return str(error)
        except TimeoutError:
            return f"no route was planned within {self._limits.plan_s:.0f} s"
        return ""

    def _membership(self, checkpoint: Checkpoint, loaded: Mapping[str, Loaded]) -> Membership:
        """Return a membership to plan with: the one that sessions have, or one that only plans."""
        here = loaded.get(checkpoint.public_name)
        if here is not None:
            return here.resident.engine.swarm
        if checkpoint.root not in self._planning:
            self._planning[checkpoint.root] = self._planner(checkpoint)
        return self._planning[checkpoint.root]
