"""The speed of a span, and the memory of a cached token: measured, never assumed."""

import functools
import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from swarm.compute.controlgroups import bytes_left
from swarm.dht.records import RECORD
from swarm.limits import limit
from swarm.model.growing import PAGE_TOKENS
from swarm.model.span import Span
from swarm.server.pool import Prices


@dataclass(frozen=True, slots=True)
class MeasureLimits:
    """How long a measurement is, and which share of the free memory a server takes."""

    decode_steps: int = limit(16, "steps", "timed; the median counts")
    prefill_tokens: int = limit(128, "tokens", "of the prompt that is timed")
    weights_share: float = limit(0.6, "share", "of the free memory for weights, when a server chooses its blocks")
    cuda_share: float = limit(0.9, "share", "of the memory left after loading for the KV pool; the rest: activations")
    host_share: float = limit(0.6, "share", "the same of host memory, which other programs use too")
    state_tokens_max: int = limit(64, "tokens", "that a recurrent state counts as, where there are keys and values too")
    pool_tokens_max: int = limit(1 << 22, "tokens", "of a KV pool; more memory is left free")


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second through the whole span, one session at a time."""

    decode_tps: float
    prefill_tps: float


def measure_throughput(
    span: Span, clock: Callable[[], float] = time.perf_counter, limits: MeasureLimits = MeasureLimits()
) -> Throughput:
    """Time a short prefill, warm, and single-token steps behind it. Runs in the compute thread; takes seconds."""
    prompt = torch.randn(1, limits.prefill_tokens, span.hidden_size, dtype=span.dtype, device=span.device) * 0.1

    def seconds(hidden: Tensor) -> float:
        began = clock()
        span.forward(hidden, cache=cache).sum().item()  # item(): wait for the device
        return clock() - began

    for _ in range(2):  # the first pays for allocating, loading and compiling
        cache = span.new_cache()
        prefill_s = seconds(prompt)
    decode_s = median(seconds(prompt[:, :1]) for _ in range(limits.decode_steps))
    return Throughput(round(1 / decode_s, 2), round(limits.prefill_tokens / prefill_s, 2))


def device_name(device: torch.device, facts: Path = Path("/proc/cpuinfo")) -> str:
    """Return the device's name for people: of the GPU or the processor, or "cpu" or "mps".

    Behind a processor's stand the instructions that torch uses there and torch's version: machines with all three the
    same compute alike (`swarm.client.planning.promise`). facts: where Linux tells the processor's name.
    """
    if device.type == "cuda":
        return _shown(torch.cuda.get_device_name(device))
    processor = _processor(facts) if device.type == "cpu" else None
    if processor is None:
        return device.type
    kernels = f", {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__.partition('+')[0]}"
    return _shown(processor)[: RECORD.device_chars - len(kernels)].strip() + kernels


@functools.cache
def _processor(facts: Path) -> str | None:
    """Return the processor's name, as Linux tells it."""
    try:
        found = re.search(r"^model name\s*:\s*(\S.*)$", facts.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return None if found is None else re.sub(r"\((?:R|TM)\)|@.*|\bCPU\b", "", found[1])


def _shown(name: str) -> str:
    """Return a name as records can carry it."""
    printable = "".join(letter for letter in " ".join(name.split()) if letter.isprintable())
    return printable.strip()[: RECORD.device_chars].strip()


def cache_prices(span: Span, limits: MeasureLimits = MeasureLimits()) -> Prices:
    """Return the cost of cached positions on this span, from the tensors that two of them leave."""
    cache = span.new_cache()
    token = torch.zeros(1, 1, span.hidden_size, dtype=span.dtype, device=span.device)
    sizes = []
    for _ in range(2):
        span.forward(token, cache=cache)
        sizes.append(cache.nbytes)
    grown = sizes[1] - sizes[0]
    states = sizes[0] - grown
    token_bytes = max(1, grown, states // limits.state_tokens_max)
    windows: dict[int, float] = defaultdict(float)
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None and layer.values is not None:
            lookback = getattr(layer, "lookback", layer.sliding_window - 1)
            windows[lookback + 1] += (layer.keys.nbytes + layer.values.nbytes) / 2 / token_bytes
    return Prices(token_bytes, tuple(sorted(windows.items())), max(0, states) // token_bytes, PAGE_TOKENS)


def tokens_that_fit(
    span: Span, prices: Prices, cache_bytes: int | None, limits: MeasureLimits = MeasureLimits()
) -> int:
    """Return how many tokens fit into so many bytes; None: into the memory that the device has left."""
    if cache_bytes is None:
        share = limits.cuda_share if span.device.type == "cuda" else limits.host_share
        cache_bytes = int(free_bytes(span.device) * min(share, 1 / (1 + copied_share(span))))
    slack = span.shared.limits.growing.slack_share  # buffers grow by one part in so many more than they need
    return min(limits.pool_tokens_max, max(1, cache_bytes * slack // (slack + 1) // prices.token_bytes))


def copied_share(span: Span) -> float:
    """Return how much of a session's past attention copies at a time, as a share of it.

    A step of several positions copies one block's keys and values for each head that shares them (`repeat_kv` of
    `transformers`). A span with integer weights copies them once.
    """
    config = span.model.config.get_text_config(decoder=True)
    heads, shared = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    groups = heads // shared if isinstance(heads, int) and isinstance(shared, int) and shared else 1
    copies = 1 if span.shared.aligned else groups if groups > 1 else 0
    kinds = [span.traits.kinds[block] for block in span.blocks]
    return copies / max(1, sum(kind in {"full", "sliding"} for kind in kinds))


def blocks_that_fit(bytes_per_block: int, device: torch.device, limits: MeasureLimits = MeasureLimits()) -> int:
    """Return how many blocks' weights leave room for the KV pool and for activations; 0 if not even one does."""
    return int(free_bytes(device) * limits.weights_share) // max(1, bytes_per_block)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device; of the host's, no more than this process's control groups leave it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available, left = int(psutil.virtual_memory().available), bytes_left()
    return available if left is None else min(available, left)
