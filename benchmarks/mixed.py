"""Inter-token latency of decoding sessions while long prefills keep arriving, against the same without.

    python benchmarks/mixed.py [--dtype bf16] [--sessions 8] [--prompt 2048] [--seconds 20] [--quick]
    python benchmarks/mixed.py --checkpoint swarm/demo/checkpoint --dtype fp32 --sessions 1 --prompt 512 --seconds 4
    python benchmarks/mixed.py --window 4 --check

With --window, one more session sends steps of so many tokens, as with guesses ahead, against single steps such as
the others do. One server of one thread. Stretches of both kinds take turns, so that the machine's noise hits both.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import SEED, Samples, table, write_json
from load import BLOCKS, DTYPES, Bench, Flow, bench, save_checkpoint

from swarm.activations import Activations

ROUNDS = 4
WAITS_MAX, OTHERS_P99_MAX = 1.3, 1.2  # times: a window against a single step, and what the others feel of it


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dtype", choices=DTYPES, default="bf16")
    arguments.add_argument(
        "--checkpoint", type=Path, help=f"of {BLOCKS} blocks; otherwise a random one of 100 million parameters"
    )
    arguments.add_argument("--sessions", type=int, default=8)
    arguments.add_argument("--prompt", type=int, default=2048)
    arguments.add_argument("--seconds", type=float, default=20.0, help="of either kind")
    arguments.add_argument("--window", type=int, default=0, help="tokens of each step of one more session")
    arguments.add_argument("--check", action="store_true", help="fail if a window, or the others, wait too long")
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
            if options.window:
                work = measure_windows(swarm, options.sessions, options.window, seconds / ROUNDS)
            else:
                work = measure(swarm, options.sessions, prompt, seconds / ROUNDS)
            samples = swarm.run(work)
    rows = [[s.name, f"{len(s.ms)}", f"{s.median:.1f}", f"{s.percentile(0.99):.1f}"] for s in samples if s.ms]
    table(f"{options.sessions} sessions decode, {options.dtype}", ["", "count", "median ms", "p99"], rows)
    facts = {"window": options.window} if options.window else {"prompt": prompt}
    ratios = compared(*samples) if options.window else {}
    write_json(options.json, "mixed", options.seed, samples, dtype=options.dtype, **facts, **ratios)
    if options.check and (ratios["waits"] > WAITS_MAX or ratios["others_p99"] > OTHERS_P99_MAX):
        sys.exit(f"a window waits {ratios['waits']:.2f} times a step, the others' p99 {ratios['others_p99']:.2f} times")


def compared(single: Samples, window: Samples, beside_single: Samples, beside_window: Samples) -> dict[str, Any]:
    """Say how a window compares with a single step, for its own session and for the others. Prints it, too."""
    waits = window.median / single.median
    others = beside_window.percentile(0.99) / beside_single.percentile(0.99)
    print(f"a window waits {waits:.2f} times a single step; the others' p99 is {others:.2f} times")
    samples = single, window, beside_single, beside_window
    rows = [[each.name, round(each.median, 1), round(each.percentile(0.99), 1), len(each.ms)] for each in samples]
    columns = ["", "median ms", "p99", "count"]
    return {"waits": round(waits, 3), "others_p99": round(others, 3), "columns": columns, "rows": rows}


async def measure_windows(swarm: Bench, sessions: int, tokens: int, seconds: float) -> list[Samples]:
    """Samples of single steps and of windows of one session, and of the others' steps beside either."""
    *others, one = await swarm.open(sessions + 1)
    for flow in (*others, one):
        await flow.prefill(64)
    await swarm.decode([*others, one], 8)
    await windows_until(one, tokens, after(0.5))
    kinds = [
        (Samples("single steps"), Samples("others beside single steps"), 1),
        (Samples("windows"), Samples("others beside windows"), tokens),
    ]
    for _ in range(ROUNDS):
        for own, beside, size in kinds:
            one.ms.clear()
            stop = after(seconds)
            going = asyncio.create_task(windows_until(one, size, stop))
            beside.ms += await stretch(others, seconds)
            await going
            own.ms += one.ms
    await swarm.close([*others, one])
    return [own for own, _, _ in kinds] + [beside for _, beside, _ in kinds]


def after(seconds: float) -> asyncio.Event:
    """Return an event that is set then."""
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    return stop


async def windows_until(flow: Flow, tokens: int, stop: asyncio.Event) -> None:
    """Send steps of so many tokens, one after another, until told to stop."""
    while not stop.is_set():
        hidden = torch.randn(1, tokens, flow.width).to(flow.dtype)
        began = time.perf_counter()
        await flow.session.step(Activations(hidden))
        flow.ms.append(1000 * (time.perf_counter() - began))


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
    stop = after(seconds)
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
