"""The directory: the servers of each model and their blocks, as announced by the servers themselves.

Each announcement is stored in two places: under its span, where clients look for servers, and under its model's name,
so that people and error messages can list the models of the swarm. An entry of the second kind binds name, root and
size: a squatter can add one beside the true one, and cannot change or remove that.
"""

import asyncio
import os
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from swarm.blocks import Blocks
from swarm.config import PROTOCOL_VERSION
from swarm.dht.levels import announces_name, depths
from swarm.dht.records import (
    RECORD,
    Announcement,
    SignedAnnouncement,
    Span,
    model_key,
    model_keys,
    open_announcement,
    open_envelope,
    sign_announcement,
    span_key,
)
from swarm.dht.sampling import for_everybody, for_plan
from swarm.dht.sequence import Sequence, SequenceInMemory
from swarm.dht.store import RecordStore
from swarm.dht.validator import Clock, Entry, Facts, OnEntries
from swarm.errors import RecordError
from swarm.identity import Identity
from swarm.limits import limit
from swarm.net.reach import sensible

_log = structlog.get_logger("swarm.directory")


@dataclass(frozen=True, slots=True)
class DirectoryLimits:
    """How much a directory announces and returns."""

    spans_max: int = limit(64, "spans", "of one peer at one time; it can announce no more, and readers take no more")
    servers_max: int = limit(16384, "records", "returned by one look-up; the last spans are left out")
    open_slice: int = limit(24, "records", "opened without a pause for the event loop: about 2 ms")


@dataclass(frozen=True, slots=True)
class Published:
    """A record as it was announced, and how many other nodes hold it: 0 means that no other node took it."""

    signed: SignedAnnouncement
    replicas: int


@dataclass(frozen=True, slots=True)
class _Own:
    """What this side announces for a span. depth: of its key, below full ones."""

    announcement: Announcement
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Survey:
    """The result of a look-up. `other_protocols`: major versions of servers that were left out because of it."""

    servers: tuple[SignedAnnouncement, ...]
    other_protocols: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class ModelEntry:
    """A model that a server claims to serve. A look-up of its root returns the servers that really do."""

    name: str
    root: str
    n_blocks: int


