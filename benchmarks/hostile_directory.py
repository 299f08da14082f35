"""One attacker with forty identities floods the directory: an honest client's steps, the health page, honest records.

    python benchmarks/hostile_directory.py [--rounds 4] [--seconds 30] [--identities 40] [--kbit-s 100] [--check]

A bootstrap node, six servers of the demo's checkpoint (two of each third), the health page and a client that decodes,
all on the first core. The attacker has the second one, and a libp2p peer for each identity, connected to every node. So
many bits a second of its requests, over all of them, are: signed records that claim the best servers, of all spans that
begin at an honest server's blocks, half of them at addresses where nobody is and half at an honest server's; copies of
honest records; look-ups of the fullest keys; questions where nobody's peers are, which every node is asked; and pings,
malformed values and requests that are too large. It asks nodes that it is connected to. The bits are those of its
network: a request counts with what libp2p, TCP and IP add.

Stretches with and without the attack take turns; each begins with a session of its own, so with a route. In each
stretch one server is stopped and another one takes its place: under the attack its record comes to full keys.
Kept must be: the 99th percentile of a step's time within 1.2 of that without; the page shows all servers, within its
own time; whoever looks servers up finds all honest ones; no step fails.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from common import SEED, Samples, table, write_json
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from load import Bench

from swarm.client import AutoDistributedModel
from swarm.demo.cli import CHECKPOINT
from swarm.demo.local import LocalProcess, LocalSwarm, Place
from swarm.dht.format import CALLS
from swarm.dht.records import Announcement, branch_of, key_id, packed_text, sign_announcement, span_key, span_subkey
from swarm.dht.sampling import children
from swarm.dht.validator import pack_value
from swarm.errors import SwarmError
from swarm.events import configure_events
from swarm.identity import Identity
from swarm.net.p2p import Daemon, P2PConfig, running_daemon
from tests.support import warm

SPANS = ("0:4", "4:8", "8:12")
N_BLOCKS = 12
P99_FACTOR_MAX = 1.2
PAGE_S = 75.0  # a record's lifetime and a reading of the page
PROMPT, STEPS_MAX = 32, 400
STREAM_BYTES = 600  # beside each request, by `ss -ti`: libp2p's negotiation and framing, 225, and TCP's 7 headers of 52


@dataclass(frozen=True, slots=True)
class Target:
    """What anybody can read. records: of honest servers, as they are announced, and what these say."""

    network: str
    root: str
    nodes: tuple[str, ...]
    records: tuple[tuple[bytes, str], ...]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=4, help="stretches of either kind")
    arguments.add_argument("--seconds", type=float, default=30.0, help="of each stretch")
    arguments.add_argument("--identities", type=int, default=40)
    arguments.add_argument("--kbit-s", type=float, default=100.0, help="of all requests together")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    arguments.add_argument("--quick", action="store_true", help="few identities, a short stretch, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.identities = 1, 6.0, 4
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        served: dict[str, Any] = {"options": ("--dtype", "float32"), "log_level": "warning", "launch": warm.launch}
        swarm = stack.enter_context(LocalSwarm(CHECKPOINT, SPANS * 2, **served))
        page = stack.enter_context(Page(swarm, folder))
        join = {"initial_peers": swarm.initial_peers, "network": swarm.network, "dtype": torch.float32, "audit": 0.0}
        model = stack.enter_context(AutoDistributedModel.from_pretrained(CHECKPOINT, **join))
        client = Bench(model, torch.float32, [server.ready["pid"] for server in swarm.servers])
        attacker = stack.enter_context(Attacker(target_of(swarm, client), cores[-1], options))
        report(Contest(swarm, page, client, attacker).run(options), options)


# The honest side


class Page:
    """The health page of a swarm."""

    def __init__(self, swarm: LocalSwarm, folder: Path) -> None:
        peers = ("--initial-peers", ",".join(swarm.initial_peers), "--network", swarm.network)
        kept = ("--database", str(folder / "health.sqlite"), "--log-level", "error")
        arguments = ("--listen", "127.0.0.1:0", *peers, *kept)
        self._process = LocalProcess("page", "swarm.monitor.cli", arguments, Place(folder), dict(os.environ))

    def __enter__(self) -> "Page":
        self._process.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    def online(self, root: str) -> set[str]:
        """Return the peers that it shows as online."""
        url = f"{self._process.ready['url'].rstrip('/')}/api/v1/models/{root}"
        with suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            return {server["peer_id"] for server in json.load(answer)["servers"] if server["online"]}
        return set()


def target_of(swarm: LocalSwarm, client: Bench) -> Target:
    """Read what the attacker knows."""
    survey = client.run(client.client.membership.router.surveys.read())
    nodes = (*swarm.initial_peers, *(server.ready["addresses"][0] for server in swarm.servers))
    records = tuple((signed.data, signed.announcement.model_dump_json()) for signed in survey.servers)
    return Target(swarm.network, client.client._root, nodes, records)


@dataclass(slots=True)
class Outcome:
    """What the contest showed. missing: honest servers that a look-up did not find, over all look-ups."""

    alone: Samples
    attacked: Samples
    did: Counter[str]
    lookups: int = 0
    missing: int = 0
    failed: int = 0
    page_s: float = 0.0
    is_page_complete: bool = True


class Contest:
    """Stretches with and without the attack."""

    def __init__(self, swarm: LocalSwarm, page: Page, client: Bench, attacker: "Attacker") -> None:
        self._swarm, self._page, self._client, self._attacker = swarm, page, client, attacker
        self._spares = list(swarm.servers[len(SPANS) :])
        self._found = Outcome(Samples("step, no attack", []), Samples("step, attacked", []), Counter())

    def run(self, options: argparse.Namespace) -> Outcome:
        """Take turns. The attack goes on until the page was looked at, after its own reading."""
        found = self._found
        self._stretch(options.seconds / 2)  # warm
        for turn in range(options.rounds):
            newcomer = self._replace(turn)
            found.alone.ms += self._stretch(options.seconds)
            newcomer.wait_ready()
            self._attacker.go()
            began, newcomer = time.monotonic(), self._replace(turn + 1)
            found.attacked.ms += self._stretch(options.seconds)
            newcomer.wait_ready()
            self._look_up()
            self._look_at_page(began)
            found.did += self._attacker.stop()
        return found

    def _stretch(self, seconds: float) -> list[float]:
        """Decode for a while. Returns milliseconds per step."""
        ms: list[float] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            try:
                ms += self._client.run(self._session(until))
            except SwarmError as error:
                print(f"a session failed: {error}", file=sys.stderr)
                self._found.failed += 1
        return ms

    async def _session(self, until: float) -> list[float]:
        (flow,) = await self._client.open(1, positions_max=PROMPT + STEPS_MAX + 1, blocks=N_BLOCKS)
        try:
            await flow.prefill(PROMPT)
            for _ in range(STEPS_MAX):
                if time.perf_counter() >= until:
                    break
                await flow.decode(1)
            return flow.ms
        finally:
            await self._client.close([flow])

    def _replace(self, turn: int) -> LocalProcess:
        """Stop a server that the route may do without; another one of its span comes, under a new identity."""
        index = turn % len(self._spares)
        self._spares[index].stop()
        self._spares[index] = self._swarm.start_server(SPANS[index])
        return self._spares[index]

    @property
    def _honest(self) -> set[str]:
        return {server.ready["peer_id"] for server in (*self._swarm.servers[: len(SPANS)], *self._spares)}

    def _look_up(self) -> None:
        """Look all servers up, as a client that knows none."""
        survey = self._client.run(self._client.client.membership.router.surveys.read())
        self._found.lookups += 1
        self._found.missing += len(self._honest - {signed.announcement.peer_id for signed in survey.servers})

    def _look_at_page(self, began: float) -> None:
        """Wait until the page shows all honest servers, and no other."""
        root = self._client.client._root
        while self._page.online(root) != self._honest:
            if time.monotonic() - began > PAGE_S + self._found.page_s:
                print(f"the page shows {len(self._page.online(root))} servers", file=sys.stderr)
                self._found.is_page_complete = False
                return
            time.sleep(0.5)
        self._found.page_s = max(self._found.page_s, time.monotonic() - began)


# The attacker


class Attacker:
    """The attacker's process."""

    def __init__(self, target: Target, core: int, options: argparse.Namespace) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        given = (target, core, options.identities, options.kbit_s, options.seed, theirs)
        self._process = spawn.Process(target=attack, args=given, daemon=True)

    def __enter__(self) -> "Attacker":
        self._process.start()
        assert self._ours.recv() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.send("end")
        self._process.join(30.0)

    def go(self) -> None:
        """Let it loose."""
        self._ours.send("go")

    def stop(self) -> Counter[str]:
        """Call it back. Returns how many requests of each kind were taken and refused."""
        self._ours.send("stop")
        did = self._ours.recv()
        assert isinstance(did, Counter)
        return did


