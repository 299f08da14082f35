"""The health page in front of 1,000 servers of 20 models: reading the DHT, answering requests, memory.

    python benchmarks/health.py [--servers 1000] [--models 20] [--quick] [--json PATH]

Everything is real: DHT nodes on p2pd, signed records, listeners that shake hands, and `swarm-health` as a process. The
servers are listeners in this process without a model. Needs the extra `health`.
"""

import argparse
import asyncio
import concurrent.futures
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

from benchmarks.common import SEED, Samples, table, write_json
from swarm.dht.node import NodeConfig, SwarmNode, open_node
from swarm.dht.records import Announcement, Span, sign_announcement
from swarm.dht.validator import Entry
from swarm.events import configure_events
from swarm.identity import Identity
from swarm.net.channel import ignore
from swarm.net.endpoint import Endpoint
from swarm.net.listener import Listener
from swarm.net.noise import ChannelKey
from swarm.net.p2p import P2PConfig

NETWORK = "bench"
N_BLOCKS = 80
NODES = 6  # DHT nodes that store
CLIENTS = 8  # nodes that announce: each may store so many entries at once
REFRESH_S = 25.0
REQUESTS_S = 50


def main() -> None:
    """Run it."""
    arguments = _arguments()
    if arguments.load:
        print(json.dumps(_load(arguments.load, arguments.seconds)))
        return
    configure_events("warning")
    with tempfile.TemporaryDirectory() as folder:
        samples, facts = uvloop.run(_measure(arguments, Path(folder)))
    rows = [
        [s.name, f"{s.median:.1f}", f"{s.percentile(0.95):.1f}", f"{max(s.ms):.1f}", str(len(s.ms))] for s in samples
    ]
    title = f"{arguments.servers} servers, {arguments.models} models of {N_BLOCKS} blocks (ms)"
    table(title, ("", "median", "p95", "max", "n"), rows)
    print(f"memory of swarm-health: {facts['memory_mb']} MB at most; all online after {facts['all_online_s']:.1f} s")
    write_json(arguments.json, "health", SEED, samples, **facts)


async def _measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[Samples], dict[str, float]]:
    async with AsyncExitStack() as stack:
        nodes = await _nodes(stack, folder)
        clients = [
            await stack.enter_async_context(
                open_node(NodeConfig(NETWORK, P2PConfig(None, None), nodes[0].addresses), clock=time.time)
            )
            for _ in range(CLIENTS)
        ]
        servers = [await _server(stack) for _ in range(arguments.servers)]
        began = time.monotonic()
        await _announce(clients, servers, arguments.models)
        print(f"announced within {time.monotonic() - began:.1f} s", flush=True)
        refreshing = asyncio.create_task(_refresh(clients, servers, arguments.models))
        stack.callback(refreshing.cancel)
        return await asyncio.to_thread(_watch, arguments, folder, nodes[0].addresses[0])


async def _nodes(stack: AsyncExitStack, folder: Path) -> list[SwarmNode]:
    nodes: list[SwarmNode] = []
    for i in range(NODES):
        path = folder / f"node-{i}"
        Identity.generate().save(path)
        peers = nodes[0].addresses if nodes else ()
        config = NodeConfig(NETWORK, P2PConfig(path, ("127.0.0.1", 0)), peers)
        nodes.append(await stack.enter_async_context(open_node(config, clock=time.time)))
    return nodes


async def _server(stack: AsyncExitStack) -> tuple[Endpoint, str]:
    me = Endpoint(Identity.generate(), ChannelKey(), NETWORK)
    listener = Listener(me, "127.0.0.1", 0)
    await listener.start(ignore)
    stack.push_async_callback(listener.close)
    return me, f"127.0.0.1:{listener.address.port}"


async def _refresh(clients: Sequence[SwarmNode], servers: Sequence[tuple[Endpoint, str]], models: int) -> None:
    while True:
        await asyncio.sleep(REFRESH_S)
        await _announce(clients, servers, models)


