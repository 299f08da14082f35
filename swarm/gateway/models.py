"""The models that the gateway answers with: opened at the start or when servers announce them, loaded when asked for.

Embeddings and head of a model are loaded at its first request. Those of the model that was used longest ago leave when
all together would take too much memory. A failure to load is told to the requests that wait, and the next one tries
again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import psutil
import structlog
import torch
from transformers import PreTrainedModel

from swarm.blocks import Blocks
from swarm.client.hf.text import load_tokenizer
from swarm.client.planning.router import Wanted
from swarm.client.session.membership import Member, Membership
from swarm.compute.thread import ComputeThread
from swarm.errors import ModelNotFound, SwarmError
from swarm.gateway.answering import Model
from swarm.gateway.api.dialect import About
from swarm.gateway.api.problems import Problem, Rejected
from swarm.gateway.engine import Engine, EngineLimits
from swarm.gateway.recorder import Recorder
from swarm.gateway.resident import Loaded, Resident, leaving
from swarm.gateway.text import TokenTexts
from swarm.limits import limit
from swarm.model.allocator import return_free_memory
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.loading import ends_bytes, expected_dtype, load_ends
from swarm.model.tokens import TokenEnds

_log = structlog.get_logger("swarm.gateway")


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """Bounds of the question whether models have a route."""

    plan_s: float = limit(5.0, "s", "a model whose route takes longer to plan counts as one without")
    fresh_s: float = limit(2.0, "s", "an answer that is no older is given again")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How models are found and loaded. ends_bytes_max: of all embeddings and heads together; None: half the memory."""

    revision: str | None = None
    token: str | None = None
    cache_dir: Path | None = None
    dtype: str = "auto"
    ends_bytes_max: int | None = None
    routes: RouteLimits = field(default_factory=RouteLimits)


