"""libp2p: one p2pd process under our control, and a supervisor that replaces it when it fails.

A function builds the parts that live on top of one p2pd, and builds them again for the next one (`supervise`).
"""

from swarm.net.p2p.daemon import Daemon, P2PConfig, p2pd, running_daemon
from swarm.net.p2p.multiaddr import first_host, host_of, literal_addresses, multiaddr_of, port_of, split_multiaddr
from swarm.net.p2p.supervise import supervise

__all__ = [
    "Daemon",
    "P2PConfig",
    "first_host",
    "host_of",
    "literal_addresses",
    "multiaddr_of",
    "p2pd",
    "port_of",
    "running_daemon",
    "split_multiaddr",
    "supervise",
]
