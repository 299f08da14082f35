"""Machines behind routers, for tests and benchmarks: an internet, homes and networks in Linux network namespaces.

    with Lab() as lab:
        home = lab.site("port_restricted", delay_ms=10)
        host = home.host()
        host.run(["ip", "address"])

`lab.swarm` runs the swarm's commands on such hosts.
"""

from tests.support.lab.lab import Host, Lab, Lan, Site
from tests.support.lab.namespaces import LabError, unavailable
from tests.support.lab.routers import KINDS

__all__ = ["KINDS", "Host", "Lab", "LabError", "Lan", "Site", "unavailable"]
