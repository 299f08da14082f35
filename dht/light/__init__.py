"""A light reader of the swarm's DHT: py-libp2p alone, without p2pd, hivemind or torch.

    async with open_light(network="public", initial_peers=[...], clock=time.time) as store:
        directory = Directory(store, identity=None, network="public", clock=time.time)

It asks and never answers. py-libp2p runs on trio, in a thread of its own (`host`); the checks of records run in the
caller's asyncio loop (`store`), with the same gate and the same directory as everywhere else.
"""

from swarm.dht.light.store import LightStore, open_light

__all__ = ["LightStore", "open_light"]
