"""libp2p: one p2pd process under our control, and a supervisor that replaces it when it fails.

What lives on top of one p2pd is built by a function of it (`supervise`), and is built again for the next one.
"""

from swarm.net.p2p.daemon import Daemon, P2PConfig, p2pd, running_daemon
from swarm.net.p2p.multiaddr import multiaddr_of, split_multiaddr
from swarm.net.p2p.supervise import supervise

__all__ = ["Daemon", "P2PConfig", "multiaddr_of", "p2pd", "running_daemon", "split_multiaddr", "supervise"]