def attack(target: Target, core: int, identities: int, kbit_s: float, seed: int, orders: Connection) -> None:
    """The attacker's process: wait for orders."""
    configure_events("error")
    os.setsid()  # Linux shares processor time among sessions: in ours, it would take that of the honest processes
    os.sched_setaffinity(0, {core})
    asyncio.run(_attack(target, identities, kbit_s, random.Random(seed), orders))


async def _attack(target: Target, identities: int, kbit_s: float, rng: random.Random, orders: Connection) -> None:
    async with AsyncExitStack() as stack:
        crowd = []
        for _ in range(identities):
            daemon = await stack.enter_async_context(running_daemon(P2PConfig(None, None)))
            for address in target.nodes:
                with suppress(Exception):
                    await daemon.connect(address, 10)
            crowd.append(Liar(Identity.generate(), daemon, target, random.Random(rng.random())))
        orders.send("ready")
        while await asyncio.to_thread(orders.recv) == "go":
            did: Counter[str] = Counter()
            for liar in crowd:
                await liar.look_around()
            flood = asyncio.create_task(_flood(crowd, kbit_s, did))
            assert await asyncio.to_thread(orders.recv) == "stop"
            flood.cancel()
            with suppress(asyncio.CancelledError):
                await flood
            orders.send(did)


