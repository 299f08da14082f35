"""Preferences through the user's door: lists of peers, and the route that explains itself.

That repairs fail rather than leave a list is in tests/simulation/test_lists.py.
"""

import math

import pytest
import torch

from swarm.client import AutoDistributedModel
from swarm.client.planning.eligible import Reason
from swarm.client.planning.preferences import Preferences
from swarm.client.planning.request import PlanningLimits
from swarm.errors import BadBlocks, BadConfiguration, UsageError
from swarm.identity import Identity
from tests.support.inprocess import inprocess

STRANGER = Identity.generate().peer_id
ONE = torch.randint(3, 120, (1, 12), generator=torch.Generator().manual_seed(5))


def settings(**more):
    return {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, "do_sample": False, **more}


class Stopper:
    """A streamer that ends a server after three tokens."""

    def __init__(self, swarm, server):
        self._swarm, self._server, self._left = swarm, server, 4

    def put(self, _):
        self._left -= 1
        if self._left == 0:
            self._swarm.servers.remove(self._server)
            self._swarm.loop.run(self._server.stop())

    def end(self):
        assert self._left < 0


def peer(server):
    return server.me.identity.peer_id


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"allowed_peers": ["12D3KooW"]}, "allowed_peers"),
        ({"allowed_peers": []}, "allowed_peers"),
        ({"blocked_peers": STRANGER}, "blocked_peers"),
        ({"blocked_peers": [STRANGER, "me!"]}, "me!"),
        ({"blocked_peers": [None]}, "None"),
        ({"optimize": "price"}, "price"),
        ({"step_timeout_s": 0.0}, "step_timeout_s"),
        ({"step_timeout_s": 86401.0}, "86400 seconds"),
        ({"step_timeout_s": math.inf}, "86400 seconds"),
        ({"step_timeout_s": math.nan}, "86400 seconds"),
    ],
)
def test_bad_options_are_named_before_anything_is_loaded(options, named):
    with pytest.raises(BadConfiguration, match=named):
        AutoDistributedModel.from_pretrained("nowhere/nothing", initial_peers=["/ip4/127.0.0.1/tcp/1"], **options)


def test_a_blocked_peer_is_never_used(checkpoint, full):
    with inprocess(checkpoint, "0:6", "0:3", "3:6") as swarm:
        whole, first, second = swarm.servers
        preferences = Preferences.checked(None, [peer(whole)], "latency")
        with swarm.client(preferences=preferences) as model:
            assert model.generate(ONE, **settings()).tolist() == full.generate(ONE, **settings()).tolist()
            assert [hop.peer_id for hop in model.route] == [peer(first), peer(second)]
            rejected = {one.peer_id: one.reason for one in model.route.explanation().rejected}
            assert rejected == {peer(whole): Reason.BLOCKED}


def test_a_repair_takes_another_allowed_peer(checkpoint, full):
    with inprocess(checkpoint, "0:3", "3:6", "3:6", "3:6") as swarm:
        first, second, third, blocked = swarm.servers
        preferences = Preferences.checked(None, [peer(blocked)], "latency")
        with swarm.client(preferences=preferences) as model:
            model.generate(ONE, **settings(max_new_tokens=1))
            used = second if model.route[1].peer_id == peer(second) else third
            text = model.generate(ONE, **settings(streamer=Stopper(swarm, used)))
            assert text.tolist() == full.generate(ONE, **settings()).tolist()
            assert {hop.peer_id for hop in model.route} == {peer(first), peer(third if used is second else second)}


def test_the_route_of_a_session_explains_itself(swarm, model):
    model.generate(ONE, **settings(max_new_tokens=1))
    route = model.route
    assert [str(hop.blocks) for hop in route] == ["0:1", "1:4", "4:6"]
    assert all(hop.latency_ms is not None for hop in route)
    assert route.estimate_ms > 0
    text = route.explain()
    assert all(peer(server) in text for server in swarm.servers)
    printed = repr(route).splitlines()
    assert text.startswith(repr(route))
    assert len(printed) >= 8  # a headline, the promise, a line a hop, the way home, and notes on speeds
    assert printed[7].endswith("ms from the last hop to the client")
    for line, hop in zip(printed[4:7], route, strict=True):
        assert line.split()[:4] == [hop.peer_id, str(hop.blocks), "float32", f"{hop.latency_ms:.1f}"]


