"""Runs in the home of `tests.support.router`: maps ports until stdin ends, renews them at each line."""

import asyncio
import json
import sys

from swarm.events import configure_events
from swarm.net.mapping import MappingLimits, map_ports
from swarm.net.mapping.keeping import all_ways


async def main(by: str, *ports: str) -> None:
    limits, loop = MappingLimits(), asyncio.get_running_loop()

    async def answer(_, writer):
        writer.write(b"here")
        writer.close()

    servers = [await asyncio.start_server(answer, "0.0.0.0", int(port)) for port in ports]
    began_s = loop.time()
    some = None if by == "any" else lambda gateway: [way for way in all_ways(gateway, limits) if way.by == by]
    async with map_ports([int(port) for port in ports], limits, make_ways=some) as mapped:
        while True:
            mappings = [[m.internal, m.external.host, m.external.port, m.by, m.lifetime_s] for m in mapped.mappings]
            found = {"mappings": mappings, "refusals": [*map(str, mapped.refusals)], "took_s": loop.time() - began_s}
            print(json.dumps(found), flush=True)
            if not await asyncio.to_thread(sys.stdin.readline):
                break
            await mapped.renew()
    for server in servers:
        server.close()
    print("gone", flush=True)


if __name__ == "__main__":
    configure_events("info")
    asyncio.run(main(*sys.argv[1:]))
