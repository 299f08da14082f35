"""Which pairs an anchor relays."""

import pytest

from swarm.net.relay import Relayed, RelayLimits, Room, room_for

LIMITS = RelayLimits(pairs_max=8, pairs_per_peer_max=4)


def pairs(*sources):
    """One pair of two new peers for each source, the oldest first."""
    return {name: Relayed(f"caller {name}", f"callee {name}", source) for name, source in enumerate(sources)}


def new(source="quiet", caller="caller", callee="callee"):
    return Relayed(caller, callee, source)


def test_there_is_room_until_the_table_is_full():
    assert room_for(new("a"), pairs(*"aaaaaaa"), LIMITS) == Room(is_there=True)


def test_the_newest_pair_of_the_largest_source_ends_for_a_quiet_one():
    assert room_for(new(), pairs(*"aabbbbac"), LIMITS) == Room(is_there=True, ends=5)


@pytest.mark.parametrize("source", ["a", "c"])
def test_no_pair_ends_for_a_source_that_has_as_many(source):
    assert room_for(new(source), pairs(*"aaaabccc"), LIMITS) == Room(is_there=False)


def test_many_sources_with_one_pair_each_all_stay():
    assert room_for(new(), pairs(*"abcdefgh"), LIMITS) == Room(is_there=False)


@pytest.mark.parametrize("side", ["caller", "callee"])
def test_pairs_of_one_peer_are_bounded(side):
    of_one = {name: new(str(name))._replace(**{side: "one"}) for name in range(4)}
    assert room_for(new()._replace(**{side: "one"}), of_one, LIMITS) == Room(is_there=False)
    assert room_for(Relayed("x", "y", "z"), of_one, LIMITS) == Room(is_there=True)


def test_a_relay_without_room_for_any_pair_ends_none():
    assert room_for(new(), {}, RelayLimits(pairs_max=0)) == Room(is_there=False)
