"""A stranger floods a bootstrap node with libp2p's own Kademlia records: what the node's memory does.

    python benchmarks/kad_flood.py [--seconds 60] [--streams 32] [--check] [--quick] [--json PATH]

The stranger's p2pd keeps opening streams of /ipfs/kad/1.0.0 and sends ADD_PROVIDER for new keys on each, until the node
ends it. p2pd's own server would keep each record for two days. Memory is that of the node's process and of its p2pd.
"""

import argparse
import asyncio
import hashlib
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
from common import SEED, table, write_json
from hivemind.p2p import PeerID

from swarm.demo.cli import CHECKPOINT
from swarm.demo.local import LocalSwarm
from swarm.dht.messages import KadMessage, varint
from swarm.dht.whereabouts import PROTOCOL
from swarm.net.p2p import Daemon, P2PConfig, running_daemon

ADD_PROVIDER, BATCH, GROWTH_MIB_MAX = 2, 100, 64.0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments.add_argument("--streams", type=int, default=32, help="at once")
    arguments.add_argument("--check", action="store_true", help="exit 1 if the node grows by more than 64 MiB")
    arguments.add_argument("--quick", action="store_true", help="two seconds")
    arguments.add_argument("--json", type=Path, help="where the figures go")
    options = arguments.parse_args()
    options.seconds = 2.0 if options.quick else options.seconds
    with LocalSwarm(CHECKPOINT, ()) as swarm:
        pid = int(swarm.bootstrap.process.pid)
        before = memory_of(pid)
        sent = asyncio.run(flood(swarm.initial_peers[0], options))
        after = memory_of(pid)
    columns = ["process", "MiB before", "MiB after"]
    rows = [[name, f"{before[name]:.0f}", f"{after[name]:.0f}"] for name in before]
    table(f"{sent:,} records in {options.seconds:.0f} s", columns, rows)
    write_json(options.json, "kad_flood", SEED, [], columns=columns, rows=rows, sent=sent, seconds=options.seconds)
    if options.check and any(after[name] - before[name] > GROWTH_MIB_MAX for name in before):
        raise SystemExit(1)


def memory_of(pid: int) -> Mapping[str, float]:
    """Return the memory of a node and of its p2pd, in MiB."""
    node = psutil.Process(pid)
    p2pd = next(child for child in node.children(recursive=True) if "p2pd" in child.name())
    return {name: each.memory_info().rss / 2**20 for name, each in (("node", node), ("p2pd", p2pd))}


async def flood(address: str, options: argparse.Namespace) -> int:
    """Send records until time is over. Returns how many were sent."""
    peer = bytes(PeerID.from_base58(address.rpartition("/")[2]).to_bytes())
    until = time.monotonic() + options.seconds
    sent = 0

    async def stream(daemon: Daemon, number: int) -> None:
        nonlocal sent
        while time.monotonic() < until:
            with suppress(Exception):  # the node ends it: the next one
                _, _, writer = await daemon.open_stream(peer, PROTOCOL, 5.0)
                try:
                    while time.monotonic() < until and not writer.is_closing():
                        batch = b""
                        for _ in range(BATCH):
                            sent += 1
                            key = b"\x12\x20" + hashlib.sha256(b"%d %d" % (number, sent)).digest()
                            message = KadMessage(type=ADD_PROVIDER, key=key).SerializeToString()
                            batch += varint(len(message)) + message
                        writer.write(batch)
                        await asyncio.wait_for(writer.drain(), 5.0)
                        await asyncio.sleep(0)
                finally:
                    writer.close()

    async with running_daemon(P2PConfig(None, None)) as daemon:
        await daemon.connect(address, 5.0)
        await asyncio.gather(*(stream(daemon, number) for number in range(options.streams)))
    return sent


if __name__ == "__main__":
    main()