class Models:
    """All models, by name. Several requests for one that is not loaded wait for the same loading."""

    def __init__(
        self, member: Member, compute: ComputeThread, options: ModelOptions, limits: EngineLimits | None = None
    ) -> None:
        self._member = member
        self._compute = compute
        self._options = options
        self._limits = limits
        self._bytes_max = options.ends_bytes_max or psutil.virtual_memory().total // 2
        self._checkpoints: dict[str, Checkpoint] = {}
        self._loaded: dict[str, Loaded] = {}
        self._loading: dict[str, asyncio.Task[Loaded]] = {}
        self._room = asyncio.Lock()  # one model is loaded at a time: each makes room for itself
        self._now = time.monotonic
        self._planning: dict[str, Membership] = {}  # of models that are not loaded, by their roots
        self._routing = asyncio.Lock()
        self._routes: dict[str, str] = {}
        self._routed_at = -inf

    @property
    def names(self) -> list[str]:
        """Names that requests can say, those with a route first as far as that is known."""
        return list(self._checkpoints)

    async def add(self, model: str) -> str:
        """Open a checkpoint: a hub id or a directory. Returns its name. Raises UsageError or CheckpointError."""
        options = self._options
        checkpoint = await asyncio.to_thread(
            open_checkpoint, model, revision=options.revision, token=options.token, cache_dir=options.cache_dir
        )
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
        self._planning.pop(self._checkpoints.pop(name).root, None)
        loaded = self._loaded.pop(name, None)
        if loaded is not None:
            await loaded.resident.retire()

    def arrange(self, names: Sequence[str]) -> None:
        """Set the order in which models are listed."""
        self._checkpoints = {name: self._checkpoints[name] for name in names}

    def check(self, name: str) -> None:
        """Raise ModelNotFound where requests cannot say this name."""
        if name not in self._checkpoints:
            raise ModelNotFound(name, f"this gateway has {', '.join(self.names) or 'none'}")

    def about(self, name: str) -> About:
        """Return what is known of a model before it is loaded. Raises ModelNotFound."""
        self.check(name)
        checkpoint = self._checkpoints[name]
        traits = checkpoint.traits
        return About(checkpoint.root, traits.model_type, traits.n_blocks, traits.hidden_size, traits.positions_max)

    def loaded(self) -> list[Model]:
        """Return the models whose weights are here."""
        return [loaded.model for loaded in self._loaded.values()]

    async def get(self, name: str) -> Model:
        """Return a model, and load it if need be. Raises ModelNotFound, CheckpointError or Rejected."""
        self.check(name)
        loaded = self._loaded.get(name)
        if loaded is None:
            task = self._loading.get(name)
            if task is None:
                task = self._loading[name] = asyncio.create_task(self._load(name, self._checkpoints[name]))
                task.add_done_callback(partial(self._tried, name))
            loaded = await asyncio.shield(task)
        loaded.resident.used = self._now()
        return loaded.model

    async def routes(self) -> dict[str, str]:
        """Return why each model has no route now; "" for one that has."""
        async with self._routing:
            is_old = self._now() - self._routed_at > self._options.routes.fresh_s
            if is_old or self._routes.keys() != self._checkpoints.keys():
                names = self.names
                reasons = await asyncio.gather(*(self._reason(self._checkpoints[name]) for name in names))
                self._routes, self._routed_at = dict(zip(names, reasons, strict=True)), self._now()
            return self._routes

    def watch(self, recorder: Recorder) -> None:
        """Add the figures of what is in memory."""
        recorder.gauge("models", "Models that requests can name.", lambda: len(self._checkpoints))
        recorder.gauge("models_loaded", "Models whose embeddings and head are in memory.", lambda: len(self._loaded))
        recorder.gauge("models_bytes", "Memory of embeddings and heads.", lambda: sum(r.n_bytes for r in self._here()))
        idle = "Conversations that are kept for their next turn."
        recorder.gauge("conversations_idle", idle, lambda: sum(len(r.engine.conversations) for r in self._here()))
        tokens = "Tokens of them, which servers hold."
        recorder.gauge("conversations_tokens", tokens, lambda: sum(r.engine.conversations.tokens for r in self._here()))

    async def close(self) -> None:
        """End all sessions and memberships."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._loaded:
            await self._loaded.popitem()[1].resident.end()

    def _here(self) -> list[Resident]:
        return [loaded.resident for loaded in self._loaded.values()]

    async def _reason(self, checkpoint: Checkpoint) -> str:
        limits = self._options.routes
        try:
            async with asyncio.timeout(limits.plan_s):
                await self._membership(checkpoint).router.plan(Blocks(0, checkpoint.n_blocks))
        except SwarmError as error:
            return str(error)
        except TimeoutError:
            return f"no route was planned within {limits.plan_s:.0f} s"
        return ""

    def _membership(self, checkpoint: Checkpoint) -> Membership:
        """Return a membership to plan with: the one that sessions have, or one that only plans."""
        loaded = self._loaded.get(checkpoint.public_name)
        if loaded is not None:
            return loaded.resident.engine.swarm
        if checkpoint.root not in self._planning:
            dtype = str(expected_dtype(checkpoint, _dtype(self._options.dtype))).removeprefix("torch.")
            wanted = Wanted(checkpoint.root, checkpoint.public_name, checkpoint.n_blocks, dtype)
            self._planning[checkpoint.root] = self._member.of(wanted)
        return self._planning[checkpoint.root]

    # Loading

    def _tried(self, name: str, task: asyncio.Task[Loaded]) -> None:
        del self._loading[name]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.warning("could not load", model=name, why=str(error) if isinstance(error, SwarmError) else repr(error))

    async def _load(self, name: str, checkpoint: Checkpoint) -> Loaded:
        async with self._room:
            await self._make_room(name, await asyncio.to_thread(ends_bytes, checkpoint, _dtype(self._options.dtype)))
            _log.info("loading", model=name)
            loaded = await self._read(name, checkpoint)
            if self._checkpoints.get(name) is checkpoint:
                self._loaded[name] = loaded
            else:  # it was dropped meanwhile
                await loaded.resident.retire()
        _log.info("loaded", model=name, memory_mb=loaded.resident.n_bytes >> 20)
        return loaded

    async def _make_room(self, name: str, needed: int) -> None:
        """Let models leave until one more fits. Raises Rejected."""
        most = self._bytes_max
        if needed > most:
            why = f"embeddings and head of {name!r} take {needed >> 20} MiB, and --ends-memory allows {most >> 20} MiB"
            raise Rejected(Problem(503, "overloaded", why, "model_too_large"))
        gone = leaving(self._here(), needed, most)
        if gone is None:
            why = "the models in memory are all in use, and one more does not fit"
            raise Rejected(Problem(503, "overloaded", why, "no_memory", retry_after_s=5.0))
        for leaver in [key for key, loaded in self._loaded.items() if loaded.resident in gone]:
            _log.info("unloading", model=leaver)
            await self._loaded.pop(leaver).resident.retire()
        if gone:
            return_free_memory()

    async def _read(self, name: str, checkpoint: Checkpoint) -> Loaded:
        options = self._options

        def load() -> tuple[TokenEnds, frozenset[int]]:
            ends = load_ends(checkpoint, dtype=_dtype(options.dtype))
            return TokenEnds(ends, checkpoint.traits), stop_ids(ends)

        ends, stop = await asyncio.to_thread(load)
        tokenizer = await asyncio.to_thread(
            load_tokenizer,
            checkpoint.model,
            revision=options.revision,
            token=options.token,
            cache_dir=options.cache_dir,
        )
        if tokenizer.eos_token_id is not None:
            stop |= {tokenizer.eos_token_id}
        wanted = Wanted(checkpoint.root, name, checkpoint.n_blocks, str(ends.dtype).removeprefix("torch."))
        entered = AsyncExitStack()
        membership: Membership = await entered.enter_async_context(self._member.of(wanted))
        engine = Engine(checkpoint, ends, membership, self._compute, self._limits)
        resident = Resident(engine, entered, ends.n_bytes, self._now())
        model = Model(name, checkpoint.root, resident, tokenizer, stop, TokenTexts(tokenizer))
        return Loaded(model, resident)


def stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end an answer, as the checkpoint's generation config or its config says."""
    config: Any = model.generation_config
    given = getattr(config, "eos_token_id", None)
    given = model.config.eos_token_id if given is None else given
    ids = given if isinstance(given, list) else [given]
    return frozenset(token for token in ids if token is not None)


def _dtype(name: str) -> torch.dtype | str:
    return "auto" if name == "auto" else torch.__dict__[name]


@asynccontextmanager
async def serving(models: Models) -> AsyncIterator[Models]:
    """End the models at the end of the block."""
    try:
        yield models
    finally:
        await models.close()
