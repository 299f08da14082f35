"""Ports that the home router forwards, asked for by PCP, NAT-PMP and UPnP-IGD side by side.

    async with map_ports((31330, 31331)) as mapped:
        mappings = mapped.mappings  # () where no router maps ports; `mapped.refusals` says why
        while True:
            for mapping in mappings:
                print(mapping)  # port 31330 is 1.2.3.4:31330 outside (UPnP)
            mappings = await mapped.changed(mappings)  # () when the ports are lost

Entering takes at most `MappingLimits.probe_s` where no router answers; with `wait=False` no time at all, and
`Mapped.tried` waits. A background task then renews the mappings, asks another gateway as soon as there is one, and
keeps asking one that maps nothing. Leaving removes the mappings. `Mapped.renew_soon` asks again at once, for callers
that saw a new network or a port that no longer answers.

All ports are mapped, or none. The external port can differ from the internal one. A mapping only counts if its external
address is global, so a router behind a carrier's NAT gives none. That the port answers from outside is still to be
proven, by dial-back.

Only the default gateway is asked, and only answers from its address are read. They are hostile input: of bounded size,
validated, and a malformed one is a `MappingFailed` with its reason. UPnP's HTTP and XML are miniupnpc's, in a child
process with limits on memory and time (`upnp.py`).

IPv4 only. IPv6 has no NAT, and firewalls' pinholes for it are not asked for. On Windows no gateway is found.
"""

from swarm.net.mapping.keeping import Mapped, map_ports
from swarm.net.mapping.limits import MappingLimits
from swarm.net.mapping.way import By, Mapping

__all__ = ["By", "Mapped", "Mapping", "MappingLimits", "map_ports"]
