"""A light reader as a process: py-libp2p and hivemind do not share one. Prints what it found, as JSON."""

import asyncio
import json
import sys
import time

from swarm.access import Access
from swarm.config import load_settings
from swarm.dht.directory import Directory
from swarm.dht.light import open_light
from swarm.errors import SwarmError


async def main(network: str, root: str, n_blocks: int, peers: list[str]) -> None:
    try:
        access = Access.load(load_settings().network_key, None)
        async with open_light(network, peers, time.time, access) as store:
            directory = Directory(store, identity=None, network=network, clock=time.time)
            models = [entry.name for entry in await directory.models()]
            found = await directory.survey(root, n_blocks)
    except SwarmError as error:
        print(json.dumps({"error": type(error).__name__}))
        return
    names = [signed.announcement.public_name for signed in found.servers]
    heavy = [name for name in ("torch", "hivemind", "transformers") if name in sys.modules]
    print(json.dumps({"models": models, "servers": names, "heavy": heavy}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
