"""What sessions cost in memory: opened for many positions, used for few, closed.

    python benchmarks/memory.py [--dtype fp32] [--sessions 100] [--open 8192] [--use 128] [--quick]

One server of one thread. Its resident memory is read before, while the sessions hold what they have used, and a while
after they have been closed; compared with what so many cached tokens take.
"""

import argparse
import tempfile
import time
from pathlib import Path

import psutil
import torch
from common import SEED, Samples, table, write_json
from load import BLOCKS, DTYPES, MODELS, Bench, benches, save_checkpoint

SWEEP_S = 16.0  # a server gives memory back to the system every 15 s
PER_CLIENT = 50  # a server takes no more than 60 of one peer


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dtype", choices=DTYPES, default="fp32")
    arguments.add_argument("--family", choices=MODELS, default="llama")
    arguments.add_argument("--sessions", type=int, default=100)
    arguments.add_argument("--open", type=int, default=8192, help="positions that a session is opened for")
    arguments.add_argument("--use", type=int, default=128, help="positions that it has")
    arguments.add_argument("--quick", action="store_true", help="a few sessions, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    count = 4 if options.quick else options.sessions
    dtype = DTYPES[options.dtype]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        save_checkpoint(Path(folder), options.family, dtype, options.seed)
        spans, clients = [f"0:{BLOCKS}"], -(-count // PER_CLIENT)
        with benches(Path(folder), dtype, spans, ("--journal-memory", "0"), clients=clients) as swarms:
            sizes = measure(swarms, count, options.open, options.use)
    model = MODELS[options.family]
    head = int(model.get("head_dim", 64))  # type: ignore[call-overload]
    token_mb = 2 * BLOCKS * int(model["num_key_value_heads"]) * head * dtype.itemsize / 1e6  # type: ignore[call-overload]
    expected = count * options.use * token_mb
    rows = [[name, f"{mb:.1f}", f"{mb - sizes['before']:.1f}"] for name, mb in sizes.items()]
    rows.append([f"{count * options.use} tokens take", "", f"{expected:.1f}"])
    table(f"memory of {count} sessions of {options.use} positions", ["", "resident MB", "more than before"], rows)
    samples = [Samples(name, [mb]) for name, mb in sizes.items()]  # megabytes, not milliseconds
    write_json(options.json, "memory", options.seed, samples, unit="MB", expected=expected)


def measure(swarms: list[Bench], count: int, positions: int, used: int) -> dict[str, float]:
    """Resident megabytes of the server's process, by what was going on."""
    server = psutil.Process(swarms[0].server_pids[0])

    def resident() -> float:
        time.sleep(SWEEP_S)
        return server.memory_info().rss / 1e6

    def round_trip() -> float:
        shares = [len(range(number, count, len(swarms))) for number in range(len(swarms))]
        flows = [swarm.run(swarm.open(share, positions)) for swarm, share in zip(swarms, shares, strict=True)]
        for swarm, its in zip(swarms, flows, strict=True):
            for flow in its:
                swarm.run(flow.prefill(used))
        held = resident()
        for swarm, its in zip(swarms, flows, strict=True):
            swarm.run(swarm.close(its))
        return held

    round_trip()  # what the allocator and the kernels keep for themselves is taken now
    sizes = {"before": resident(), "held": round_trip()}
    sizes["closed"] = resident()
    return sizes


if __name__ == "__main__":
    main()
