"""Contacts: a handshake with every announced server, and a question to every anchor that they name, again and again.

A record only proves that its owner holds a key; a handshake proves that a server is there. The monitor dials the
addresses in records, as every client does, and fewer of them: a few of each server, a few servers at one time. After
the first message of a handshake it sends nothing to a peer that does not answer it.
"""

import asyncio
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import structlog

from swarm.access import EVERYBODY, Access
from swarm.dht.records import Announcement
from swarm.dht.validator import Clock
from swarm.errors import AnchorBusy, SwarmError
from swarm.identity import Identity
from swarm.limits import limit
from swarm.monitor.anchors import NamedAnchor, ToldLoad, named
from swarm.monitor.assess import Contact
from swarm.monitor.state import Way
from swarm.net.address import ViaAnchor
from swarm.net.channel import ignore
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.load import load_of
from swarm.net.noise import ChannelKey
from swarm.net.traversal import Traversal
from swarm.protocol.meeting import AnchorLoad

_log = structlog.get_logger("swarm.monitor")


@dataclass(frozen=True, slots=True)
class ContactLimits:
    """How many servers the monitor greets, and how patiently."""

    peers_max: int = limit(4096, "peers", "greeted; those of later records are not")
    dials_max: int = limit(32, "dials", "at one time; more wait")
    strangers_s: float = limit(20.0, "s", "for peers that never answered, beside the others; later rounds go on")
    pace_s: float = limit(
        0.005, "s", "between two dials: a handshake computes for 2 ms, and a web server shares the loop"
    )
    addresses_max: int = limit(2, "addresses", "and anchors of one server, tried one after the other")
    timeout_s: float = limit(5.0, "s", "for one address: connection, handshake and ping")
    again_s: float = limit(3.0, "s", "then a server that answered before and does not now is asked once more")
    patience: int = limit(3, "failures", "in a row; from then on the next try comes later and later")
    pause_s: float = limit(30.0, "s", "until the next try at first; it doubles")
    pause_max_s: float = limit(600.0, "s", "until the next try at last")
    forget_s: float = limit(3600.0, "s", "without a record, then a peer is forgotten")


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer: the round trip in seconds, and the way to it."""

    rtt_s: float
    way: Way


class Dialler(Protocol):
    """Talks to peers for the monitor."""

    async def greet(self, record: Announcement, /) -> Answer:
        """Shake hands with a server. Raises SwarmError, TimeoutError."""
        ...

    async def load_of(self, anchor: ViaAnchor, /) -> AnchorLoad:
        """Ask an anchor for its load. Raises SwarmError, TimeoutError."""
        ...


class Contacts:
    """The monitor's own observations of each peer. Lives in the loop."""

    def __init__(self, dialler: Dialler, clock: Clock, limits: ContactLimits = ContactLimits()) -> None:
        self._dialler, self._clock, self._limits = dialler, clock, limits
        self._first_seen: dict[str, float] = {}
        self._contacts: dict[str, Contact] = {}
        self._mentioned: dict[str, float] = {}
        self._next: dict[str, float] = {}  # when a peer that keeps failing is tried again
        self._source = random.Random()  # noqa: S311 - keeps no secret

    def recall(self, first_seen: Mapping[str, float]) -> None:
        """Take over the first appearances of an earlier run: wall seconds by public key."""
        self._first_seen |= first_seen

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
        for key in list(latest)[: self._limits.peers_max]:
            self._mentioned[key] = now
            self._contacts.setdefault(key, Contact(first_seen=self._first_seen.get(key, now)))
        due = {key: self._contacts[key].answered_at for key in self._contacts.keys() & latest.keys()}
        due = {key: answered_at for key, answered_at in due.items() if now >= self._next.get(key, 0.0)}
        # The longest unanswered come first: an anchor leads to a few of its servers at a time.
        known = sorted((key for key, answered_at in due.items() if answered_at), key=lambda key: due[key] or 0.0)
        strange = [key for key, answered_at in due.items() if not answered_at]
        self._source.shuffle(strange)  # a later round begins with others
        meeting = asyncio.ensure_future(self._visit_all([latest[key] for key in strange]))
        try:
            await self._visit_all([latest[key] for key in known])
            await asyncio.wait({meeting}, timeout=self._limits.strangers_s)
        finally:
            meeting.cancel()
            await asyncio.wait({meeting})
        if not meeting.cancelled():
            meeting.result()
        for key in [key for key, at in self._mentioned.items() if now - at > self._limits.forget_s]:
            del self._mentioned[key], self._contacts[key]
            self._next.pop(key, None)

    async def _visit_all(self, records: Sequence[Announcement]) -> None:
        turns = asyncio.Semaphore(self._limits.dials_max)
        async with asyncio.TaskGroup() as group:
            for record in records:
                group.create_task(self._visit(record, turns))
                await asyncio.sleep(self._limits.pace_s)

    async def _visit(self, record: Announcement, turns: asyncio.Semaphore) -> None:
        key = record.public_key
        if await self._try(record, turns):
            return
        known = self._contacts[key]
        if known.answered_at is not None and known.failures == 1:
            await asyncio.sleep(self._limits.again_s)
            await self._try(record, turns)

    async def _try(self, record: Announcement, turns: asyncio.Semaphore) -> bool:
        key = record.public_key
        async with turns:
            try:
                answer = await self._dialler.greet(record)
            except AnchorBusy:
                return False  # that says nothing of the server
            except (SwarmError, TimeoutError) as error:
                self._failed(key)
                _log.debug("a server does not answer", peer=record.peer_id, why=str(error)[:200])
                return False
        self._next.pop(key, None)
        self._contacts[key] = replace(
            self._contacts[key],
            answered_at=self._clock(),
            failures=0,
            rtt_ms=round(answer.rtt_s * 1000, 2),
            way=answer.way,
        )
        return True

    def _failed(self, key: str) -> None:
        known = self._contacts[key]
        self._contacts[key] = replace(known, failures=known.failures + 1)
        limits, beyond = self._limits, known.failures + 1 - self._limits.patience
        if beyond >= 0:
            pause_s = min(limits.pause_max_s, limits.pause_s * 2 ** min(beyond, 8))
            self._next[key] = self._clock() + pause_s


