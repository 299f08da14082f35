"""A reader's way into the directory: through p2pd where it runs, or through py-libp2p alone.

    async with open_directory("public", peers, access) as directory:
        survey = await directory.survey(root, n_blocks)

p2pd comes with hivemind, on Linux and macOS. py-libp2p comes with the extra `light`, on Windows as well. Search and
checks are the same on both ways. One process has one of the two: their protobuf messages have the same names.
"""

import importlib.util
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from swarm.access import Access
from swarm.config import Way
from swarm.dht.directory import Directory
from swarm.dht.peermemory import PeerMemory, memory_of
from swarm.dht.store import RecordStore
from swarm.errors import BadConfiguration
from swarm.net.reach import is_public


@asynccontextmanager
async def open_directory(
    network: str, initial_peers: Sequence[str], access: Access, way: Way = "auto"
) -> AsyncIterator[Directory]:
    """Join the DHT to read the directory, while the block runs. Nodes that answered before are called, too.

    Raises NetworkError where no initial peer answers; BadConfiguration where the way does not exist here.
    """
    peers = tuple(initial_peers)
    public = access.network_key is None and await is_public(peers)
    memory = memory_of(network, access, public=public)
    async with _opened(network, peers, access, chosen(way), memory) as store:
        yield Directory(store, identity=None, network=network, clock=time.time, public=public)


def chosen(way: Way) -> Way:
    """Return "p2pd" or "light". Raises BadConfiguration if this process cannot go that way.

    auto: p2pd where its program is there, unless this process has loaded py-libp2p already.
    """
    if way == "auto":
        way = "p2pd" if _has_p2pd() and not sys.modules.get("libp2p") else "light"
    needed, other = ("hivemind", "libp2p") if way == "p2pd" else ("libp2p", "hivemind")
    if sys.modules.get(other):
        why = f"{way!r} needs {needed}, and this process has loaded {other}: the two do not share a process"
        raise BadConfiguration("directory", why)
    if importlib.util.find_spec(needed) is None:
        install = "pip install swarm-inference[light]" if way == "light" else "pip install hivemind, or use 'light'"
        raise BadConfiguration("directory", f"{way!r} needs {needed}, which is not installed: {install}")
    return way


def _has_p2pd() -> bool:
    """Whether hivemind is installed with its program, found without running any of it."""
    spec = importlib.util.find_spec("hivemind")
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    return any(Path(place, "hivemind_cli", "p2pd").is_file() for place in places)


@asynccontextmanager
async def _opened(
    network: str, peers: tuple[str, ...], access: Access, way: Way, memory: PeerMemory
) -> AsyncIterator[RecordStore]:
    if way == "light":  # it learns no addresses, and so remembers none
        from swarm.dht.light.reader import open_reader  # noqa: PLC0415 - py-libp2p

        async with open_reader(network, (*peers, *memory.addresses()), time.time, access) as reader:
            yield reader
        return
    from swarm.dht.node import NodeConfig, open_node  # noqa: PLC0415 - hivemind
    from swarm.dht.remembered import remembering  # noqa: PLC0415 - hivemind
    from swarm.net.p2p import P2PConfig  # noqa: PLC0415

    config = NodeConfig(network, P2PConfig(identity=None, listen=None), peers, access, met=memory.addresses())
    async with open_node(config, clock=time.time) as node, remembering(node, memory):
        yield node
