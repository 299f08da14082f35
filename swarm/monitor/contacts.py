"""Who answers: a handshake with every announced server, over the project's own channel, again and again.

A record proves that somebody holds a key and says so; only a handshake proves that a server is there. The monitor
dials what records name, as every client does, but little of it: a few addresses each, a few peers at one time, and
after the first message of a handshake it says nothing to whoever does not answer it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace

import structlog

from swarm.access import EVERYBODY, Access
from swarm.dht.records import Announcement
from swarm.dht.validator import Clock
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.monitor.assess import Contact
from swarm.net.address import dialable
from swarm.net.carriers.tcp import dial
from swarm.net.channel import ignore
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.noise import ChannelKey

PEERS_MAX = 4096
DIALS_MAX = 32  # at one time
PACE_S = 0.005  # between two dials: a handshake computes for about 2 ms, and a web server shares this loop
ADDRESSES_MAX = 2  # of one server, one after the other
TIMEOUT_S = 5.0  # for one address: connection, handshake and ping
AGAIN_S = 3.0  # a server that answered before and does not now is asked once more
PATIENCE = 3  # failures in a row; from then on the next try comes later and later
PAUSE_S, PAUSE_MAX_S = 30.0, 600.0
FORGET_S = 3600.0  # a peer whose records are gone so long is forgotten

Answer = Callable[[Announcement], Awaitable[float]]
"""`answer(record)`: shake hands with the server; returns the round trip in seconds. Raises SwarmError."""

_log = structlog.get_logger("swarm.monitor")


class Contacts:
    """What the monitor knows of each peer by itself. Lives in the loop."""

    def __init__(self, answer: Answer, clock: Clock, first_seen: Mapping[str, float]) -> None:
        """first_seen: wall seconds by public key, from an earlier run."""
        self._answer, self._clock = answer, clock
        self._first_seen = dict(first_seen)
        self._contacts: dict[str, Contact] = {}
        self._mentioned: dict[str, float] = {}
        self._next: dict[str, float] = {}  # when a peer that keeps failing is tried again

    @property
    def known(self) -> Mapping[str, Contact]:
        """Contacts by public key (hex)."""
        return self._contacts

    async def visit(self, records: Iterable[Announcement]) -> None:
        """Shake hands with the servers of these records, each peer once. A failure is noted, not raised."""
        now = self._clock()
        latest: dict[str, Announcement] = {}
        for record in records:
            latest[record.public_key] = record
        for key in list(latest)[:PEERS_MAX]:
            self._mentioned[key] = now
            self._contacts.setdefault(key, Contact(first_seen=self._first_seen.get(key, now)))
        turns = asyncio.Semaphore(DIALS_MAX)
        async with asyncio.TaskGroup() as group:
            for key in self._contacts.keys() & latest.keys():
                if now < self._next.get(key, 0.0):
                    continue
                group.create_task(self._visit(latest[key], turns))
                await asyncio.sleep(PACE_S)
        for key in [key for key, at in self._mentioned.items() if now - at > FORGET_S]:
            del self._mentioned[key], self._contacts[key]
            self._next.pop(key, None)

    async def _visit(self, record: Announcement, turns: asyncio.Semaphore) -> None:
        key = record.public_key
        if await self._try(record, turns):
            return
        known = self._contacts[key]
        if known.answered_at is not None and known.failures == 1:
            await asyncio.sleep(AGAIN_S)
            await self._try(record, turns)

    async def _try(self, record: Announcement, turns: asyncio.Semaphore) -> bool:
        key = record.public_key
        async with turns:
            try:
                rtt_s = await self._answer(record)
            except (SwarmError, TimeoutError) as error:
                self._failed(key)
                _log.debug("a server does not answer", peer=record.peer_id, why=str(error)[:200])
                return False
        self._next.pop(key, None)
        self._contacts[key] = replace(
            self._contacts[key], answered_at=self._clock(), failures=0, rtt_ms=round(rtt_s * 1000, 2)
        )
        return True

    def _failed(self, key: str) -> None:
        known = self._contacts[key]
        self._contacts[key] = replace(known, failures=known.failures + 1)
        if known.failures + 1 >= PATIENCE:
            pause_s = min(PAUSE_MAX_S, PAUSE_S * 2 ** min(known.failures + 1 - PATIENCE, 8))
            self._next[key] = self._clock() + pause_s


def dialling(identity: Identity, network: str, access: Access = EVERYBODY, *, public: bool = False) -> Answer:
    """Return the real thing: dial, prove, ping, close."""
    me = Endpoint(identity, ChannelKey(), network, access, public=public)

    async def answer(record: Announcement) -> float:
        remote = Remote(record.peer_id, bytes.fromhex(record.channel_key))
        failure: SwarmError | TimeoutError = TimeoutError("it announces no address")
        for address in dialable(record.addresses)[:ADDRESSES_MAX]:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    channel = await dial(address, remote, me, ignore)
                    try:
                        return await channel.ping()
                    finally:
                        channel.close()
            except (SwarmError, TimeoutError) as error:
                failure = error
        raise failure

    return answer