class Loads:
    """What anchors told of their load. Lives in the loop."""

    def __init__(self, dialler: Dialler, clock: Clock, limits: ContactLimits = ContactLimits()) -> None:
        self._dialler, self._clock, self._limits = dialler, clock, limits
        self._loads: dict[str, ToldLoad] = {}

    @property
    def known(self) -> Mapping[str, ToldLoad]:
        """The last answers, by peer id."""
        return self._loads

    async def visit(self, records: Sequence[Announcement], online: Collection[str]) -> None:
        """Ask the anchors that these records name. online: public keys of servers that answer."""
        anchors = named(records, online)
        self._loads = {anchor.peer: self._loads[anchor.peer] for anchor in anchors if anchor.peer in self._loads}
        async with asyncio.TaskGroup() as group:
            for anchor in anchors:
                group.create_task(self._ask(anchor))
                await asyncio.sleep(self._limits.pace_s)

    async def _ask(self, anchor: NamedAnchor) -> None:
        for way in anchor.ways[: self._limits.addresses_max]:
            try:
                load = await self._dialler.load_of(way)
            except (SwarmError, TimeoutError) as error:
                _log.debug("an anchor does not tell its load", anchor=str(way), why=str(error)[:200])
            else:
                self._loads[anchor.peer] = ToldLoad(self._clock(), load)
                return


class SwarmDialler:
    """The real one. A handshake is: dial, prove, ping, close. Channels to anchors stay open for the next round."""

    def __init__(
        self,
        identity: Identity,
        network: str,
        access: Access = EVERYBODY,
        *,
        public: bool = False,
        limits: ContactLimits = ContactLimits(),
    ) -> None:
        self._me = Endpoint(identity, ChannelKey(), network, access, public=public)
        self._traversal, self._limits = Traversal(self._me), limits

    async def greet(self, record: Announcement) -> Answer:
        """As `Dialler.greet`."""
        remote = Remote(record.peer_id, bytes.fromhex(record.channel_key))
        failure: SwarmError | TimeoutError = TimeoutError("it announces no address")
        for way in record.ways[: self._limits.addresses_max]:
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    channel = await self._traversal.dial(way, remote, self._me, ignore)
                    try:
                        return Answer(await channel.ping(), cast(Way, channel.carrier.way))
                    finally:
                        channel.close()
            except (SwarmError, TimeoutError) as error:
                failure = failure if isinstance(failure, AnchorBusy) else error
        raise failure

    async def load_of(self, anchor: ViaAnchor) -> AnchorLoad:
        """As `Dialler.load_of`."""
        async with asyncio.timeout(self._limits.timeout_s):
            return await load_of(anchor, self._traversal.lines)

    async def close(self) -> None:
        """End the channels to anchors."""
        await self._traversal.close()
