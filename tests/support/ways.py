"""The ways of a process that others reach at an address."""

from swarm.net.endpoint import Endpoint
from swarm.net.listener import Listener
from swarm.net.traversal import ListeningTraversal


def unhidden(me: Endpoint, listener: Listener) -> ListeningTraversal:
    """Return the ways of a server that moors nowhere, and takes moorings without looking at records."""
    return ListeningTraversal(me, listener, lambda peer, record: None, lambda: b"")
