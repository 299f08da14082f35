"""Inter-token latency of decoding sessions while long prefills keep arriving, against the same without.

    python benchmarks/mixed.py [--dtype bf16] [--sessions 8] [--prompt 2048] [--seconds 20] [--quick]
    python benchmarks/mixed.py --checkpoint swarm/demo/checkpoint --dtype fp32 --sessions 1 --prompt 512 --seconds 4

One server of one thread. Stretches with and without prefills take turns, so that the machine's noise hits both.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import torch
from common import SEED, Samples, table, write_json
from load import BLOCKS, DTYPES, Bench, Flow, bench, save_checkpoint

ROUNDS = 4


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dtype", choices=DTYPES, default="bf16")
    arguments.add_argument(
        "--checkpoint", type=Path, help=f"of {BLOCKS} blocks; otherwise a random one of 100 million parameters"
    )
    arguments.add_argument("--sessions", type=int, default=8)
    arguments.add_argument("--prompt", type=int, default=2048)
    arguments.add_argument("--seconds", type=float, default=20.0, help="of either kind")
    arguments.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    seconds, prompt = (2.0, 256) if options.quick else (options.seconds, options.prompt)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        if options.checkpoint is None:
            save_checkpoint(Path(folder), "llama", DTYPES[options.dtype], options.seed)
        with bench(options.checkpoint or Path(folder), DTYPES[options.dtype], [f"0:{BLOCKS}"]) as swarm:
            samples = swarm.run(measure(swarm, options.sessions, prompt, seconds / ROUNDS))
    rows = [[s.name, f"{len(s.ms)}", f"{s.median:.1f}", f"{s.percentile(0.99):.1f}"] for s in samples if s.ms]
    table(f"{options.sessions} sessions decode, {options.dtype}", ["", "count", "median ms", "p99"], rows)
    write_json(options.json, "mixed", options.seed, samples, dtype=options.dtype, prompt=prompt)


async def measure(swarm: Bench, sessions: int, prompt: int, seconds: float) -> list[Samples]:
    """Samples of decode steps without and with prefills, and of the prefills."""
    flows = await swarm.open(sessions)
    for flow in flows:
        await flow.prefill(64)
    await swarm.decode(flows, 8)
    without, beside, prefills = Samples("decode alone"), Samples("decode beside prefills"), Samples("prefills")
    for _ in range(ROUNDS):
        without.ms += await stretch(flows, seconds)
        stop = asyncio.Event()
        arriving = asyncio.create_task(keep_prefilling(swarm, prompt, stop, prefills))
        beside.ms += await stretch(flows, seconds)
        stop.set()
        await arriving
    await swarm.close(flows)
    return [without, beside, prefills]


async def stretch(flows: list[Flow], seconds: float) -> list[float]:
    """Let all decode for a while. Returns ms per step."""
    for flow in flows:
        flow.ms.clear()
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    await asyncio.gather(*(flow.decode_until(stop) for flow in flows))
    return [ms for flow in flows for ms in flow.ms]


async def keep_prefilling(swarm: Bench, prompt: int, stop: asyncio.Event, prefills: Samples) -> None:
    """Open one session after another for nothing but its prompt."""
    while not stop.is_set():
        flows = await swarm.open(1)
        began = time.perf_counter()
        await flows[0].prefill(prompt)
        prefills.ms.append(1000 * (time.perf_counter() - began))
        await swarm.close(flows)


if __name__ == "__main__":
    main()