async def _flood(crowd: Sequence["Liar"], kbit_s: float, did: Counter[str]) -> None:
    """Send requests from all identities in turn, as many bytes a second as the attacker has."""
    began, sent, turn = time.monotonic(), 0, 0
    async with asyncio.TaskGroup() as group:
        while True:
            ahead_s = 8 * sent / (1000 * kbit_s) - (time.monotonic() - began)
            await asyncio.sleep(max(0.0, ahead_s))
            await crowd[(turn + 1) % len(crowd)].look_around()
            kind, size, work = crowd[turn % len(crowd)].next()
            sent, turn = sent + size, turn + 1
            group.create_task(_count(kind, work, did))


async def _count(kind: str, work: Any, did: Counter[str]) -> None:  # noqa: ANN401 - a call of a generated stub
    try:
        await work
        did[f"{kind}, answered"] += 1
    except Exception:  # noqa: BLE001 - whatever a node answers
        did[f"{kind}, refused"] += 1


class Liar:
    """One identity of the attacker's, and its peer."""

    def __init__(self, me: Identity, daemon: Daemon, target: Target, rng: random.Random) -> None:
        self._me, self._daemon, self._target, self._rng = me, daemon, target, rng
        self._nodes: list[PeerID] = []
        self._honest = [Announcement.model_validate_json(said) for _, said in target.records]
        first = span_key(target.network, target.root)
        own = span_key(target.network, target.root, branch_of(me.public_key.hex()))
        self._keys = [first, own, *children(first)]
        self._at = rng.randrange(100)

    async def look_around(self) -> None:
        """See which nodes it is connected to."""
        connected = await self._daemon.connected()
        nodes = (PeerID.from_base58(address.rpartition("/")[2]) for address in self._target.nodes)
        self._nodes = [node for node in nodes if node.to_bytes() in connected]

    def next(self) -> tuple[str, int, Any]:
        """Return the next request: its kind, its bytes, and the call that makes it."""
        self._at += 1
        if self._at % 8 == 0:
            peer = b"\x12\x20" + self._rng.randbytes(32)
            return "whereabouts", STREAM_BYTES * len(self._nodes), self._daemon.addresses_of(peer)
        kinds = (self._claim, self._claim, self._claim, self._copy, self._look_up, self._look_up, self._nonsense)
        kind, method, request = kinds[self._at % len(kinds)]()
        stub = super(DHTProtocol, DHTProtocol).get_stub(self._daemon.p2p, self._rng.choice(self._nodes))
        return kind, STREAM_BYTES + request.ByteSize(), getattr(stub, method)(request, timeout=10)

    def _claim(self) -> tuple[str, str, Any]:
        """Claim to be the best server there is."""
        like, now, rng = self._rng.choice(self._honest), time.time(), self._rng
        start = rng.choice((0, 4, 8))
        blocks = (start, rng.randrange(start + 1, N_BLOCKS + 1))
        addresses = like.addresses if rng.random() < 0.5 else (f"127.0.0.1:{rng.randrange(1024, 60000)}",)
        claims = {"decode_tps": 1e5, "prefill_tps": 1e6, "free_tokens": 1 << 30, "load": 0.0, "state": "online"}
        owned = {"public_key": self._me.public_key.hex(), "blocks": blocks, "addresses": addresses, "anchors": ()}
        times = {"sequence": int(now * 1000), "issued": now, "expires": now + 60}
        record = sign_announcement(like.model_copy(update={**claims, **owned, **times}), self._me)
        return "claims", "rpc_store", self._store(record, span_subkey(self._me.public_key.hex(), blocks))

    def _copy(self) -> tuple[str, str, Any]:
        """Store an honest record again, as it was or with a bit changed."""
        index = self._rng.randrange(len(self._honest))
        data, its = bytearray(self._target.records[index][0]), self._honest[index]
        if self._rng.random() < 0.5:
            data[self._rng.randrange(len(data))] ^= 1
        return "copies", "rpc_store", self._store(bytes(data), span_subkey(its.public_key, its.blocks))

    def _look_up(self) -> tuple[str, str, Any]:
        """Ask for much with a small message."""
        keys = [key_id(key) for key in self._rng.sample(self._keys, min(CALLS.keys_max, len(self._keys)))]
        return "look-ups", "rpc_find", dht_pb2.FindRequest(keys=keys)

    def _nonsense(self) -> tuple[str, str, Any]:
        rng = self._rng
        if rng.random() < 0.5:
            return "pings", "rpc_ping", dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=rng.randbytes(20)))
        return "nonsense", "rpc_store", self._store(rng.randbytes(rng.choice((0, 8, 3000))), "x")

    def _store(self, record: bytes, subkey: str) -> Any:  # noqa: ANN401 - a generated message
        key = key_id(self._rng.choice(self._keys))
        value = {"keys": [key], "subkeys": [packed_text(subkey)], "values": [pack_value(record)]}
        return dht_pb2.StoreRequest(**value, expiration_time=[time.time() + 59], in_cache=[False])


