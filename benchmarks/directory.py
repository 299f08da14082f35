"""The costs of a large swarm's directory: bytes of a plan's look-up, messages per node, and routes from samples.

    python benchmarks/directory.py [--servers 1000] [--nodes 100] [--look-ups 24] [--model] [--check] [--json PATH]
    python benchmarks/directory.py --model --measured PATH

Part one runs production nodes and directories over a network in memory, on a virtual clock: servers of one model of 80
blocks announce, then clients look up for plans, and once more when a fifth of the nodes lie. Part two,
--model, computes 10,000 servers and 100,000 clients from part one's measurements (`directory_model.py`), or from those
of an earlier run. No figure is a time that a processor took.
"""

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from common import SEED, table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # production nodes over a network in memory: the tests'

from directory_model import Measured, modelled
from directory_swarm import NETWORK, ROOT, Shape, Swarm

from swarm.dht.records import RECORD, key_id, span_key
from tests.simulation.loop import VirtualLoop

MODEL = key_id(span_key(NETWORK, ROOT))
HOUR_S = 3600.0
BYTES_MAX = 256 << 10  # of one look-up
MESSAGES_MAX = 50.0  # a second and node, of announcements
ROUTES = "route / best route, mean", "a new client's route / with all servers, mean"
RATIO_MAX = 1.05
SUCCESS_MIN = 0.99


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=100, help="that keep records; servers announce through them")
    parser.add_argument("--look-ups", type=int, default=24)
    parser.add_argument("--model", action="store_true", help="compute 10,000 servers and 100,000 clients as well")
    parser.add_argument("--measured", type=Path, help="the JSON of a run, instead of part one")
    parser.add_argument("--quick", action="store_true", help="60 servers and 20 nodes, to see that it works")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    if options.quick:
        options.servers, options.nodes, options.look_ups = 60, 20, 4
    if options.measured is not None:
        measured = json.loads(options.measured.read_text())["measured"]
    else:
        measured = run(Shape(options.nodes, options.servers), options.look_ups, options.seed)
    parts: dict[str, Any] = {"measured": measured}
    if options.model:
        parts["modelled"] = modelled(Measured.of(measured), Shape(2000, 10_000), 100_000, options.seed)
    for name, part in parts.items():
        for about, figures in part.items():
            table(f"{name}: {about}", ("", "value"), [(key, f"{value:,.6g}") for key, value in figures.items()])
    broken = [f"{name}: {what}" for name, part in parts.items() for what in broken_in(part)]
    rows = [
        [f"{name}, {about}: {key}", round(value, 4)]
        for name, part in parts.items()
        for about, figures in part.items()
        for key, value in figures.items()
    ]
    write_json(options.json, "directory", options.seed, [], columns=("", "value"), rows=rows, broken=broken, **parts)
    if options.check and broken:
        sys.exit("\n".join(broken))


def run(shape: Shape, look_ups: int, seed: int) -> dict[str, dict[str, float]]:
    """Run part one. Returns its figures."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(HOUR_S)) as runner:
        return runner.run(_measured(shape, look_ups, seed))


async def _measured(shape: Shape, look_ups: int, seed: int) -> dict[str, dict[str, float]]:
    swarm = Swarm(shape, seed)
    async with AsyncExitStack() as stack:
        await swarm.join(stack, n_readers=8)
        print("joined", flush=True)
        load, stored = await _announcing(swarm)
        print("announced", flush=True)
        search = await swarm.searches(8)
        honest = (await swarm.look_ups(look_ups)).summary()
        liars = swarm.corrupt(0.2)
        await swarm.refresh(1)
        lied_to = (await swarm.look_ups(look_ups)).summary()
    return {
        "swarm": {"servers": shape.servers, "nodes": shape.nodes, "blocks": shape.n_blocks, "liars, later": liars},
        "announcements, messages a second": {
            "of all nodes": sum(load),
            "a server": sum(load) / shape.servers,
            "a node, median": load[len(load) // 2],
            "a node, most": load[-1],
            "keepers of a record": stored,
        },
        "a search for one key": search,
        "look-ups": honest,
        "look-ups, a fifth of the nodes lie": lied_to,
    }


async def _announcing(swarm: Swarm) -> tuple[list[float], float]:
    """Let servers announce until each has a key, and then once more as they always do.

    Returns each node's messages a second, in order, and how many nodes keep a record.
    """
    await swarm.read()
    await swarm.refresh(1)
    swarm.forget()
    served = swarm.network.served
    served.clear()
    await swarm.refresh(1)
    members = [node.member for node, _ in swarm.nodes if node.member is not None]
    load = sorted(served[member.daemon.p2p.peer_id] / RECORD.refresh_s for member in members)
    return load, sum(len(node.storage.of_model(MODEL)) for node, _ in swarm.nodes) / len(swarm.directories)


def broken_in(part: dict[str, dict[str, float]]) -> list[str]:
    """Name the promises that these figures break."""
    broken = []
    for about, figures in part.items():
        if figures.get("bytes, most", 0) > BYTES_MAX:
            broken.append(f"{about}: {figures['bytes, most']:.0f} bytes for one plan")
        if "with a route" in figures and figures["with a route"] < SUCCESS_MIN * figures["look-ups"]:
            broken.append(f"{about}: {figures['with a route']:.0f} of {figures['look-ups']:.0f} look-ups give a route")
        for name in () if "lie" in about else ROUTES:
            if figures.get(name, 1.0) > RATIO_MAX:
                broken.append(f"{about}: {name}: {figures[name]:.3f}")
    if part["announcements, messages a second"]["a node, most"] > MESSAGES_MAX:
        broken.append("announcements: more messages a second than a node is to take")
    return broken


if __name__ == "__main__":
    main()
