"""Routes from a sample of a swarm's records, beside routes from all of them. For `directory.py`.

A client believes a claim only as far as its own use has borne it out, and takes a stranger for an ordinary server of
those that it sees (`swarm.client.planning.costs`). So two clients are compared, each with itself given all records:

    new           has used no server yet
    experienced   has used all of them: it believes all claims, which are true here

Both routes are judged by the time that they really take, which is what an experienced client estimates.
"""

import math
import random
import statistics
from collections.abc import Sequence

from swarm.blocks import Blocks
from swarm.client.planning.costs import estimated
from swarm.client.planning.evidence import Evidence, edge_of, key_of
from swarm.client.planning.plan import plan
from swarm.client.planning.request import Request
from swarm.client.planning.route import Route
from swarm.dht.records import SignedAnnouncement
from swarm.errors import NoRoute

NEW_CLIENTS, NEW_CLIENTS_OF_ALL = 15, 100  # their mean counts: of servers that cost them the same they choose by chance


class Judge:
    """Compares the routes of two clients through a sample with their routes through all servers."""

    def __init__(self, everyone: Sequence[SignedAnnouncement], n_blocks: int, draw: random.Random) -> None:
        self._n_blocks, self._draw = n_blocks, draw
        self._true = _experience(everyone)
        self.best_ms = self.experienced_ms(everyone)
        self.new_best_ms = self.new_ms(everyone, NEW_CLIENTS_OF_ALL)

    def experienced_ms(self, servers: Sequence[SignedAnnouncement]) -> float:
        """Return the time in ms of one token on an experienced client's route; infinite where there is none."""
        return self._true_ms(servers, self._true)

    def new_ms(self, servers: Sequence[SignedAnnouncement], count: int = NEW_CLIENTS) -> float:
        """Return the same for so many new clients, their mean."""
        clients = [Evidence(salt=self._draw.randbytes(8)) for _ in range(count)]
        return statistics.mean(self._true_ms(servers, client) for client in clients)

    def _true_ms(self, servers: Sequence[SignedAnnouncement], evidence: Evidence) -> float:
        try:
            route = plan(self._request(servers, evidence))
        except NoRoute:
            return math.inf
        return self._took(route)

    def _took(self, route: Route) -> float:
        hops = list(route.hops)
        return estimated(hops, self._request([hop.signed for hop in hops], self._true)).estimate_ms

    def _request(self, servers: Sequence[SignedAnnouncement], evidence: Evidence) -> Request:
        return Request("org/model", Blocks(0, self._n_blocks), tuple(servers), positions_needed=2048, evidence=evidence)


def _experience(servers: Sequence[SignedAnnouncement]) -> Evidence:
    """Return the evidence of a client to which no server and no announced trip has fallen short of its claim."""
    by_prefix = {signed.announcement.public_key[:16]: signed.announcement for signed in servers}
    blocks = {key_of(signed.announcement): 0.0 for signed in servers}
    trips = {
        edge_of(one, by_prefix[peer]): 0.0
        for one in (signed.announcement for signed in servers)
        for peer, _ in one.rtts
        if peer in by_prefix
    }
    return Evidence(blocks=blocks, trips=trips)
