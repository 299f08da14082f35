"""A node of the DHT in a process of its own, for a host of the lab. It announces a record, and says whom it knows.

`python -m tests.support.lab.node REQUEST.json --ready-file PATH` writes a `NodeState` whenever it changes.
`python -m tests.support.lab.node REQUEST.json --lookups PATH` joins as a client, looks up, and writes `Lookups`.
"""

import argparse
import asyncio
import os
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from swarm.commands import Stop, run_until_stopped
from swarm.dht.directory import Directory
from swarm.dht.helper import serve_dial_back
from swarm.dht.node import NodeConfig, SwarmNode, open_node
from swarm.dht.proof import prove
from swarm.dht.records import Announcement, Span
from swarm.errors import Unreachable
from swarm.identity import Identity
from swarm.net.address import Address
from swarm.net.channel import Channel
from swarm.net.endpoint import Endpoint
from swarm.net.noise import ChannelKey
from swarm.net.p2p import P2PConfig

ROOT, N_BLOCKS = "ab" * 32, 12
REFRESH_S = 20.0
LOOK_S = 0.05  # between looks at the routing table


class NodeRequest(BaseModel):
    """How a node takes part.

    port: None to listen nowhere. announce: its public host; "" names none. proven: it calls itself
    a server of the DHT at once; otherwise it is one once others have called it. records: that it announces, each under
    an identity of its own. lookups: of a client.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    identity: str = ""
    port: int | None = None
    announce: str = ""
    initial_peers: tuple[str, ...] = ()
    network: str = "lab"
    proven: bool = False
    records: int = 1
    lookups: int = 0


class NodeState(BaseModel):
    """What a node is.

    known: the peer ids of all nodes that were ever in its routing table. announced, records: how many records it has
    announced, and how many it keeps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    peer_id: str
    addresses: tuple[str, ...]
    serves: bool
    known: tuple[str, ...]
    now_known: tuple[str, ...]
    announced: int
    records: int


class Lookups(BaseModel):
    """What a client measured. found: servers, by each look-up.

    computed_s, waited_s: what it and its p2pd computed until it had joined, and how long they waited for a core
    meanwhile, all threads together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    join_s: float
    computed_s: float
    waited_s: float
    lookup_s: tuple[float, ...]
    found: tuple[int, ...]


def main() -> None:
    """Take part until stopped, or look up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("request", type=Path)
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--lookups", type=Path)
    arguments = parser.parse_args()
    request = NodeRequest.model_validate_json(arguments.request.read_text())
    if arguments.lookups is not None:
        run_until_stopped(lambda stop: _look_up(request, arguments.lookups), "warning")
    else:
        run_until_stopped(lambda stop: _take_part(request, arguments.ready_file, stop), "warning")


def _config(request: NodeRequest) -> NodeConfig:
    listen = None if request.port is None else ("0.0.0.0", request.port)
    announce = (f"/ip4/{request.announce}/tcp/{request.port}",) if request.announce else ()
    p2p = P2PConfig(Path(request.identity) if request.identity else None, listen, announce)
    return NodeConfig(request.network, p2p, request.initial_peers, proven=request.proven)


async def _take_part(request: NodeRequest, state: Path, stop: Stop) -> None:
    identity = Identity.load_or_create(Path(request.identity))
    owners = [identity, *(Identity.generate() for _ in range(request.records - 1))]
    async with open_node(_config(request), clock=time.time) as node, asyncio.TaskGroup() as group:
        if request.port is not None:
            await serve_dial_back(node, Endpoint(identity, ChannelKey(), request.network), _no_dial)
        tasks = [] if request.proven else [group.create_task(prove(node, request.announce))]
        announced = asyncio.Event()
        tasks.append(group.create_task(_announce(node, owners[: request.records], request.network, announced)))
        tasks.append(group.create_task(_tell(node, state, announced, len(owners))))
        await stop.wait()
        for task in tasks:
            task.cancel()


async def _announce(node: SwarmNode, owners: list[Identity], network: str, announced: asyncio.Event) -> None:
    directories = [Directory(node, identity=owner, network=network, clock=time.time) for owner in owners]
    while True:
        for number, (owner, directory) in enumerate(zip(owners, directories, strict=True)):
            await directory.announce(_announcement(owner, network, number % 3))
        announced.set()
        await asyncio.sleep(REFRESH_S)


async def _tell(node: SwarmNode, path: Path, announced: asyncio.Event, records: int) -> None:
    known, before = set[str](), None
    while True:
        now = node.neighbours()
        known.update(now)
        state = NodeState(
            peer_id=node.peer_id,
            addresses=node.addresses,
            serves=node.serves,
            known=tuple(sorted(known)),
            now_known=tuple(sorted(now)),
            announced=records if announced.is_set() else 0,
            records=len(node.storage),
        )
        if state != before:
            partial = path.with_suffix(".partial")
            partial.write_text(state.model_dump_json())
            partial.rename(path)
            before = state
        await asyncio.sleep(LOOK_S)


async def _look_up(request: NodeRequest, path: Path) -> None:
    before, began = _scheduled(os.getpid()), time.perf_counter()
    async with open_node(_config(request), clock=time.time) as node:
        join_s = time.perf_counter() - began
        parts = zip(before, _scheduled(os.getpid()), _scheduled(node.p2pd_pid), strict=True)
        computed_s, waited_s = (own - earlier + p2pd for earlier, own, p2pd in parts)
        directory = Directory(node, identity=None, network=request.network, clock=time.time)
        took, found = list[float](), list[int]()
        for _ in range(request.lookups):
            began = time.perf_counter()
            found.append(len(await directory.servers(ROOT, N_BLOCKS)))
            took.append(time.perf_counter() - began)
            await asyncio.sleep(0.2)
    measured = Lookups(
        join_s=join_s, computed_s=computed_s, waited_s=waited_s, lookup_s=tuple(took), found=tuple(found)
    )
    path.write_text(measured.model_dump_json())


def _scheduled(pid: int | None) -> tuple[float, float]:
    """Return the seconds that a process has computed, and those that it has waited for a core."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    nanoseconds = [task.joinpath("schedstat").read_text().split() for task in tasks]
    return sum(int(ran) for ran, _, _ in nanoseconds) / 1e9, sum(int(waited) for _, waited, _ in nanoseconds) / 1e9


def _announcement(owner: Identity, network: str, span: int) -> Announcement:
    now = time.time()
    return Announcement(
        network=network,
        public_key=owner.public_key.hex(),
        root=ROOT,
        model="lab/model",
        n_blocks=N_BLOCKS,
        blocks=Span(4 * span, 4 * span + 4),
        sequence=int(now * 1000),
        issued=now,
        expires=now + 60,
        version="0.1.0",
        numeric_class="float32",
        addresses=("11.250.0.1:4000",),
        channel_key="cd" * 32,
        state="online",
    )


async def _no_dial(address: Address, *_: object) -> Channel:
    """Records of the lab's nodes lead nowhere."""
    raise Unreachable(str(address), (), 0.0)


if __name__ == "__main__":
    main()
