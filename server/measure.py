"""How fast a span is, and how much memory a cached token takes: measured, never assumed."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import psutil
import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from swarm.dht.records import RECORD
from swarm.model.growing import PAGE_TOKENS, SLACK_SHARE
from swarm.model.span import Span
from swarm.server.pool import Prices

DECODE_STEPS = 16
PREFILL_TOKENS = 128
WEIGHTS_SHARE = 0.6  # of the memory that is free when a server decides how many blocks it takes
CUDA_SHARE = 0.9  # of the memory that is left once they are loaded, for the KV pool; the rest is for activations
HOST_SHARE = 0.6  # the same of host memory, which others use too
STATE_TOKENS_MAX = 64  # a recurrent state counts as so many tokens at most, and as all where there is nothing else
POOL_TOKENS_MAX = 1 << 22


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second through the whole span, one session at a time."""

    decode_tps: float
    prefill_tps: float


def measure_throughput(span: Span, clock: Callable[[], float] = time.perf_counter) -> Throughput:
    """Time a short prefill, warm, and single-token steps behind it. Runs in the compute thread; takes seconds."""
    prompt = torch.randn(1, PREFILL_TOKENS, span.hidden_size, dtype=span.dtype, device=span.device) * 0.1

    def seconds(hidden: Tensor) -> float:
        began = clock()
        span.forward(hidden, cache=cache).sum().item()  # item(): wait for the device
        return clock() - began

    for _ in range(2):  # the first pays for what is allocated, loaded or compiled once
        cache = span.new_cache()
        prefill_s = seconds(prompt)
    decode_s = median(seconds(prompt[:, :1]) for _ in range(DECODE_STEPS))
    return Throughput(round(1 / decode_s, 2), round(PREFILL_TOKENS / prefill_s, 2))


def device_name(device: torch.device) -> str:
    """Return what people call the device: "cpu", "mps" or the name of a GPU."""
    if device.type != "cuda":
        return device.type
    name = torch.cuda.get_device_name(device)
    return "".join(letter for letter in name if letter.isprintable()).strip()[: RECORD.device_chars].strip()


def cache_prices(span: Span) -> Prices:
    """What cached positions cost on this span, from the tensors that two of them leave."""
    cache = span.new_cache()
    token = torch.zeros(1, 1, span.hidden_size, dtype=span.dtype, device=span.device)
    sizes = []
    for _ in range(2):
        span.forward(token, cache=cache)
        sizes.append(cache.nbytes)
    grown = sizes[1] - sizes[0]
    states = sizes[0] - grown
    token_bytes = max(1, grown, states // STATE_TOKENS_MAX)
    windows: dict[int, float] = defaultdict(float)
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None and layer.values is not None:
            windows[layer.sliding_window] += (layer.keys.nbytes + layer.values.nbytes) / 2 / token_bytes
    return Prices(token_bytes, tuple(sorted(windows.items())), max(0, states) // token_bytes, PAGE_TOKENS)


def tokens_that_fit(span: Span, prices: Prices, cache_bytes: int | None) -> int:
    """Tokens that fit into so many bytes; None: into what the device has left."""
    if cache_bytes is None:
        cache_bytes = int(free_bytes(span.device) * (CUDA_SHARE if span.device.type == "cuda" else HOST_SHARE))
    # Buffers grow by a sixteenth more than they need.
    return min(POOL_TOKENS_MAX, max(1, cache_bytes * SLACK_SHARE // (SLACK_SHARE + 1) // prices.token_bytes))


def blocks_that_fit(bytes_per_block: int, device: torch.device) -> int:
    """How many blocks' weights leave room for the KV pool and for activations; 0 if not even one does."""
    return int(free_bytes(device) * WEIGHTS_SHARE) // max(1, bytes_per_block)


def free_bytes(device: torch.device) -> int:
    """Free memory of a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)
