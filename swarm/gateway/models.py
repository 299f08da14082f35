"""The models that the gateway answers with: opened at the start or when servers announce them, loaded when asked for.

Embeddings and head of a model are loaded at its first request. Those of the model that was used longest ago leave when
all together would take too much memory. A failure to load is told to the requests that wait, and the next one tries
again.
"""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from weakref import WeakSet

import psutil
import structlog

from swarm.client.auditing.ledger import Audits
from swarm.client.session.membership import Member
from swarm.compute.controlgroups import bytes_left
from swarm.compute.thread import ComputeThread
from swarm.errors import ModelNotFound, SwarmError
from swarm.gateway.answering import Model
from swarm.gateway.api.dialect import About
from swarm.gateway.api.problems import Problem, Rejected
from swarm.gateway.engine import EngineLimits
from swarm.gateway.loading import Loader, ModelOptions
from swarm.gateway.recorder import Recorder
from swarm.gateway.resident import Loaded, Resident, leaving
from swarm.gateway.routes import Routes
from swarm.model.allocator import return_free_memory
from swarm.model.checkpoint import Checkpoint

_log = structlog.get_logger("swarm.gateway")


class Models:
    """All models, by name. Several requests for one that is not loaded wait for the same loading."""

    def __init__(
        self, member: Member, compute: ComputeThread, options: ModelOptions, limits: EngineLimits | None = None
    ) -> None:
        self._now = time.monotonic
        self._member = member
        self._loader = Loader(member, compute, options, limits, self._now)
        self._routes = Routes(partial(options.membership, member), options.routes, self._now)
        self._bytes_max = options.ends_bytes_max or half_of_memory()
        self._checkpoints: dict[str, Checkpoint] = {}
        self._loaded: dict[str, Loaded] = {}
        self._loading: dict[str, asyncio.Task[Loaded]] = {}
        self._wanted: Counter[str] = Counter()  # requests that wait for a model, by its name
        self._retired: WeakSet[Resident] = WeakSet()  # those that left, some of which still answer requests
        self._room = asyncio.Lock()  # one model is loaded at a time: each makes room for itself

    @property
    def names(self) -> list[str]:
        """Names that requests can say, those with a route first as far as that is known."""
        return list(self._checkpoints)

    async def add(self, model: str) -> str:
        """Open a checkpoint: a hub id or a directory. Returns its name. Raises UsageError or CheckpointError."""
        checkpoint = await self._loader.open(model)
        await self.put(checkpoint)
        return checkpoint.public_name

    async def put(self, checkpoint: Checkpoint) -> None:
        """Let requests name an opened checkpoint. Another one of this name leaves."""
        name = checkpoint.public_name
        known = self._checkpoints.get(name)
        if known is not None and known.root != checkpoint.root:
            await self.drop(name)
        self._checkpoints[name] = checkpoint

    async def drop(self, name: str) -> None:
        """Let requests name a model no longer. Those that are answered are answered to the end."""
        self._routes.forget(self._checkpoints.pop(name).root)
        loaded = self._loaded.pop(name, None)
        if loaded is not None:
            self._retired.add(loaded.resident)
            await loaded.resident.retire()

    def arrange(self, names: Sequence[str]) -> None:
        """Set the order in which models are listed."""
        for name in names:
            self._checkpoints[name] = self._checkpoints.pop(name)

    def check(self, name: str) -> None:
        """Raise ModelNotFound where requests cannot say this name."""
        if name not in self._checkpoints:
            raise ModelNotFound(name, f"this gateway has {', '.join(self.names) or 'none'}")

    def about(self, name: str) -> About:
        """Describe a model, which need not be loaded. Raises ModelNotFound."""
        self.check(name)
        checkpoint = self._checkpoints[name]
        traits = checkpoint.traits
        return About(checkpoint.root, traits.model_type, traits.n_blocks, traits.hidden_size, traits.positions_max)

    def loaded(self) -> list[Model]:
        """Return the models whose weights are here."""
        return [loaded.model for loaded in self._loaded.values()]

    async def get(self, name: str, until: AsyncExitStack) -> Model:
        """Return a model, and load it if need be. Raises ModelNotFound, CheckpointError or Rejected.

        until: the model stays in memory until that is closed.
        """
        self.check(name)
        self._wanted[name] += 1
        try:
            resident, model = await self._resident(name)
            resident.running += 1
        finally:
            self._wanted[name] -= 1
        until.push_async_callback(resident.release)
        resident.used = self._now()
        return model

    async def _resident(self, name: str) -> tuple[Resident, Model]:
        loaded = self._loaded.get(name)
        if loaded is None:
            task = self._loading.get(name)
            if task is None:
                task = self._loading[name] = asyncio.create_task(self._load(name, self._checkpoints[name]))
                task.add_done_callback(partial(self._tried, name))
            loaded = await asyncio.shield(task)
        return loaded.resident, loaded.model

    async def routes(self) -> dict[str, str]:
        """Return why each model has no route now; "" for one that has."""
        return await self._routes.reasons(self._checkpoints, self._loaded)

    async def close_old(self) -> None:
        """Close the conversations of models in memory that no turn has continued for too long."""
        for resident in self._here():
            await resident.engine.conversations.close_old()

    def watch(self, recorder: Recorder) -> None:
        """Add the figures of the models in memory."""
        recorder.gauge("models", "Models that requests can name.", lambda: len(self._checkpoints))
        recorder.gauge("models_loaded", "Models whose embeddings and head are in memory.", lambda: len(self._loaded))
        recorder.gauge("models_bytes", "Memory of embeddings and heads.", lambda: sum(r.n_bytes for r in self._here()))
        idle = "Conversations that are kept for their next turn."
        recorder.gauge("conversations_idle", idle, lambda: sum(len(r.engine.conversations) for r in self._here()))
        tokens = "Tokens of them, which servers hold."
        recorder.gauge("conversations_tokens", tokens, lambda: sum(r.engine.conversations.tokens for r in self._here()))

        sent = "Tokens that were guessed and sent ahead, of models in memory."
        recorder.gauge("guesses_sent", sent, lambda: sum(r.engine.guessing.sent for r in self._here()))
        became = "Guessed tokens that became the text, of models in memory."
        recorder.gauge("guesses_kept", became, lambda: sum(r.engine.guessing.kept for r in self._here()))
        agreed = "Audits of models in memory that no server contradicted."
        recorder.gauge("audits_agreed", agreed, lambda: sum(each.agreed for each in self._audits()))
        disputed = "Audits of models in memory that some server contradicted."
        recorder.gauge("audits_disputed", disputed, lambda: sum(each.disputed for each in self._audits()))
        avoidance = self._member.sessions.avoidance
        recorder.gauge("servers_wrong", "Peers left out for wrong outputs.", lambda: len(avoidance.banned))

    async def close(self) -> None:
        """End all sessions and memberships."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._loaded:
            await self._loaded.popitem()[1].resident.end()

    def _audits(self) -> list[Audits]:
        return [resident.engine.swarm.auditor.audits for resident in self._here()]

    def _here(self) -> list[Resident]:
        return [loaded.resident for loaded in self._loaded.values()]

    # Loading

    def _tried(self, name: str, task: asyncio.Task[Loaded]) -> None:
        del self._loading[name]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.warning("could not load", model=name, why=str(error) if isinstance(error, SwarmError) else repr(error))

    async def _load(self, name: str, checkpoint: Checkpoint) -> Loaded:
        async with self._room:
            if await self._make_room(name, await self._loader.n_bytes(checkpoint)):
                gc.unfreeze()  # they are garbage now, cycles and all
                gc.collect()
                return_free_memory()
            _log.info("loading", model=name)
            loaded = await self._loader.load(name, checkpoint)
            gc.freeze()  # collections among present objects took a tenth of the time of eight streams
            if self._checkpoints.get(name) is checkpoint:
                self._loaded[name] = loaded
            else:  # it was dropped meanwhile
                await loaded.resident.retire()
        _log.info("loaded", model=name, memory_mb=loaded.resident.n_bytes >> 20)
        return loaded

    async def _make_room(self, name: str, needed: int) -> bool:
        """Let models leave until one more fits. Returns whether some have left. Raises Rejected."""
        most = self._bytes_max
        if needed > most:
            why = f"embeddings and head of {name!r} take {needed >> 20} MiB, and --ends-memory allows {most >> 20} MiB"
            raise Rejected(Problem(503, "overloaded", why, "model_too_large"))
        retired = [resident for resident in self._retired if resident.running]
        wanted = [loaded.resident for key, loaded in self._loaded.items() if self._wanted[key]]
        gone = leaving([*self._here(), *retired], needed, most, wanted)
        if gone is None:
            why = "the models in memory are all in use, and one more does not fit"
            raise Rejected(Problem(503, "overloaded", why, "no_memory", retry_after_s=5.0))
        for leaver in [key for key, loaded in self._loaded.items() if loaded.resident in gone]:
            _log.info("unloading", model=leaver)
            await self._loaded.pop(leaver).resident.retire()
        return bool(gone or self._retired)


@asynccontextmanager
async def serving(models: Models) -> AsyncIterator[Models]:
    """End the models at the end of the block."""
    try:
        yield models
    finally:
        await models.close()


def half_of_memory() -> int:
    """Return half of the host's memory, or of what this process's control groups leave of it."""
    total, left = int(psutil.virtual_memory().total), bytes_left()
    return (total if left is None else min(total, left)) // 2
