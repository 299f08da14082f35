"""Decode throughput and inter-token latency of 1 to 32 sessions on one server, against the stock blocks one by one.

    python benchmarks/decode.py [--dtype bf16] [--family llama] [--sessions 1,2,4,8,16,32] [--hops 1] [--quick]

One server process of one thread holds all blocks of a random model of 110 million parameters (or `--hops` of them share
it). Its sessions decode at once, with hidden states in and out. Compared with what the stock `transformers` blocks do
in this process, one thread as well, one session after another. Both take turns, so that the machine's noise hits both.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from common import SEED, Samples, table, write_json
from load import BLOCKS, DTYPES, MODELS, Bench, StockSession, bench, save_checkpoint, stock_model

PROMPT_TOKENS = 64
ROUNDS = 3


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dtype", choices=DTYPES, default="bf16")
    arguments.add_argument("--family", choices=MODELS, default="llama")
    arguments.add_argument("--sessions", default="1,2,4,8,16,32")
    arguments.add_argument("--hops", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=24, help="of each session in a round")
    arguments.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    counts = [1, 2] if options.quick else [int(count) for count in options.sessions.split(",")]
    steps, rounds = (4, 1) if options.quick else (options.steps, ROUNDS)
    dtype = DTYPES[options.dtype]
    torch.set_num_threads(1)
    size = BLOCKS // options.hops
    spans = [f"{start}:{start + size}" for start in range(0, BLOCKS, size)]
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        save_checkpoint(Path(folder), options.family, dtype, options.seed)
        stock = StockSession(stock_model(Path(folder), dtype))
        with bench(Path(folder), dtype, spans) as swarm:
            measured = measure(swarm, stock, counts, steps, rounds)
    report(options.dtype, options.hops, measured)
    write_json(
        options.json,
        "decode",
        options.seed,
        [sample for samples, _ in measured.values() for sample in samples],
        dtype=options.dtype,
        hops=options.hops,
        family=options.family,
        tokens_per_second={count: rate for count, (_, rate) in measured.items()},
    )


def measure(
    swarm: Bench, stock: StockSession, counts: list[int], steps: int, rounds: int
) -> dict[int, tuple[list[Samples], float]]:
    """For each number of sessions: samples of their steps and of stock ones, and tokens per second of all together."""
    token = torch.randn(1, 1, swarm.width).to(swarm.dtype)
    stock.step(torch.randn(1, PROMPT_TOKENS, swarm.width).to(swarm.dtype))
    found = {}
    for count in counts:
        flows = swarm.run(swarm.open(count))
        for flow in flows:
            swarm.run(flow.prefill(PROMPT_TOKENS))
        swarm.run(swarm.decode(flows, 4))  # to warm up
        for flow in flows:
            flow.ms.clear()
        alone = Samples(f"stock, beside {count}")
        took_s = 0.0
        for _ in range(rounds):
            for _ in range(steps):
                began = time.perf_counter()
                stock.step(token)
                alone.ms.append(1000 * (time.perf_counter() - began))
            took_s += swarm.run(swarm.decode(flows, steps))
        together = Samples(f"{count} sessions", [ms for flow in flows for ms in flow.ms])
        found[count] = [together, alone], count * steps * rounds / took_s
        swarm.run(swarm.close(flows))
    return found


def report(dtype: str, hops: int, measured: dict[int, tuple[list[Samples], float]]) -> None:
    rows = []
    for count, ((together, alone), rate) in measured.items():
        rows.append(
            [
                f"{count} sessions",
                f"{rate:.1f}",
                f"{together.median:.1f}",
                f"{together.percentile(0.99):.1f}",
                f"{alone.median:.1f}",
                f"{rate * alone.median / 1000:.2f}",
            ]
        )
    columns = ["", "tokens/s", "median ms", "p99", "stock ms", "x stock"]
    table(f"decode, {dtype}, {hops} server(s) of one thread", columns, rows)


if __name__ == "__main__":
    main()