class Directory:
    """Announces one identity's spans, and looks up all servers. Without an identity it only looks up."""

    def __init__(
        self,
        store: RecordStore,
        *,
        identity: Identity | None,
        network: str,
        clock: Clock,
        sequence: Sequence | None = None,
        public: bool = False,
        limits: DirectoryLimits = DirectoryLimits(),
        source: random.Random | None = None,
    ) -> None:
        """sequence: of the identity's records; else one in memory. public: see `swarm.net.reach`."""
        self._limits = limits
        self._source = source or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._store, self._identity, self._network, self._clock = store, identity, network, clock
        self._sequence = sequence or SequenceInMemory()
        self.public = public
        self.latest: SignedAnnouncement | None = None  # of this identity's own
        self._announced: dict[tuple[str, Span], _Own] = {}
        self.seen: dict[str, int] = {}  # by root of what is announced: servers in the last survey

    def now(self) -> float:
        """Return the time by which records are judged, in seconds since 1970."""
        return self._clock()

    async def announce(self, announcement: Announcement) -> Published:
        """Sign and store an announcement of one of our spans, to live for 60 s from now.

        Its `sequence`, `issued` and `expires` are set here. Raises RecordError, or NetworkError when cut off.
        """
        place = (announcement.root, announcement.blocks)
        if place not in self._announced and len(self._announced) >= self._limits.spans_max:
            raise RecordError(f"more than {self._limits.spans_max} spans of one peer")
        signed = self._signed(announcement)
        own = self._announced.get(place, _Own(signed.announcement))
        self._announced[place], self.latest = _Own(signed.announcement, own.depth), signed
        stored, facts = self._sealed(signed)
        named = announces_name(self.seen.get(announcement.root, 0), own.depth, self._source)
        entries = [Entry(stored, facts, facts.model)] if named else []
        taken = 0
        for depth in depths(own.depth, RECORD.depth_max, self._source):
            taken = (await self._store.put([Entry(stored, facts, facts.span_at(depth)), *entries]))[0]
            if taken >= 0:
                self._announced[place] = _Own(signed.announcement, depth)
                break
            entries = []
        return Published(signed, max(0, taken))

    async def withdraw(self, blocks: Blocks | None = None) -> None:
        """Withdraw all announced spans, or only this one: their records are replaced by ones that say so."""
        entries = []
        for place, own in list(self._announced.items()):
            if blocks is not None and own.announcement.span != blocks:
                continue
            del self._announced[place]
            gone = {"state": "withdrawn", "addresses": (), "rtts": ()}
            stored, facts = self._sealed(self._signed(own.announcement.model_copy(update=gone)))
            entries.append(Entry(stored, facts, facts.span_at(own.depth)))
        if entries:
            await self._store.put(entries)

    async def servers(self, root: str, n_blocks: int, salt: bytes = b"") -> tuple[SignedAnnouncement, ...]:
        """Return a survey's announcements, ordered by span and owner. Raises NetworkError."""
        return (await self.survey(root, n_blocks, salt=salt)).servers

    async def survey(
        self,
        root: str,
        n_blocks: int,
        on_entries: OnEntries | None = None,
        *,
        everybody: bool = False,
        salt: bytes = b"",
    ) -> Survey:
        """Return living announcements, and the protocols that were left out. Raises NetworkError.

        Of a swarm whose records fit into the bytes of one plan, all; of a larger one a sample, which the salt chooses.

        on_entries: takes records as they come, before the last node has answered; for `updated`.
        everybody: read the records of larger swarms, too, at the price of megabytes. salt: else a new one.
        """
        wanted = (for_everybody if everybody else for_plan)(salt or os.urandom(8), n_blocks)
        found = await self._store.get([span_key(self._store.gate.seal.scope, root)], on_entries, wanted)
        servers, others = [], set()
        for i, stored in enumerate(_flat(found.values())):
            if i % self._limits.open_slice == self._limits.open_slice - 1:
                await asyncio.sleep(0)
            try:
                servers.append(self._opened(stored))
            except RecordError as error:
                others |= self._protocol_of(stored)
                _log.debug("record left out", why=error.why)
        survey = Survey(self._usable(servers, root, n_blocks), tuple(sorted(others)))
        if any(root == announced for announced, _ in self._announced):
            self.seen = {root: len({signed.announcement.public_key for signed in survey.servers})}
        return survey

    def updated(self, survey: Survey, root: str, n_blocks: int, entries: Iterable[Entry]) -> Survey:
        """Merge records of the next survey into the last one. Of a server and a span the newest record counts."""
        heard = []
        for entry in entries:
            with suppress(RecordError):
                heard.append(self._opened(entry.data))
        return Survey(self._usable([*survey.servers, *heard], root, n_blocks), survey.other_protocols)

    async def models(self, name: str | None = None) -> tuple[ModelEntry, ...]:
        """Return the models that are announced, or those of one name. Raises NetworkError."""
        seal = self._store.gate.seal
        keys = model_keys(seal.scope) if name is None else (model_key(seal.scope, name),)
        entries = set()
        for stored in _flat((await self._store.get(keys)).values()):
            try:
                record = open_envelope(seal.open(stored), now=self._clock(), network=self._network)
            except RecordError as error:
                _log.debug("record left out", why=error.why)
                continue
            if name is None or record.model == name:
                entries.add(ModelEntry(record.model, record.root, record.n_blocks))
        return tuple(sorted(entries))

    def _signed(self, announcement: Announcement) -> SignedAnnouncement:
        if self._identity is None:
            raise RecordError("this directory has no identity to announce with")
        if announcement.network != self._network:
            raise RecordError(f"it is for the network {announcement.network!r}, this one is {self._network!r}")
        now = self._clock()
        times: dict[str, Any] = {
            "sequence": self._sequence.next(now),
            "issued": now,
            "expires": now + RECORD.lifetime_s,
        }
        stamped = announcement.model_copy(update=times)
        data = sign_announcement(stamped, self._identity)
        return SignedAnnouncement(stamped, data)

    def _sealed(self, signed: SignedAnnouncement) -> tuple[bytes, Facts]:
        """Return a record of ours as it is stored."""
        gate = self._store.gate
        stored = gate.seal.close(signed.data)
        return stored, gate.facts(stored, ours=True)

    def _opened(self, stored: bytes) -> SignedAnnouncement:
        gate = self._store.gate
        gate.facts(stored)  # verified once, remembered by its digest
        data = gate.seal.open(stored)
        announcement = open_announcement(data, now=self._clock(), network=self._network, verified=True)
        addresses = sensible(announcement.addresses, self.public)
        anchors = tuple(anchor for anchor in announcement.anchors if sensible((anchor.address,), self.public))
        if announcement.addresses and not addresses and not anchors:
            raise RecordError(f"addresses: none makes sense here: {', '.join(announcement.addresses)[:200]}")
        return SignedAnnouncement(announcement.model_copy(update={"addresses": addresses, "anchors": anchors}), data)

    def _protocol_of(self, stored: bytes) -> set[int]:
        """Return the record's protocol if the record holds and is of another protocol than ours."""
        try:
            data = self._store.gate.seal.open(stored)
            envelope = open_envelope(data, now=self._clock(), network=self._network)
        except RecordError:
            return set()
        return {envelope.protocol} - {PROTOCOL_VERSION}

    def _few_of_each(self, servers: list[SignedAnnouncement]) -> list[SignedAnnouncement]:
        """Leave out what is more than a peer may announce: the newest records count, whatever nodes answer."""
        of_each: dict[str, list[SignedAnnouncement]] = {}
        for signed in servers:
            of_each.setdefault(signed.announcement.public_key, []).append(signed)
        for records in of_each.values():
            if len(records) > self._limits.spans_max:
                records.sort(key=lambda signed: signed.announcement.sequence, reverse=True)
                del records[self._limits.spans_max :]
        return [signed for records in of_each.values() for signed in records]

    def _usable(self, servers: list[SignedAnnouncement], root: str, n_blocks: int) -> tuple[SignedAnnouncement, ...]:
        """Return the records of a model that are not withdrawn, ordered by span and owner."""
        usable = [
            signed
            for signed in _of_latest_process(self._few_of_each(_newest(servers)))
            if (signed.announcement.root, signed.announcement.n_blocks) == (root, n_blocks)
            and signed.announcement.state != "withdrawn"
        ]
        usable.sort(key=lambda signed: (signed.announcement.blocks, signed.announcement.public_key))
        return tuple(usable[: self._limits.servers_max])


def _newest(servers: list[SignedAnnouncement]) -> list[SignedAnnouncement]:
    """Leave out older records of a span: it may have been under another key before."""
    newest: dict[tuple[str, Span], SignedAnnouncement] = {}
    for signed in servers:
        place = signed.announcement.public_key, signed.announcement.blocks
        if place not in newest or newest[place].announcement.sequence < signed.announcement.sequence:
            newest[place] = signed
    return list(newest.values())


def _of_latest_process(servers: list[SignedAnnouncement]) -> list[SignedAnnouncement]:
    """Leave out records of a peer from before its restart, with other blocks: that channel key is gone."""
    latest: dict[str, Announcement] = {}
    for record in (signed.announcement for signed in servers):
        known = latest.get(record.public_key)
        if known is None or known.sequence < record.sequence:
            latest[record.public_key] = record
    return [s for s in servers if s.announcement.channel_key == latest[s.announcement.public_key].channel_key]


def _flat(groups: Iterable[tuple[bytes, ...]]) -> list[bytes]:
    return [data for group in groups for data in group]
