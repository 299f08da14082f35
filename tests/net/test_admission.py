"""Which connections may come, and which channel ends for a new one: without sockets and by times that are passed in."""

from dataclasses import dataclass

import pytest

from swarm.net.admission import Admission, Entry, gives_way, source_of
from swarm.net.limits import HandshakeLimits, ListenerLimits

LIMITS, HANDSHAKES = ListenerLimits(), HandshakeLimits()
MINUTE = 60.0


@dataclass(eq=False)
class Present:
    """An accepted channel, as far as admission goes."""

    peer: str
    heard_at: float = 0.0


def admission(channels_max=100, unproven_max=256, **limits):
    return Admission(ListenerLimits(HandshakeLimits(unproven_max=unproven_max), **limits), channels_max)


def test_all_addresses_of_one_ipv6_network_are_one_source():
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:1%eth0")
    assert source_of("2001:db8:0:1::1") != source_of("2001:db8::1")
    assert source_of("192.0.2.7") == "192.0.2.7"


# Connections that prove nothing


def test_of_too_many_unproven_channels_the_oldest_ends():
    mine, channels = admission(unproven_max=2), [Present("unproven") for _ in range(4)]
    assert [mine.begin(channel, "a") for channel in channels[:2]] == [None, None]
    assert mine.begin(channels[2], "a") is channels[0]
    mine.greeted(channels[0])
    mine.greeted(channels[1])
    assert mine.begin(channels[3], "a") is None


# Channels of one peer


def proven(mine, channel, process=b"1"):
    mine.begin(channel, "a source")
    mine.greeted(channel)
    return mine.prove(channel, process)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_peers_silent_channel_ends_for_a_new_one(processes):
    """Else a client whose connections died unnoticed cannot come back for minutes. It may be one process, or many."""
    mine = admission(channels_per_process_max=2, channels_per_peer_max=3)
    most = 2 if processes == 1 else 3
    first, *others = channels = [Present("a peer", MINUTE) for _ in range(most)]
    other_peers = Present("another peer", 0.0)
    assert proven(mine, other_peers).stays
    for i, channel in enumerate(channels):
        assert proven(mine, channel, bytes([i % processes])) == Entry(stays=True)
    first.heard_at -= LIMITS.silent_s
    entry = proven(mine, new := Present("a peer", MINUTE), bytes([0]))
    assert (entry.stays, entry.ends) == (True, first)
    assert first not in mine.proven["a peer"]
    mine.forget(first)
    entry = proven(mine, one_more := Present("a peer", MINUTE), bytes([0]))
    assert (entry.stays, entry.ends) == (False, None)
    mine.forget(one_more)
    assert set(mine.proven["a peer"]) == {*others, new}
    for channel in (*others, new, other_peers):
        mine.forget(channel)
    assert not mine.proven
    assert not mine.channels


def test_a_process_takes_no_channels_of_another():
    """A user has five notebooks open, and all of them are in use."""
    mine = admission(channels_per_process_max=2)
    channels = [(Present("a peer", MINUTE), process) for process in (b"1", b"2") for _ in range(2)]
    assert all(proven(mine, channel, process).stays for channel, process in channels)
    assert not proven(mine, Present("a peer", MINUTE), b"1").stays
    channels[-1][0].heard_at = 0.0  # the other's
    assert not proven(mine, Present("a peer", MINUTE), b"1").stays
    assert proven(mine, Present("a peer", MINUTE), b"2").ends is channels[-1][0]


def test_silent_channels_without_a_session_are_idle():
    mine = admission(idle_s=10.0)
    used, silent, talks = Present("used", 0.0), Present("silent", 0.0), Present("talks", 95.0)
    for channel in (used, silent, talks):
        proven(mine, channel)
    assert mine.idle(100.0, {"used"}) == [silent]
    assert mine.idle(100.0, ()) == [used, silent]


# Too many channels


def test_a_full_listener_makes_room_or_refuses():
    mine = admission(channels_max=3)
    channels = [Present(name, float(i)) for i, name in enumerate("abc")]
    for channel, source in zip(channels, "abc", strict=True):
        assert mine.make_room(0, ()).stays
        mine.begin(channel, source)
    entry = mine.make_room(0, {"a"})
    assert (entry.stays, entry.ends) == (True, channels[1])
    assert mine.make_room(0, {"a", "c"}).ends is None  # its place is free already
    assert not mine.make_room(1, {"a", "c"}).stays  # but a connection waits for its turn to take it


def test_the_largest_sources_most_silent_channel_gives_way():
    few, some, many = (
        [Present(f"{name}{i}", float(i)) for i in range(n)] for name, n in zip("abc", (2, 3, 4), strict=True)
    )
    channels = {channel: name for name, crowd in zip("abc", (few, some, many), strict=True) for channel in crowd}

    def way(in_use, of=channels):
        return gives_way(of, in_use, LIMITS.channels_per_peer_max)

    assert way(()) is many[0]
    assert way({"c0"}) is some[0]
    assert way({"c0", "c1"}) is some[0]
    assert way({channel.peer for channel in (*some, *many)}) is few[0]
    all_peers = {channel.peer for channel in channels}
    assert way(all_peers) is None
    most = {**channels, **{Present("c", 10.0 + i): "c" for i in range(3)}}
    assert way({"c0"}, most) is many[1]
    assert way(all_peers | {"c"}, most) is many[0]
    assert way((), {}) is None


def test_sources_that_use_all_channels_keep_no_other_out():
    """One session makes all channels of an identity used, and each of two sources has only half of them."""
    channels = {Present(source, 10.0 * at + i): source for at, source in enumerate("abc") for i in range(at + 1)}
    assert gives_way(channels, {"a", "b", "c"}, 2).heard_at == 20.0
    assert gives_way(channels, {"a", "b", "c"}, 3) is None
