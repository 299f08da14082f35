"""The announcer says when nobody hears it."""

import time

import pytest
import structlog

from swarm.dht.directory import Directory
from swarm.dht.records import Announcement
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
