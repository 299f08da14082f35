"""What the serving benchmarks share: checkpoints of a real size, stock blocks to compare with, many sessions at once.

Sessions are measured where they are opened, with hidden states in and out: no client's embeddings, no head. The weights
are random; what is computed has a real model's cost.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client import AutoDistributedModel
from swarm.client.hf.swarm import Swarm
from swarm.client.session.limits import SessionLimits
from swarm.client.session.plan import SessionPlan
from swarm.client.session.session import Session
from swarm.demo.local import LocalSwarm

BLOCKS = 12
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 12,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, object]] = {
    "llama": {**_SHAPE, "intermediate_size": 2048, "num_key_value_heads": 12},  # 110 million parameters, 85 in blocks
    "qwen3_moe": {
        **_SHAPE,
        "intermediate_size": 1024,
        "moe_intermediate_size": 512,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gemma3_text": {
        **_SHAPE,
        "intermediate_size": 2048,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 512,
    },
}


def save_checkpoint(directory: Path, family: str, dtype: torch.dtype, seed: int, **changes: object) -> None:
    """Write a random model of about 100 million parameters. changes: of its config."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **MODELS[family] | changes)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(directory)


def stock_model(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model as `transformers` loads it: what a local user has."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    return model


class StockSession:
    """One session on the stock blocks alone: hidden states in, hidden states out."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder: Any = model.get_decoder()
        self._cache = DynamicCache(config=model.config)

    def step(self, hidden: Tensor) -> Tensor:
        """Run some positions; the final norm, which comes along, is next to nothing."""
        with torch.inference_mode():
            output: Tensor = self._decoder(inputs_embeds=hidden, past_key_values=self._cache, use_cache=True)[0]
        return output


@dataclass(slots=True)
class Flow:
    """One session that decodes: how long each of its steps took, in ms."""

    session: Session
    width: int
    dtype: torch.dtype
    ms: list[float] = field(default_factory=list)

    async def prefill(self, tokens: int) -> float:
        """Run a prompt. Returns ms until its last position is there."""
        hidden = torch.randn(1, tokens, self.width).to(self.dtype)
        began = time.perf_counter()
        await self.session.step(Activations(hidden), want=1)
        return 1000 * (time.perf_counter() - began)

    async def decode(self, steps: int) -> None:
        """Run single positions, one after another."""
        hidden = torch.randn(1, 1, self.width).to(self.dtype)
        for _ in range(steps):
            began = time.perf_counter()
            await self.session.step(Activations(hidden))
            self.ms.append(1000 * (time.perf_counter() - began))

    async def decode_until(self, stop: asyncio.Event) -> None:
        """Run single positions until told to stop."""
        while not stop.is_set():
            await self.decode(1)


class Bench:
    """A client of a local swarm, for sessions without heads. `run` its coroutines in the client's loop."""

    def __init__(self, model: Any, dtype: torch.dtype, server_pids: Sequence[int]) -> None:  # noqa: ANN401
        """model: a DistributedModel that has joined."""
        self.model = model
        self.server_pids = server_pids
        self.client: Swarm = model.backend
        self.width = int(model.config.get_text_config().hidden_size)
        self.dtype = dtype
        self.run = self.client._loop.run

    async def open(
        self, count: int, positions_max: int = 8192, blocks: int = BLOCKS, limits: SessionLimits | None = None
    ) -> list[Flow]:
        """Open sessions through the whole model."""
        plan = SessionPlan(
            root=self.client._root,
            positions_max=positions_max,
            rollback_max=0,
            step_timeout_s=600.0,
            wait_for_blocks_s=0.0,
        )
        opened = [await self.client.membership.open(Blocks(0, blocks), plan, limits) for _ in range(count)]
        return [Flow(session, self.width, self.dtype) for session in opened]

    async def close(self, flows: Sequence[Flow]) -> None:
        """End sessions."""
        for flow in flows:
            await flow.session.close()

    async def decode(self, flows: Sequence[Flow], steps: int) -> float:
        """Let all decode together. Returns the seconds that it took."""
        began = time.perf_counter()
        await asyncio.gather(*(flow.decode(steps) for flow in flows))
        return time.perf_counter() - began


@contextmanager
def bench(directory: Path, dtype: torch.dtype, spans: Sequence[str], options: Sequence[str] = ()) -> Iterator[Bench]:
    """Serve a checkpoint by processes of one thread each, and join as a client."""
    with benches(directory, dtype, spans, options, clients=1) as (only,):
        yield only


@contextmanager
def benches(
    directory: Path, dtype: torch.dtype, spans: Sequence[str], options: Sequence[str] = (), *, clients: int
) -> Iterator[list[Bench]]:
    """The same with several clients, who are strangers to each other."""
    name = str(dtype).removeprefix("torch.")
    with ExitStack() as closing:
        swarm = closing.enter_context(
            LocalSwarm(directory, spans, log_level="warning", options=("--dtype", name, *options))
        )
        server_pids = [server.ready["pid"] for server in swarm.servers]
        joined = []
        for _ in range(clients):
            model = AutoDistributedModel.from_pretrained(
                swarm.model, initial_peers=swarm.initial_peers, network=swarm.network, dtype=dtype
            )
            joined.append(Bench(closing.enter_context(model), dtype, server_pids))
        yield joined
