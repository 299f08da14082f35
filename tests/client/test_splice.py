"""Which hops a repair keeps, and which it plans anew."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from swarm.blocks import Blocks
from swarm.client.session.attempt import Finder
from swarm.client.session.leg import Leg, LegState
from swarm.errors import NoRoute
from tests.client.test_route import planned, server


def open_legs(*hops):
    return [Leg(hop, LegState.OPEN, channel=SimpleNamespace(closed=False)) for hop in hops]


def planner(*servers, later=()):
    async def plan(blocks, avoid, held, fresh):
        known = (*servers, *later) if fresh else servers
        return planned(blocks, known, held=held, avoid=avoid).hops

    return plan


async def test_sole_holder_of_missing_blocks_takes_a_larger_part():
    first, middle, last = server(0, 2), server(2, 4), server(2, 6)
    legs = open_legs(
        *planned(Blocks(0, 2), [first]),
        *planned(Blocks(2, 4), [middle]),
        *planned(Blocks(4, 6), [last]),
    )
    dead = legs[1].hop.process
    found = await Finder(Blocks(0, 6), planner(first, middle, last)).splice(legs, {dead})
    assert [(leg.hop.signed, leg.hop.blocks) for leg in found] == [(first, Blocks(0, 2)), (last, Blocks(2, 6))]
    with pytest.raises(NoRoute):
        await Finder(Blocks(0, 6), planner(first, middle, last)).splice(legs, {dead, legs[2].hop.process})


async def test_hops_that_can_go_on_are_kept():
    first, middle, spare, last = server(0, 2), server(2, 4), server(1, 5), server(4, 6)
    legs = open_legs(
        *planned(Blocks(0, 2), [first]),
        *planned(Blocks(2, 4), [middle]),
        *planned(Blocks(4, 6), [last]),
    )
    kept = [legs[0], legs[2]]
    found = await Finder(Blocks(0, 6), planner(first, middle, spare, last)).splice(legs, {legs[1].hop.process})
    assert [found[0], found[2]] == kept
    assert (found[1].hop.signed, found[1].hop.blocks) == (spare, Blocks(2, 4))


async def test_coded_session_is_cut_where_it_was_as_long_as_others_can_take_over_there():
    first, middle, last = server(0, 2), server(2, 4), server(4, 6)
    large, spares = server(2, 6), (server(2, 4), server(4, 6))
    as_before, as_planned = ["0:2", "2:4", "4:6"], ["0:2", "2:6"]
    legs = open_legs(
        *planned(Blocks(0, 2), [first]),
        *planned(Blocks(2, 4), [middle]),
        *planned(Blocks(4, 6), [last]),
    )
    dead = {leg.hop.process for leg in legs[1:]}
    for known, cuts, expected in [
        ((large, *spares), (), as_planned),  # the better route, where nothing is rounded
        ((large, *spares), (2, 4), as_before),
        ((large,), (2, 4), as_planned),
    ]:
        finder = Finder(Blocks(0, 6), planner(first, middle, last, *known))
        finder.cuts = cuts
        assert [str(leg.hop.blocks) for leg in await finder.splice(legs, dead)] == expected


async def test_directory_is_read_only_if_no_known_hop_takes_over():
    first, middle, last, newcomer = server(0, 2), server(2, 4), server(2, 6), server(2, 4)
    legs = open_legs(
        *planned(Blocks(0, 2), [first]),
        *planned(Blocks(2, 4), [middle]),
        *planned(Blocks(4, 6), [last]),
    )
    dead, other = legs[1].hop.process, legs[2].hop.process
    found = await Finder(Blocks(0, 6), planner(first, middle, last, later=[newcomer])).splice(legs, {dead})
    assert [leg.hop.signed for leg in found] == [first, last]
    another = server(2, 6)
    found = await Finder(Blocks(0, 6), planner(first, middle, last, later=[another])).splice(legs, {dead, other})
    assert [leg.hop.signed for leg in found] == [first, another]


async def test_hops_that_were_asked_for_a_kept_past_in_vain_are_opened_anew():
    """Each has begun with a past of its own length, which a later attempt does not know."""
    first, last = server(0, 3), server(3, 6)
    legs = open_legs(*planned(Blocks(0, 3), [first]), *planned(Blocks(3, 6), [last]))
    for leg in legs:
        leg.state, leg.asked = LegState.WHOLE, True
    found = await Finder(Blocks(0, 6), planner(first, last)).splice(legs, ())
    assert [leg.hop.signed for leg in found] == [first, last]
    assert not any(leg.is_open for leg in found)
    assert not any(leg.is_whole for leg in legs)
    for leg in legs:
        leg.asked = False
    assert await Finder(Blocks(0, 6), planner(first, last)).splice(legs, ()) == legs


async def test_hops_that_stay_have_their_newest_records():
    first, middle, spare, last = server(0, 2), server(2, 4), server(2, 4), server(4, 6)
    legs = open_legs(*planned(Blocks(0, 6), [first, middle, last]))
    renewed = {legs[2].hop: replace(legs[2].hop, signed=server(4, 6))}
    finder = Finder(Blocks(0, 6), planner(first, middle, spare, last), lambda hop: renewed.get(hop, hop))
    found = await finder.splice(legs, {legs[1].hop.process})
    (newer,) = renewed.values()
    assert [leg.hop for leg in found[::2]] == [legs[0].hop, newer]
