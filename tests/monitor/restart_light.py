"""A reader whose py-libp2p crashes between two look-ups, as a process. Prints what happened, as JSON."""

import asyncio
import json
import sys
import threading

from swarm.access import EVERYBODY
from swarm.dht.light.reader import LightReader
from swarm.dht.reading import open_directory
from swarm.errors import SwarmError


async def main(network: str, root: str, *peers: str) -> None:
    async with open_directory(network, peers, EVERYBODY, "light") as directory:
        reader = directory._store
        assert isinstance(reader, LightReader)
        found = [len(await directory.servers(root, 12))]
        reader._store._host._token.run_sync_soon(crash)
        while reader._store.alive:
            await asyncio.sleep(0.01)
        found.append(len(await directory.servers(root, 12)))
        restarts = reader.restarts
    threads = [thread.name for thread in threading.enumerate() if thread.name == "libp2p"]
    try:
        async with open_directory(network, ("/ip4/127.0.0.1/tcp/1/p2p/" + peers[0].rpartition("/")[2],), EVERYBODY):
            pass
    except SwarmError as error:
        print(json.dumps({"found": found, "restarts": restarts, "threads": threads, "error": type(error).__name__}))


def crash() -> None:
    raise RuntimeError("py-libp2p has a bug")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
