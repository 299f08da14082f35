"""The models that the gateway answers with: opened at the start, loaded at their first request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import PreTrainedModel

from swarm.client.hf.text import load_tokenizer
from swarm.client.planning.router import Wanted
from swarm.client.session.membership import Member, Membership
from swarm.compute.thread import ComputeThread
from swarm.errors import ModelNotFound
from swarm.gateway.answering import Model
from swarm.gateway.api.dialect import About
from swarm.gateway.engine import Engine, EngineLimits
from swarm.gateway.text import TokenTexts
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.loading import load_ends
from swarm.model.tokens import TokenEnds

_log = structlog.get_logger("swarm.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How models are found and loaded."""

    revision: str | None = None
    token: str | None = None
    cache_dir: Path | None = None
    dtype: str = "auto"


class Models:
    """All models, by name. Several requests for one that is not loaded wait for the same loading."""

    def __init__(
        self, member: Member, compute: ComputeThread, options: ModelOptions, limits: EngineLimits | None = None
    ) -> None:
        self._member = member
        self._compute = compute
        self._options = options
        self._limits = limits
        self._checkpoints: dict[str, Checkpoint] = {}
        self._loading: dict[str, asyncio.Task[Model]] = {}
        self._entered = AsyncExitStack()
        self._engines: list[Engine] = []

    @property
    def names(self) -> list[str]:
        """Names that requests can say."""
        return list(self._checkpoints)

    async def add(self, model: str) -> str:
        """Open a checkpoint: a hub id or a directory. Returns its name. Raises UsageError or CheckpointError."""
        options = self._options
        checkpoint = await asyncio.to_thread(
            open_checkpoint, model, revision=options.revision, token=options.token, cache_dir=options.cache_dir
        )
        self._checkpoints[checkpoint.public_name] = checkpoint
        return checkpoint.public_name

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
        return [task.result() for task in self._loading.values() if task.done() and not task.exception()]

    async def get(self, name: str) -> Model:
        """Return a model, and load it if need be. Raises ModelNotFound or CheckpointError."""
        self.check(name)
        task = self._loading.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._loading[name] = asyncio.create_task(self._load(name, self._checkpoints[name]))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End all sessions and memberships."""
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        for engine in self._engines:
            await engine.close()
        await self._entered.aclose()

    async def _load(self, name: str, checkpoint: Checkpoint) -> Model:
        options = self._options

        def load() -> tuple[TokenEnds, frozenset[int]]:
            ends = load_ends(checkpoint, dtype=_dtype(options.dtype))
            return TokenEnds(ends, checkpoint.traits), stop_ids(ends)

        _log.info("loading", model=name)
        ends, stop = await asyncio.to_thread(load)
        tokenizer = await asyncio.to_thread(
            load_tokenizer,
            checkpoint.model,
            revision=options.revision,
            token=options.token,
            cache_dir=options.cache_dir,
        )
        wanted = Wanted(checkpoint.root, name, checkpoint.n_blocks, str(ends.dtype).removeprefix("torch."))
        membership: Membership = await self._entered.enter_async_context(self._member.of(wanted))
        engine = Engine(checkpoint, ends, membership, self._compute, self._limits)
        self._engines.append(engine)
        _log.info("loaded", model=name, memory_mb=ends.n_bytes >> 20)
        if tokenizer.eos_token_id is not None:
            stop |= {tokenizer.eos_token_id}
        return Model(name, checkpoint.root, engine, tokenizer, stop, TokenTexts(tokenizer))


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
