"""Time to the first token for prompts of 128 to 8,192 tokens over two servers, overlapped or not.

    python benchmarks/prefill.py [--dtype bf16] [--hops 2] [--tokens 128,512,1024,2048,8192] [--quick]

A prompt travels in chunks that are under way together, so that both servers (one thread each) work at the same time.
Without overlap the next chunk leaves when the one before has come back; then they are as large as a message may be, or
as the others, whatever is quicker.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from common import SEED, Samples, table, write_json
from load import BLOCKS, DTYPES, Bench, bench, save_checkpoint

from swarm.client.session.limits import ChunkLimits, SessionLimits
from swarm.protocol.outbox import OutboxLimits
from swarm.protocol.tensors import CHUNK_BYTES

WAYS = ("overlapped", "one by one", "one by one, large")


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
            measured = {length: swarm.run(measure(swarm, length, options.rounds)) for length in lengths}
    rows = []
    for length, (overlapped, *waiting) in measured.items():
        ms, other_ms = overlapped.median, min(each.median for each in waiting)
        rows.append([f"{length}", f"{ms:.0f}", f"{other_ms:.0f}", f"{ms / other_ms:.2f}"])
    table(f"prefill, {options.dtype}, {options.hops} servers", ["tokens", "overlapped ms", "one by one", "ratio"], rows)
    write_json(
        options.json,
        "prefill",
        options.seed,
        [each for samples in measured.values() for each in samples],
        dtype=options.dtype,
    )


async def measure(swarm: Bench, length: int, rounds: int) -> list[Samples]:
    """Samples of a prompt whose chunks overlap, and of those whose chunks wait for each other."""
    samples = {way: Samples(f"{length}, {way}") for way in WAYS}
    largest = CHUNK_BYTES // (swarm.width * swarm.dtype.itemsize)
    for _ in range(rounds):
        for way, taken in samples.items():
            chunks = ChunkLimits(chunk_tokens_min=largest) if way.endswith("large") else ChunkLimits()
            outbox = OutboxLimits() if way == "overlapped" else OutboxLimits(in_flight_max=1)
            limits = SessionLimits(chunks=chunks, outbox=outbox)
            (flow,) = await swarm.open(1, positions_max=length, limits=limits)
            taken.ms.append(await flow.prefill(length))
            await swarm.close([flow])
    return list(samples.values())


if __name__ == "__main__":
    main()
