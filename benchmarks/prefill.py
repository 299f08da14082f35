"""Time to the first token for prompts of 128 to 8,192 tokens over two servers, overlapped or not.

    python benchmarks/prefill.py [--dtype bf16] [--hops 2] [--tokens 128,512,1024,2048,8192] [--quick]

A prompt travels in chunks that are under way together, so that both servers (one thread each) work at the same time.
Without overlap the next chunk leaves when the one before has come back.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from common import SEED, Samples, table, write_json
from load import BLOCKS, DTYPES, Bench, bench, save_checkpoint

CHUNK_BYTES = 1 << 20  # as the client cuts


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dtype", choices=DTYPES, default="bf16")
    arguments.add_argument("--hops", type=int, default=2)
    arguments.add_argument("--tokens", default="128,512,1024,2048,8192")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--quick", action="store_true", help="one short prompt, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    lengths = [256] if options.quick else [int(length) for length in options.tokens.split(",")]
    dtype, size = DTYPES[options.dtype], BLOCKS // options.hops
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        save_checkpoint(Path(folder), "llama", dtype, options.seed)
        spans = [f"{start}:{start + size}" for start in range(0, BLOCKS, size)]
        with bench(Path(folder), dtype, spans) as swarm:
            pairs = [swarm.run(measure(swarm, length, options.rounds)) for length in lengths]
    rows = [[f"{n}", f"{a.median:.0f}", f"{b.median:.0f}", f"{a.median / b.median:.2f}"] for n, a, b in pairs]
    table(f"prefill, {options.dtype}, {options.hops} servers", ["tokens", "overlapped ms", "one by one", "ratio"], rows)
    write_json(options.json, "prefill", options.seed, [s for _, *both in pairs for s in both], dtype=options.dtype)


async def measure(swarm: Bench, length: int, rounds: int) -> tuple[int, Samples, Samples]:
    """Samples of a prompt in one step, and in steps that wait for each other."""
    together, in_turn = Samples(f"{length}, overlapped"), Samples(f"{length}, one by one")
    whole = max(1, CHUNK_BYTES // (swarm.width * swarm.dtype.itemsize))
    for _ in range(rounds):
        flows = await swarm.open(2, positions_max=length)
        together.ms.append(await flows[0].prefill(length))
        began = time.perf_counter()
        for start in range(0, length, whole):
            await flows[1].prefill(min(whole, length - start))
        in_turn.ms.append(1000 * (time.perf_counter() - began))
        await swarm.close(flows)
    return length, together, in_turn


if __name__ == "__main__":
    main()
