"""From the arguments of `swarm-serve` to a loaded span: the checkpoint, the device, the weights and their kernels."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from swarm import config
from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.errors import BadConfiguration
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.classes import numeric_class_of
from swarm.model.kernels import choose_kernels
from swarm.model.loading import block_bytes, expected_dtype, fetch_span, load_span
from swarm.model.quantising import quantisation_for
from swarm.model.span import Span
from swarm.model.weightcache import WeightCache
from swarm.server.arguments import ServeArguments, SpanArguments
from swarm.server.measure import blocks_that_fit, cache_prices, tokens_that_fit
from swarm.server.pool import Prices

Result = TypeVar("Result")
_log = structlog.get_logger("swarm.server")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A span, its KV pool's capacity and prices. rounded: a cache that is to write the span's rounded weights."""

    span: Span
    pool_tokens: int
    prices: Prices
    rounded: WeightCache | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened checkpoint. length: of a span that is to be chosen; loaded: the one that the command chose."""

    loader: "Loader"
    length: int = 0
    loaded: Loaded | None = None


class Loader:
    """Loads spans of one checkpoint on one device."""

    def __init__(self, arguments: SpanArguments, checkpoint: Checkpoint, device: torch.device) -> None:
        """Raise BadConfiguration where the device has no kernels for the weights that are asked for."""
        chosen = quantisation_for(arguments.quantize, checkpoint, device)
        if (chosen.weights or "none") != arguments.quantize:
            _log.info("weights chosen", quantize=chosen.weights or "none", why=chosen.why)
        self.checkpoint = checkpoint
        self.quantize = chosen.weights
        self._arguments, self._device = arguments, device

    @property
    def numeric_class(self) -> NumericClass:
        """The numeric class of all of its spans."""
        dtype = expected_dtype(self.checkpoint, dtype_of(self._arguments))
        return numeric_class_of(self.checkpoint.config, dtype, self.quantize)

    async def fetch(self, blocks: Blocks) -> None:
        """Download and verify the files of a span, and load nothing. Raises SwarmError."""
        await in_thread(partial(fetch_span, self.checkpoint, blocks))

    async def load(self, blocks: Blocks) -> Loaded:
        """Load a span, after the one before it has been dropped. Raises SwarmError."""
        gc.unfreeze()  # the span before this one is garbage now, cycles and all
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return await in_thread(partial(self.load_now, blocks))

    def load_now(self, blocks: Blocks) -> Loaded:
        """Load a span, and see how many tokens its KV pool can hold. Blocks the thread. Raises SwarmError."""
        try:
            return self._loaded(blocks)
        except (torch.OutOfMemoryError, MemoryError):
            why = f"blocks {blocks} do not fit into the memory of {self._device}; host fewer"
            raise BadConfiguration("--blocks", why) from None

    def _loaded(self, blocks: Blocks) -> Loaded:
        arguments, rounded = self._arguments, weight_cache_of(self._arguments)
        span = load_span(
            self.checkpoint,
            blocks,
            dtype=dtype_of(arguments),
            device=self._device,
            quantize=self.quantize,
            rounded=rounded,
        )
        if arguments.threads is not None:
            torch.set_num_threads(arguments.threads)  # of this thread, so that kernels are timed as they will run
        kind = choose_kernels(span)
        _log.info("kernels chosen", weights="as they are" if kind is None else kind.says, batches=span.packs)
        with torch.inference_mode():
            prices = cache_prices(span)
        pool_tokens = arguments.cache_tokens or tokens_that_fit(span, prices, arguments.cache_memory)
        return Loaded(span, pool_tokens, prices, rounded)


def open_model(arguments: ServeArguments) -> Opened:
    """Open the checkpoint; load the span if the command chose it, else find out how many blocks fit."""
    of, wanted = arguments.checkpoint, arguments.span
    checkpoint = open_checkpoint(
        of.model,
        revision=of.revision,
        token=of.token,
        cache_dir=of.cache_dir,
        max_disk_bytes=of.max_disk_space,
        root=of.root,
    )
    if not wanted.automatic:
        blocks = Blocks.parse(wanted.blocks, checkpoint.n_blocks)
        loader = Loader(wanted, checkpoint, device_of(wanted.device))
        return Opened(loader, loaded=loader.load_now(blocks))
    device = device_of(wanted.device)
    loader = Loader(wanted, checkpoint, device)
    if wanted.num_blocks is not None:
        checkpoint.check(Blocks(0, wanted.num_blocks))
        return Opened(loader, wanted.num_blocks)
    one = block_bytes(checkpoint, dtype_of(wanted), loader.quantize)
    # Weights pass through the host's memory on their way to a GPU.
    fit = min(blocks_that_fit(one, place) for place in {device, torch.device("cpu")})
    if fit == 0:
        raise BadConfiguration(
            "--blocks auto", f"one block takes {one >> 20} MB, and {device} or its host has no room for it"
        )
    return Opened(loader, min(fit, checkpoint.n_blocks))


def dtype_of(arguments: SpanArguments) -> torch.dtype | str:
    """Return the dtype that was asked for, or "auto"."""
    return "auto" if arguments.dtype == "auto" else getattr(torch, arguments.dtype)


def weight_cache_of(arguments: SpanArguments) -> WeightCache | None:
    """Return where rounded weights are kept; None: nowhere."""
    if arguments.quantize_cache == "off":
        return None
    return WeightCache(Path(arguments.quantize_cache or config.CACHE_DIR / "weights"))


async def written(rounded: WeightCache | None) -> None:
    """Write rounded weights beside the loop. Cancelled, it ends soon, so that the span can go."""
    if rounded is None:
        return
    writing = asyncio.ensure_future(in_thread(rounded.write))
    try:
        await asyncio.shield(writing)
    finally:
        rounded.stop()
        await asyncio.wait({writing}, timeout=rounded.limits.stop_s)


def device_of(name: str | None) -> torch.device:
    """Return the device of this name, or the one to take where none is named. Raises BadConfiguration."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch built without it asserts
        raise BadConfiguration(f"--device {name}", str(error).splitlines()[0][:200]) from None
    return device


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work in a thread that does not keep a cancelled process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to the waiting task
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done
