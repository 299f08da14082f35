"""Which hops a repair keeps, and which it plans anew."""

from types import SimpleNamespace

import pytest

from swarm.blocks import Blocks
from swarm.client.session.leg import Leg
from swarm.client.session.live import LiveRoute, SessionPlan
from swarm.errors import NoRoute
from tests.client.test_route import planned, server

PLAN = SessionPlan(root="00" * 32, positions_max=8, rollback_max=0, step_timeout_s=1.0, wait_for_blocks_s=0.0)


def live_route(*hops):
    live = LiveRoute(
        "0" * 32, PLAN, Blocks(0, 6), SimpleNamespace(), SimpleNamespace(), SimpleNamespace(), lambda _: None
    )
    live.legs = [Leg(hop, channel=SimpleNamespace(closed=False), opened=True) for hop in hops]
    return live


def planner(*servers, later=()):
    async def plan(blocks, avoid, numeric_class, fresh):
        known = (*servers, *later) if fresh else servers
        return planned(blocks, known, numeric_class=numeric_class, avoid=avoid).hops

    return plan


async def test_a_hop_of_the_route_takes_a_larger_part_when_nobody_else_has_the_blocks():
    first, middle, last = server(0, 2), server(2, 4), server(2, 6)
    live = live_route(
        *planned(Blocks(0, 2), [first]),
        *planned(Blocks(2, 4), [middle]),
        *planned(Blocks(4, 6), [last]),
    )
    dead = live.legs[1].hop.process
    legs = await live._splice({dead}, planner(first, middle, last))
    assert [(leg.hop.signed, leg.hop.blocks) for leg in legs] == [(first, Blocks(0, 2)), (last, Blocks(2, 6))]
    with pytest.raises(NoRoute):
        await live._splice({dead, live.legs[2].hop.process}, planner(first, middle, last))


async def test_hops_that_can_go_on_are_kept():
    first, middle, spare, last = server(0, 2), server(2, 4), server(1, 5), server(4, 6)
    live = live_route(
        *planned(Blocks(0, 2), [first]),
        *planned(Blocks(2, 4), [middle]),
        *planned(Blocks(4, 6), [last]),
    )
    kept = [live.legs[0], live.legs[2]]
    legs = await live._splice({live.legs[1].hop.process}, planner(first, middle, spare, last))
    assert [legs[0], legs[2]] == kept
    assert (legs[1].hop.signed, legs[1].hop.blocks) == (spare, Blocks(2, 4))


async def test_the_directory_is_read_only_when_nobody_known_can_take_over():
    first, middle, last, newcomer = server(0, 2), server(2, 4), server(2, 6), server(2, 4)
    live = live_route(
        *planned(Blocks(0, 2), [first]),
        *planned(Blocks(2, 4), [middle]),
        *planned(Blocks(4, 6), [last]),
    )
    dead, other = live.legs[1].hop.process, live.legs[2].hop.process
    legs = await live._splice({dead}, planner(first, middle, last, later=[newcomer]))
    assert [leg.hop.signed for leg in legs] == [first, last]
    another = server(2, 6)
    legs = await live._splice({dead, other}, planner(first, middle, last, later=[another]))
    assert [leg.hop.signed for leg in legs] == [first, another]