async def _announce(clients: Sequence[SwarmNode], servers: Sequence[tuple[Endpoint, str]], models: int) -> None:
    """Sign everybody's record and store it, spread over the clients; the first of each model tells its name, too."""
    entries: list[list[Entry]] = [[] for _ in clients]
    for i, (me, address) in enumerate(servers):
        data = sign_announcement(_announcement(me, address, i // models, i % models), me.identity)
        facts = clients[0].gate.facts(data)
        mine = entries[i % len(clients)]
        mine.append(Entry(data, facts, facts.span))
        if i < models:
            mine.append(Entry(data, facts, facts.model))
    await asyncio.gather(*(client.put(part) for client, part in zip(clients, entries, strict=True)))


def _announcement(me: Endpoint, address: str, n: int, model: int) -> Announcement:
    first = n * 8 % N_BLOCKS
    now = time.time()
    return Announcement(
        network=NETWORK,
        public_key=me.identity.public_key.hex(),
        root=f"{model:064x}",
        model=f"org/model-{model}",
        n_blocks=N_BLOCKS,
        blocks=Span(first, first + 8),
        sequence=int(now * 1000),
        issued=now,
        expires=now + 60,
        version="0.1.0",
        numeric_class="bfloat16",
        addresses=(address,),
        channel_key=me.key.public.hex(),
        decode_tps=40.0,
        prefill_tps=900.0,
        free_tokens=8192,
        state="online",
        public_name=f"volunteer {n}",
        device="cpu",
    )


def _watch(arguments: argparse.Namespace, folder: Path, address: str) -> tuple[list[Samples], dict[str, float]]:
    ready = folder / "ready.json"
    options = ["--listen", "127.0.0.1:0", "--network", NETWORK, "--initial-peers", address, "--log-level", "warning"]
    files = ["--database", str(folder / "health.sqlite"), "--ready-file", str(ready)]
    began = time.monotonic()
    page = subprocess.Popen([sys.executable, "-m", "swarm.monitor.cli", *options, *files])
    try:
        while not ready.exists():
            assert page.poll() is None, "swarm-health ended"
            time.sleep(0.05)
        url = json.loads(ready.read_text())["url"]
        first = Samples("first reading of the DHT", [1000 * _state(url)["reading"]["took_s"]])
        while _state(url)["servers_online"] < arguments.servers and time.monotonic() - began < 120:
            time.sleep(0.2)
        all_online_s = time.monotonic() - began
        loading = [sys.executable, __file__, "--load", url, "--seconds", str(arguments.seconds)]
        load = subprocess.run(loading, capture_output=True, text=True, check=True)
        later = Samples("later readings", [1000 * _state(url)["reading"]["took_s"]])
        for _ in range(arguments.readings):
            time.sleep(31)
            later.ms.append(1000 * _state(url)["reading"]["took_s"])
        state = _state(url)
        assert len(state["models"]) == arguments.models
        memory = int(Path(f"/proc/{page.pid}/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
        samples = [first, later, Samples(f"GET /api/v1/state, {REQUESTS_S} a second", json.loads(load.stdout))]
        online = {"servers_online": state["servers_online"], "servers_announced": state["servers_announced"]}
        return samples, {"memory_mb": memory, "all_online_s": all_online_s, **online}
    finally:
        page.terminate()
        page.wait()


def _state(url: str) -> dict:
    with urllib.request.urlopen(url + "/api/v1/state", timeout=30) as answer:
        return json.load(answer)


def _load(url: str, seconds: float) -> list[float]:
    """Ask for the state, REQUESTS_S times a second, and time every answer in ms from when it was due."""
    connections = [http.client.HTTPConnection(url.removeprefix("http://"), timeout=30) for _ in range(8)]
    due = [i / REQUESTS_S for i in range(int(seconds * REQUESTS_S))]
    began = time.perf_counter()

    def client(which: int) -> list[float]:
        times = []
        for at in due[which :: len(connections)]:
            time.sleep(max(0.0, began + at - time.perf_counter()))
            connections[which].request("GET", "/api/v1/state")
            answer = connections[which].getresponse()
            answer.read()
            assert answer.status == 200
            times.append(1000 * (time.perf_counter() - began - at))
        return times

    with concurrent.futures.ThreadPoolExecutor(len(connections)) as pool:
        return [ms for times in pool.map(client, range(len(connections))) for ms in times]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The health page in front of many servers.")
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=40.0, help="of requests: a reading falls into them")
    parser.add_argument("--readings", type=int, default=2, help="more readings to wait for")
    parser.add_argument("--quick", action="store_true", help="60 servers of 3 models, for a test")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.servers, arguments.models, arguments.seconds, arguments.readings = 60, 3, 2.0, 0
    return arguments


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
