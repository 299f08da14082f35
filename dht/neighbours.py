"""The nodes that one node knows: a bounded routing table, in which those that answer come first.

hivemind's table keeps every stranger for whom a bucket has no place, and takes a caller for as good as a node that
answers. Identities cost nothing: thousands that call once and are gone would be all that a node knows. Here few wait
for a place, and whoever has never answered a call of this node's own is asked before long, and goes if it is silent.
"""

from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.p2p import PeerID


class Neighbours(RoutingTable):  # type: ignore[misc]
    """hivemind's table with bounds. bucket_size: nodes. waiting_max: nodes that wait for a gap in a bucket."""

    def __init__(self, node_id: DHTID, bucket_size: int, waiting_max: int) -> None:
        super().__init__(node_id, bucket_size, 5)  # depth modulo, as Kademlia's paper has it
        self._waiting_max = waiting_max
        self._answered: set[DHTID] = set()

    def add_or_update_node(self, node_id: DHTID, peer_id: PeerID) -> tuple[DHTID, PeerID] | None:
        """Learn of a node, or renew it. Returns the one that hivemind would ask next in a full bucket."""
        stale: tuple[DHTID, PeerID] | None = super().add_or_update_node(node_id, peer_id)
        waiting = self.buckets[self.get_bucket_index(node_id)].replacement_nodes
        while len(waiting) > self._waiting_max:
            del self[next(iter(waiting))]
        return stale

    def add_answering(self, node_id: DHTID, peer_id: PeerID) -> None:
        """Learn of a node that has answered a call of ours."""
        self.add_or_update_node(node_id, peer_id)
        if node_id in self.uid_to_peer_id:
            self._answered.add(node_id)

    def __delitem__(self, node_id: DHTID) -> None:
        self.buckets[self.get_bucket_index(node_id)].nodes_requested_for_ping.discard(node_id)
        self._answered.discard(node_id)
        super().__delitem__(node_id)

    def get_nearest_neighbors(
        self, query_id: DHTID, k: int, exclude: DHTID | None = None
    ) -> list[tuple[DHTID, PeerID]]:
        """Return the k nearest of those that have answered, the nearest first; of others only where these are fewer."""
        near = super().get_nearest_neighbors(query_id, 2 * k, exclude)  # they are sought among so many
        chosen = sorted(near, key=lambda each: each[0] not in self._answered)[:k]
        return sorted(chosen, key=lambda each: query_id.xor_distance(each[0]))

    def peers(self) -> list[PeerID]:
        """Return all nodes but those that wait for a place."""
        return [peer for bucket in self.buckets for peer in bucket.nodes_to_peer_id.values()]

    def answering(self) -> list[PeerID]:
        """Return the nodes that have answered; where there are none, all."""
        nodes = [each for bucket in self.buckets for each in bucket.nodes_to_peer_id.items()]
        return [peer for node, peer in nodes if node in self._answered] or self.peers()

    def doubtful(self, count: int) -> list[PeerID]:
        """Return so many nodes at most that should be asked: they never answered, or others want their places.

        Of each bucket those come first that were heard of longest ago.
        """
        doubted = [
            (at, peer)
            for bucket in self.buckets
            for at, (node, peer) in enumerate(bucket.nodes_to_peer_id.items())
            if node not in self._answered or node in bucket.nodes_requested_for_ping
        ]
        return [peer for _, peer in sorted(doubted, key=lambda each: each[0])[:count]]
