"""How fast a span is, and how much memory a cached token takes: measured, never assumed."""

import time
from dataclasses import dataclass
from statistics import median

import psutil
import torch

from swarm.dht.records import DEVICE_MAX
from swarm.model.span import Span

DECODE_STEPS = 16
PREFILL_TOKENS = 128
WEIGHTS_SHARE = 0.6  # of the memory that is free when a server decides how many blocks it takes
POOL_SHARE = 0.5  # of the memory that is free when they are loaded
POOL_TOKENS_MAX = 1 << 22


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second through the whole span, one session at a time."""

    decode_tps: float
    prefill_tps: float


def measure_throughput(span: Span) -> Throughput:
    """Time a short prefill and single-token steps behind it. Runs in the compute thread; takes a second or so."""
    cache = span.new_cache()
    prompt = torch.randn(1, PREFILL_TOKENS, span.hidden_size, dtype=span.dtype, device=span.device) * 0.1
    began = time.perf_counter()
    span.forward(prompt, cache=cache).sum().item()  # item(): wait for the device
    prefill_s = time.perf_counter() - began
    token = prompt[:, :1]
    steps_s = []
    for _ in range(DECODE_STEPS):
        began = time.perf_counter()
        span.forward(token, cache=cache).sum().item()
        steps_s.append(time.perf_counter() - began)
    return Throughput(round(1 / median(steps_s), 2), round(PREFILL_TOKENS / prefill_s, 2))


def device_name(device: torch.device) -> str:
    """Return what people call the device: "cpu", "mps" or the name of a GPU."""
    if device.type != "cuda":
        return device.type
    name = torch.cuda.get_device_name(device)
    return "".join(letter for letter in name if letter.isprintable()).strip()[:DEVICE_MAX].strip()


def bytes_per_token(span: Span) -> int:
    """Bytes that one more cached token takes in all layers that keep every token; at least 1."""
    sizes = []
    cache = span.new_cache()
    token = torch.zeros(1, 1, span.hidden_size, dtype=span.dtype, device=span.device)
    for _ in range(2):
        span.forward(token, cache=cache)
        sizes.append(cache.nbytes)
    return max(1, sizes[1] - sizes[0])


def default_pool_tokens(span: Span) -> int:
    """Tokens that fit into half of the device's free memory."""
    return min(POOL_TOKENS_MAX, max(1, int(free_bytes(span.device) * POOL_SHARE) // bytes_per_token(span)))


def blocks_that_fit(bytes_per_block: int, device: torch.device) -> int:
    """How many blocks' weights leave room for the KV pool and for activations; 0 if not even one does."""
    return int(free_bytes(device) * WEIGHTS_SHARE) // max(1, bytes_per_block)


def free_bytes(device: torch.device) -> int:
    """Free memory of a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)