def test_the_next_plan_uses_measured_round_trips(swarm):
    with swarm.client() as model:
        planned = model.route
        model.generate(ONE, **settings(max_new_tokens=1))
        assert model.route.explanation().home_ms < planned.explanation().home_ms
        assert model.route.explanation().hops[0].trip_ms == pytest.approx(model.route[0].latency_ms / 2)


def test_a_model_that_has_left_keeps_its_route(swarm):
    with swarm.client() as model:
        model.generate(ONE, **settings(max_new_tokens=1))
        before = list(model.route)
    assert list(model.route) == before
    assert "3 hops" in model.route.explain()


def test_routes_count_with_round_trips_between_servers(checkpoint):
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client() as model:
        assert model.route.estimates[1].trip_ms == PlanningLimits().unknown_rtt_ms / 2
        first, second = swarm.servers

        async def measure():
            for server in (first, second):  # a trip that one end announces alone counts no shorter than an unknown one
                me = server.announcement("online")
                await server.round_trips.measure(await swarm.directory().servers(me.root, me.n_blocks), me)
                await swarm.directory(server.me.identity).announce(server.announcement("online"))

        swarm.loop.run(measure())
        (rtt,) = first.announcement("online").rtts
        assert rtt.peer == second.me.identity.public_key.hex()[:16]
        (back,) = second.announcement("online").rtts
        with swarm.client() as newcomer:
            assert newcomer.route.estimates[1].trip_ms == pytest.approx(max(rtt.ms, back.ms) / 2)


@pytest.mark.parametrize(
    ("trusted", "named"),
    [
        ({"0:2": STRANGER}, "0:2"),
        ({"0:2": []}, "empty"),
        ({"0:2": ["me!"]}, "me!"),
        ({"two": [STRANGER]}, "two"),
        ({(0, 2): [STRANGER]}, "not a range"),
    ],
)
def test_bad_trusted_peers_are_named_before_anything_is_loaded(trusted, named):
    with pytest.raises(UsageError, match=named):
        AutoDistributedModel.from_pretrained(
            "nowhere/nothing", initial_peers=["/ip4/127.0.0.1/tcp/1"], trusted_peers=trusted
        )


def test_trusted_peers_of_missing_blocks_are_named(checkpoint):
    with pytest.raises(BadBlocks, match="4:7"):
        AutoDistributedModel.from_pretrained(
            checkpoint, initial_peers=["/ip4/127.0.0.1/tcp/1"], trusted_peers={"4:7": [STRANGER]}
        )


def trusting(trusted):
    return Preferences.checked(None, [], "latency", trusted)


def test_pinned_blocks_go_to_trusted_peers_alone(checkpoint, full):
    with inprocess(checkpoint, "0:6", "0:3") as swarm:
        whole, first = swarm.servers
        with swarm.client(preferences=trusting({"0:2": [peer(first)]})) as model:
            assert model.generate(ONE, **settings()).tolist() == full.generate(ONE, **settings()).tolist()
            (one, two) = model.route
            assert (one.peer_id, two.peer_id) == (peer(first), peer(whole))
            assert one.blocks.start == 0
            assert two.blocks.start >= 2


def test_a_repair_of_unpinned_blocks_takes_any_server(checkpoint, full):
    with inprocess(checkpoint, "0:2", "2:6") as swarm:
        trusted, second = swarm.servers
        with swarm.client(preferences=trusting({"0:2": [peer(trusted)]})) as model:
            model.generate(ONE, **settings(max_new_tokens=1))
            third = swarm.serve("0:6")
            text = model.generate(ONE, **settings(streamer=Stopper(swarm, second)))
            assert text.tolist() == full.generate(ONE, **settings()).tolist()
            assert [hop.peer_id for hop in model.route] == [peer(trusted), peer(third)]
            assert model.route[1].blocks.start == 2
