"""Serving as clients see it: prompts of 512 tokens, 256 tokens of output, 1 and 8 clients: tokens/s, TTFT, p99 TTFT.

python benchmarks/serving.py [--dtype bf16] [--hops 1] [--prompt 512] [--output 256] [--quick]
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import torch
from common import SEED, Samples, table, write_json
from load import BLOCKS, DTYPES, Bench, bench, save_checkpoint

CLIENTS = (1, 8)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dtype", choices=DTYPES, default="bf16")
    arguments.add_argument("--hops", type=int, default=1)
    arguments.add_argument("--prompt", type=int, default=512)
    arguments.add_argument("--output", type=int, default=256)
    arguments.add_argument("--requests", type=int, default=2, help="of each client, one after another")
    arguments.add_argument("--quick", action="store_true", help="short ones, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    prompt, output, requests = (32, 4, 1) if options.quick else (options.prompt, options.output, options.requests)
    size = BLOCKS // options.hops
    torch.set_num_threads(1)
    rows, samples, rates = [], [], {}
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        save_checkpoint(Path(folder), "llama", DTYPES[options.dtype], options.seed)
        spans = [f"{start}:{start + size}" for start in range(0, BLOCKS, size)]
        with bench(Path(folder), DTYPES[options.dtype], spans) as swarm:
            for clients in CLIENTS:
                first, rate = swarm.run(measure(swarm, clients, requests, prompt, output))
                samples.append(first)
                rates[clients] = rate
                row = [f"{clients} clients", f"{rate:.1f}", f"{first.median:.0f}", f"{first.percentile(0.99):.0f}"]
                rows.append(row)
    table(f"serving, {options.dtype}, {options.hops} servers", ["", "tokens/s", "median TTFT ms", "p99"], rows)
    write_json(options.json, "serving", options.seed, samples, tokens_per_second=rates, dtype=options.dtype)


async def measure(swarm: Bench, clients: int, requests: int, prompt: int, output: int) -> tuple[Samples, float]:
    """TTFT of all requests, and output tokens per second of all clients together."""
    first = Samples(f"TTFT, {clients} clients")

    async def client() -> None:
        for _ in range(requests):
            (flow,) = await swarm.open(1)
            first.ms.append(await flow.prefill(prompt))
            await flow.decode(output - 1)
            await swarm.close([flow])

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return first, clients * requests * output / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