# The report


def report(found: Outcome, options: argparse.Namespace) -> None:
    """Print and write everything; exit with 1 where a promise is not kept."""
    rows = [
        [each.name, str(len(each.ms)), *(f"{value:.2f}" for value in (each.median, each.percentile(0.99)))]
        for each in (found.alone, found.attacked)
    ]
    columns = ["", "steps", "median ms", "p99 ms"]
    who = f"{options.identities} identities, {options.kbit_s:g} kbit/s"
    table(f"an honest client beside {who}", columns, rows)
    factor = found.attacked.percentile(0.99) / found.alone.percentile(0.99)
    print(f"p99 {factor:.2f} times; {found.failed} sessions failed")
    print(f"{found.lookups} look-ups did not find {found.missing} honest servers")
    print(f"the page showed all servers after at most {found.page_s:.0f} s: {found.is_page_complete}")
    did = [[kind, str(count)] for kind, count in sorted(found.did.items())]
    table("requests of the attacker", ["kind", "count"], did)
    write_json(
        options.json, "hostile_directory", options.seed, [found.alone, found.attacked], columns=columns, rows=rows,
        factor=factor, failed=found.failed, lookups=found.lookups, missing=found.missing, page_s=found.page_s,
        is_page_complete=found.is_page_complete, did=dict(found.did), identities=options.identities,
    )  # fmt: skip
    kept = factor <= P99_FACTOR_MAX or options.quick
    if options.check and not (kept and found.is_page_complete and not found.missing and not found.failed):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
