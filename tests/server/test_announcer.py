"""The announcer says when nobody hears it."""

import time

import pytest
import structlog

from swarm.dht.directory import Directory
from swarm.dht.records import RECORD, Announcement, Mooring, Rtt
from swarm.dht.store import MemoryStore
from swarm.identity import Identity
from swarm.server.announcer import Announcer, State
from tests.dht.support import NETWORK, announcement

ALICE = Identity(b"a" * 32)


class Lonely:
    """A store in a swarm of one, until others come."""

    def __init__(self) -> None:
        self._inner = MemoryStore.make(NETWORK, time.time)
        self.gate = self._inner.gate
        self.others = 0

    async def put(self, entries):
        return tuple(self.others for _ in entries)

    async def get(self, keys, heard=None, sample=None):
        return await self._inner.get(keys, heard)


@pytest.fixture
def store() -> Lonely:
    return Lonely()


async def test_a_server_that_nobody_can_find_says_so_once_each_time(store: Lonely) -> None:
    def current(state: State) -> Announcement:
        return announcement(ALICE, state=state)

    announcer = Announcer(Directory(store, identity=ALICE, network=NETWORK, clock=time.time), current)
    with structlog.testing.capture_logs() as events:
        for others in (1, 0, 0, 2, 0):
            store.others = others
            await announcer.announce()
    assert [event["log_level"] for event in events if event["log_level"] != "info"] == ["warning", "warning"]


@pytest.mark.parametrize(("host_chars", "kept"), [(9, RECORD.rtts_max), (120, 13)])
async def test_a_record_leaves_out_the_round_trips_that_have_no_room(store: Lonely, host_chars: int, kept: int) -> None:
    """Others name the anchors, and their addresses."""
    host = ".".join(["a" * 60] * 2)[-host_chars:].lstrip(".-")
    anchor = Mooring("c" * 64, "d" * 64, f"{host}:31330")
    rtts = tuple(Rtt(f"{number:016x}", 123.4) for number in range(RECORD.rtts_max))

    def current(state: State) -> Announcement:
        names = {"model": "m" * 50, "public_name": "n" * 64, "device": "d" * 64}
        return announcement(ALICE, state=state, anchors=(anchor,) * RECORD.anchors_max, rtts=rtts, **names)

    announcer = Announcer(Directory(store, identity=ALICE, network=NETWORK, clock=time.time), current)
    record = await announcer.announce()
    assert record.announcement.rtts == rtts[:kept]
    assert kept == RECORD.rtts_max or len(record.data) > RECORD.bytes_max - 40, "there was room for another one"
