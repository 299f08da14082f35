"""The DHT beside nodes behind routers: they take part, other nodes never wait for them."""

from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.support.lab.nodes import WITHIN_S, LabDht, LabNode
from tests.support.swarms import eventually

HIDING = ("port_restricted", "symmetric", "reject", "double")
LOOKUP_S_MAX = 1.0  # of a busy machine; a look-up that waits for hidden nodes takes 2


def ids(nodes: list[LabNode]) -> set[str]:
    return {node.state.peer_id for node in nodes}


def known(nodes: list[LabNode]) -> set[str]:
    """Return all that were ever in one of these nodes' routing tables."""
    return {peer for node in nodes for peer in node.state.known}


def was_tried_in_vain(node: LabNode) -> bool:
    return "other nodes cannot reach this one" in node.process.log.read_text()


@pytest.mark.long
def test_hidden_nodes_are_in_no_routing_table(lab: Lab, tmp_path: Path):
    with LabDht(tmp_path / "dht") as dht:
        public = dht.public([lab.public_host(5) for _ in range(3)])
        hidden = dht.hidden([lab.site(kind, 5).host() for kind in HIDING])
        eventually(lambda: all(map(was_tried_in_vain, hidden)), WITHIN_S)
        eventually(lambda: all(ids(public) == {*node.state.now_known, node.state.peer_id} for node in public), WITHIN_S)
        looked_up = dht.look_up(lab.public_host(5), 5)
        assert set(looked_up.found) == {len(public) + len(hidden)}
        assert sorted(looked_up.lookup_s)[2] < LOOKUP_S_MAX
        assert not ids(hidden) & known([*public, *hidden])
        assert not any(node.state.serves for node in hidden)


@pytest.mark.long
def test_a_forwarded_port_proves_one_of_two_nodes(lab: Lab, tmp_path: Path):
    """Both have the same public address and port, where the router passes strangers on to the first one alone."""
    home = lab.site("forwarded", 5)
    with LabDht(tmp_path / "dht") as dht:
        public = dht.public([lab.public_host(5) for _ in range(3)])
        first, second = dht.hidden([home.host(), home.host()])
        eventually(lambda: first.state.serves and first.state.peer_id in known(public), WITHIN_S)
        eventually(lambda: was_tried_in_vain(second), WITHIN_S)
        assert not second.state.serves
        assert second.state.peer_id not in known(public)


@pytest.mark.long
def test_look_ups_find_two_hundred_hidden_servers(lab: Lab, tmp_path: Path):
    """Twenty nodes behind routers announce ten servers each."""
    with LabDht(tmp_path / "dht") as dht:
        public = dht.public([lab.public_host(5) for _ in range(5)])
        sites = [lab.site(HIDING[i % len(HIDING)], 5) for i in range(20)]
        hidden = dht.hidden([site.host() for site in sites], records=10)
        looked_up = [dht.look_up(lab.public_host(5), 5) for _ in range(3)]
        assert {found for each in looked_up for found in each.found} == {len(public) + 200}
        assert max(each.join_s for each in looked_up) < 5
        assert not ids(hidden) & known(public)
