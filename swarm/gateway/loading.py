"""Opens the gateway's checkpoints, and loads embeddings, head and tokenizer of one into an engine."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from swarm.client.auditing.auditor import AuditLimits
from swarm.client.planning.preferences import Preferences, Quality
from swarm.client.planning.router import Wanted
from swarm.client.session.membership import Member, Membership
from swarm.compute.thread import ComputeThread
from swarm.gateway.answering import Model
from swarm.gateway.engine import Engine, EngineLimits
from swarm.gateway.resident import Loaded, Resident
from swarm.gateway.routes import RouteLimits
from swarm.gateway.text import TokenTexts
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.loading import ends_bytes, expected_dtype, load_ends
from swarm.model.tokens import TokenEnds


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How models are found and loaded. ends_bytes_max: of all embeddings and heads together; None: half the memory.

    quality, exact: as in `Preferences`, of all routes.
    """

    revision: str | None = None
    token: str | None = None
    cache_dir: Path | None = None
    dtype: str = "auto"
    ends_bytes_max: int | None = None
    audits: AuditLimits = field(default_factory=lambda: AuditLimits(share=0.0))
    routes: RouteLimits = field(default_factory=RouteLimits)
    quality: Quality = "full"
    exact: bool = False

    @property
    def torch_dtype(self) -> torch.dtype | str:
        """The dtype of embeddings and heads; "auto" for the checkpoint's."""
        return "auto" if self.dtype == "auto" else torch.__dict__[self.dtype]

    def membership(self, member: Member, checkpoint: Checkpoint) -> Membership:
        """Return the membership for routes through a model, to be entered."""
        dtype = None
        if self.exact or self.dtype != "auto":
            dtype = str(expected_dtype(checkpoint, self.torch_dtype)).removeprefix("torch.")
        wanted = Wanted(checkpoint.root, checkpoint.public_name, checkpoint.n_blocks, dtype)
        return member.of(wanted, Preferences(quality=self.quality, exact=self.exact), self.audits)


class Loader:
    """Loads models. Those that it has loaded are its caller's."""

    def __init__(
        self,
        member: Member,
        compute: ComputeThread,
        options: ModelOptions,
        limits: EngineLimits | None,
        now: Callable[[], float],
    ) -> None:
        """limits: of the engines. now: in seconds."""
        self._now = now
        self._member = member
        self._compute = compute
        self._options = options
        self._limits = limits

    async def open(self, model: str) -> Checkpoint:
        """Open a checkpoint: a hub id or a directory. Raises UsageError or CheckpointError."""
        options = self._options
        return await asyncio.to_thread(
            open_checkpoint, model, revision=options.revision, token=options.token, cache_dir=options.cache_dir
        )

    async def n_bytes(self, checkpoint: Checkpoint) -> int:
        """Return how many bytes embeddings and head will take. Raises CheckpointError."""
        return await asyncio.to_thread(ends_bytes, checkpoint, self._options.torch_dtype)

    async def load(self, name: str, checkpoint: Checkpoint) -> Loaded:
        """Load a model and enter its membership. Raises CheckpointError."""
        options = self._options
        checkpoint = replace(checkpoint, texts=checkpoint.texts.anew())

        def load() -> tuple[TokenEnds, frozenset[int]]:
            ends = load_ends(checkpoint, dtype=options.torch_dtype)
            return TokenEnds(ends, checkpoint.traits), stop_ids(ends)

        ends, stop = await asyncio.to_thread(load)
        tokenizer = await asyncio.to_thread(checkpoint.texts().tokenizer)
        if tokenizer.eos_token_id is not None:
            stop |= {tokenizer.eos_token_id}
        entered = AsyncExitStack()
        membership = await entered.enter_async_context(options.membership(self._member, checkpoint))
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
