"""Planning a route among 1,000 servers of a model of 126 blocks, by latency and for throughput. Milliseconds per plan.

    python benchmarks/plan.py [--servers 1000] [--blocks 126] [--plans 15] [--quick] [--json PATH]

Spans of one length, or of many, begin anywhere; speeds, queues and free memory differ, and every server announces 16
measured round trips to peers that could come before or after it. The target is a median below 20 ms. "computing" is the
thread's own time: what a busy machine makes it wait for does not count.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from common import SEED, Samples, interleaved, table, write_json

from swarm.blocks import Blocks
from swarm.client.planning.plan import plan
from swarm.client.planning.preferences import Preferences
from swarm.client.planning.request import Request
from swarm.client.planning.route import Optimize, Route
from swarm.config import PROTOCOL_VERSION
from swarm.dht.records import RECORD, Announcement, Rtt, SignedAnnouncement, Span
from swarm.identity import Identity

TARGET_MS = 20.0
CLIENT_KNOWS = 64  # peers to which the client has measured a round trip
WARM_UP = 2
DENSITIES: dict[str, Callable[[random.Random], int]] = {
    "spans of 2": lambda _: 2,
    "spans of 8": lambda _: 8,
    "spans of 32": lambda _: 32,
    "spans of 1 to 126": lambda draw: draw.randint(1, 126),
    "everybody holds all": lambda _: 126,
}
MODES: tuple[Optimize, ...] = ("latency", "throughput")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--servers", type=int, default=1000)
    arguments.add_argument("--blocks", type=int, default=126)
    arguments.add_argument("--plans", type=int, default=15, help="measured plans of each kind")
    arguments.add_argument("--quick", action="store_true", help="a few plans, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    works: dict[str, Callable[[], object]] = {}
    hops: dict[str, int] = {}
    computing: dict[str, Samples] = {}
    for (name, length), mode in product(DENSITIES.items(), MODES):
        draw = random.Random(options.seed)
        servers = make_servers(draw, options.servers, options.blocks, length)
        work = partial(_plan, draw.sample(servers, min(CLIENT_KNOWS, len(servers))), servers, options.blocks, mode)
        kind = f"{name}, {mode}"
        hops[kind] = [len(work()) for _ in range(WARM_UP)][-1]
        computing[kind] = Samples(f"{kind}, computing")
        works[kind] = partial(_timed, work, computing[kind])
    samples = interleaved(3 if options.quick else options.plans, works)
    report(options.servers, options.blocks, samples, computing, hops)
    every = [*samples.values(), *computing.values()]
    write_json(options.json, "plan", options.seed, every, hops=hops, servers=options.servers)


def _timed(work: Callable[[], object], computing: Samples) -> None:
    began = time.thread_time()
    work()
    computing.ms.append(1000 * (time.thread_time() - began))


def make_servers(
    draw: random.Random, count: int, n_blocks: int, length: Callable[[random.Random], int]
) -> list[SignedAnnouncement]:
    """Draw servers that together hold every block; who measured whom is drawn among possible neighbours."""
    keys = [Identity(draw.randbytes(32)).public_key.hex() for _ in range(count)]
    spans = []
    for index in range(count):
        size = min(length(draw), n_blocks)
        start = index * size % n_blocks if index * size < n_blocks else draw.randint(0, n_blocks - size)
        spans.append(Span(min(start, n_blocks - size), min(start, n_blocks - size) + size))
    return [_server(draw, index, keys, spans, n_blocks) for index in range(count)]


def _server(
    draw: random.Random, index: int, keys: Sequence[str], spans: Sequence[Span], n_blocks: int
) -> SignedAnnouncement:
    start, stop = spans[index]
    near = [i for i, (a, b) in enumerate(spans) if i != index and (a <= stop < b or a < start <= b)]
    rtts = tuple(
        Rtt(keys[i][:16], round(draw.lognormvariate(3.7, 0.7), 1))
        for i in draw.sample(near, min(RECORD.rtts_max, len(near)))
    )
    now = time.time()
    return SignedAnnouncement(
        Announcement(
            protocol=PROTOCOL_VERSION,
            version="1",
            network="public",
            public_key=keys[index],
            root="0" * 64,
            model="benchmark",
            n_blocks=n_blocks,
            blocks=spans[index],
            numeric_class="bfloat16",
            addresses=("192.0.2.1:31330",),
            channel_key="0" * 64,
            decode_tps=round(draw.lognormvariate(6.0, 0.8) / (stop - start), 2),
            load=float(draw.choice((0, 0, 0, 1, 2))),
            free_tokens=draw.choice((100, 50_000, 400_000)),
            state="online",
            rtts=rtts,
            sequence=1,
            issued=now,
            expires=now + 60,
        ),
        b"",
    )


def _plan(
    known: Sequence[SignedAnnouncement], servers: Sequence[SignedAnnouncement], n_blocks: int, mode: Optimize
) -> Route:
    rtts = {signed.announcement.public_key: 10.0 + 3.0 * i for i, signed in enumerate(known)}
    wishes = Preferences(optimize=mode)
    wanted = Blocks(0, n_blocks)
    return plan(
        Request("benchmark", wanted, tuple(servers), preferences=wishes, client_rtts=rtts, positions_needed=2048)
    )


def report(
    count: int, n_blocks: int, samples: dict[str, Samples], computing: dict[str, Samples], hops: dict[str, int]
) -> None:
    """Print medians against the target."""
    rows = [
        (name, str(hops[name]), *(f"{ms:.1f}" for ms in (s.median, s.percentile(0.95), computing[name].median)))
        for name, s in samples.items()
    ]
    columns = ("", "hops", "median ms", "p95", "computing, median")
    table(f"a plan, {count} servers x {n_blocks} blocks (target: a median below {TARGET_MS:.0f} ms)", columns, rows)


if __name__ == "__main__":
    main()
