"""The monitor: reads the DHT every 30 s, shakes hands with every server, remembers, and keeps the answers ready.

Two tasks: one reads, one visits. What the API serves is made anew after each of both, in a worker thread, as finished
bytes: a request only hands them out, however many servers there are.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog

from swarm.dht.directory import Directory, ModelEntry
from swarm.dht.light import LightStore
from swarm.dht.records import RECORD, Announcement
from swarm.dht.validator import Clock
from swarm.errors import ClockSkew, SwarmError, Unreachable, UsageError
from swarm.monitor.assess import Assessment, KnownModel, Sighting, assess
from swarm.monitor.contacts import Answer, Contacts
from swarm.monitor.history import Database, Sample
from swarm.monitor.metrics import metrics_text
from swarm.monitor.state import MODELS_MAX, TEXT_MAX, Health, History, ProbeStats, Reading, Window

READ_EVERY_S = 30.0
READ_TIMEOUT_S = 25.0
RETRY_S = 5.0  # after a reading that failed
FRESH_S = 120.0  # a page whose last reading is older than this is not healthy itself
KEYS_MAX = 2048  # DHT keys of models that one reading looks at
SURVEYS_MAX = 2  # models looked up at one time
RECORDS_MAX = 8192
HISTORY_CACHE_S = 15.0
HISTORY_CACHE_MAX = 256
EVENT_CLIENTS_MAX = 256

Open = Callable[[], AbstractAsyncContextManager[LightStore]]
Result = TypeVar("Result")
_log = structlog.get_logger("swarm.monitor")


@dataclass(frozen=True, slots=True)
class Published:
    """What the API hands out, ready to be sent. details by root."""

    assessment: Assessment
    state: bytes
    details: dict[str, bytes]
    metrics: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorOptions:
    """What the operator chose."""

    network: str
    join_addresses: tuple[str, ...] = ()
    read_every_s: float = READ_EVERY_S
    public: bool = False  # see swarm.net.reach


@dataclass(slots=True)
class _Seen:
    """The last reading."""

    records: tuple[Announcement, ...] = ()
    other_protocols: tuple[int, ...] = ()
    reading: Reading = field(default_factory=lambda: Reading(at=None, took_s=None))


class Monitor:
    """Lives in the loop; `run` is its life."""

    def __init__(
        self, options: MonitorOptions, open_store: Open, answer: Answer, database: Database, clock: Clock
    ) -> None:
        self.probe_problem: Callable[[], str] = lambda: "off"
        self.event_clients = 0
        self.stopping = False
        self._options, self._open, self._answer, self._clock = options, open_store, answer, clock
        self._database = database
        self._contacts = Contacts(answer, clock, {})
        self._known: dict[str, KnownModel] = {}
        self._probes: dict[str, tuple[ProbeStats, ...]] = {}
        self._seen = _Seen()
        self._revision = 0
        self._new_records, self._changed = asyncio.Event(), asyncio.Event()
        self._first = asyncio.Event()
        self._histories: dict[tuple[str | None, Window], tuple[float, bytes]] = {}
        self.published = _publish(self._sighting(), clock(), "")

    async def run(self) -> None:
        """Read and visit until cancelled. Raises UsageError for initial peers that are no addresses."""
        await self._recall()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_forever())
            group.create_task(self._visit_forever())

    async def read_once(self) -> None:
        """Wait until the first reading has ended, well or not."""
        await self._first.wait()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for something new to be published. Returns whether it was."""
        waiting = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await waiting.wait()
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        """Let those who wait for events go."""
        self.stopping = True
        self._changed.set()

    def health(self) -> Health:
        """Say how the monitor itself is."""
        at = self._seen.reading.at
        age_s = None if at is None else max(0.0, self._clock() - at)
        return Health(
            ok=age_s is not None and age_s <= FRESH_S,
            reading_age_s=age_s,
            history=self._database.problem[:TEXT_MAX] or "ok",
            probe=self.probe_problem()[:TEXT_MAX],
        )

    async def history(self, root: str | None, window: Window) -> bytes | None:
        """Return a History in JSON, or None while the disk cannot be read."""
        now = self._clock()
        cached = self._histories.get((root, window))
        if cached is not None and 0 <= now - cached[0] < HISTORY_CACHE_S:
            return cached[1]
        try:
            found: History = await asyncio.wrap_future(self._database.history(root, window, now))
        except sqlite3.DatabaseError as error:
            _log.warning("no history", why=str(error))
            return None
        if len(self._histories) >= HISTORY_CACHE_MAX:
            self._histories.clear()
        self._histories[root, window] = (now, found.model_dump_json().encode())
        return self._histories[root, window][1]

    # --- reading -----------------------------------------------------------------------------------------------------

    async def _recall(self) -> None:
        remembered = await self._asked(self._database.remembered(self._clock()))
        if remembered is not None:
            self._known = {root: KnownModel(*facts) for root, facts in remembered.models.items()}
            self._contacts = Contacts(self._answer, self._clock, remembered.first_seen)

    async def _read_forever(self) -> None:
        while True:
            try:
                async with self._open() as store:
                    directory = Directory(
                        store,
                        identity=None,
                        network=self._options.network,
                        clock=self._clock,
                        public=self._options.public,
                    )
                    while store.alive:
                        began = time.monotonic()
                        await self._read(directory)
                        await asyncio.sleep(max(1.0, self._options.read_every_s - (time.monotonic() - began)))
            except UsageError:  # an initial peer that is no address
                raise
            except SwarmError as error:
                await self._failed(error)
            await asyncio.sleep(RETRY_S)

    async def _failed(self, error: SwarmError) -> None:
        """Say that the last reading failed: in full in the log, without addresses on the page."""
        _log.warning("the swarm cannot be read", why=str(error))
        why = "no node of the swarm answers" if isinstance(error, Unreachable) else str(error)
        if not isinstance(error, Unreachable | ClockSkew | SwarmTimeout):
            why = type(error).__name__
        self._seen.reading = self._seen.reading.model_copy(update={"error": why[:TEXT_MAX]})
        await self._republish()
        self._first.set()

    async def _read(self, directory: Directory) -> None:
        """Read everything once. Raises NetworkError, SwarmTimeout."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                records, others = await self._records(directory, await directory.models())
        except TimeoutError:
            raise SwarmTimeout(f"the DHT was not read within {READ_TIMEOUT_S:.0f} s") from None
        now = self._clock()
        self._seen = _Seen(records, others, Reading(at=now, took_s=round(time.monotonic() - began, 3)))
        self._new_records.set()
        stats = await self._asked(self._database.probe_stats(now))
        self._probes = stats if stats is not None else self._probes
        await self._republish()
        await self._remember(now)
        self._first.set()

    async def _records(
        self, directory: Directory, entries: Sequence[ModelEntry]
    ) -> tuple[tuple[Announcement, ...], tuple[int, ...]]:
        turns = asyncio.Semaphore(SURVEYS_MAX)
        failures: list[SwarmError] = []

        async def survey(entry: ModelEntry) -> tuple[list[Announcement], tuple[int, ...]]:
            async with turns:
                try:
                    found = await directory.survey(entry.root, entry.n_blocks)
                except SwarmError as error:
                    failures.append(error)
                    return [], ()
            return [signed.announcement for signed in found.servers], found.other_protocols

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(survey(entry)) for entry in choose(entries, self._known)]
        if failures:  # half a reading would call models broken that are not
            raise failures[0]
        records = [record for task in tasks for record in task.result()[0]]
        others = {protocol for task in tasks for protocol in task.result()[1]}
        return tuple(records[:RECORDS_MAX]), tuple(sorted(others))

    async def _remember(self, now: float) -> None:
        """Write one sample of each model, and keep in mind those that are served."""
        summaries = self.published.assessment.state.models
        for model in summaries:
            if model.servers_online:
                self._known[model.root] = KnownModel(model.name, model.n_blocks)
        for root in list(self._known)[: max(0, len(self._known) - MODELS_MAX)]:
            del self._known[root]
        samples = [
            Sample(
                root=model.root,
                name=model.name,
                n_blocks=model.n_blocks,
                coverage=model.coverage,
                servers=model.servers_online,
                decode_tps=model.decode_tps,
                prefill_tps=model.prefill_tps,
                free_tokens=model.free_tokens,
                healthy=float(model.status != "broken"),
            )
            for model in summaries
            if model.servers_online or model.root in self._known  # nobody fills the disk with names alone
        ]
        peers = [(key, contact.first_seen) for key, contact in self._contacts.known.items() if contact.answered_at]
        await self._asked(self._database.record(now, samples, peers))

    async def _asked(self, future: Future[Result]) -> Result | None:
        """Wait for the database; a problem with it never stops the page."""
        try:
            return await asyncio.wrap_future(future)
        except sqlite3.DatabaseError as error:
            _log.warning("history", problem=str(error))
            return None

    # --- visiting and publishing -------------------------------------------------------------------------------------

    async def _visit_forever(self) -> None:
        while True:
            await self._new_records.wait()
            self._new_records.clear()
            await self._contacts.visit(self._seen.records)
            await self._republish()

    async def _republish(self) -> None:
        self._revision += 1
        sighting = replace(self._sighting(), revision=self._revision)
        published = await asyncio.to_thread(_publish, sighting, self._clock(), self._database.problem)
        if published.assessment.state.revision < self.published.assessment.state.revision:
            return  # the other task was faster with something newer
        self.published = published
        self._changed.set()
        self._changed = asyncio.Event()
        if self.stopping:
            self._changed.set()

    def _sighting(self) -> Sighting:
        return Sighting(
            network=self._options.network,
            records=self._seen.records,
            contacts=dict(self._contacts.known),
            known=dict(self._known),
            probes=self._probes,
            reading=self._seen.reading,
            other_protocols=self._seen.other_protocols,
            join_addresses=self._options.join_addresses,
            revision=self._revision,
        )


class SwarmTimeout(SwarmError):
    """A reading that took too long."""


def choose(entries: Sequence[ModelEntry], known: dict[str, KnownModel]) -> list[ModelEntry]:
    """Say which models to look up: those that were served lately first, the rest while there is room for their keys.

    Anybody can announce names; a flood of them must not push out what works.
    """
    chosen: list[ModelEntry] = []
    keys = 0
    for entry in sorted(
        set(entries), key=lambda e: (known.get(e.root) != KnownModel(e.name, e.n_blocks), e.n_blocks, e)
    ):
        if (entry.root, entry.n_blocks) in {(other.root, other.n_blocks) for other in chosen}:
            continue
        keys += -(-entry.n_blocks // RECORD.spans_per_key)
        if len(chosen) == MODELS_MAX or keys > KEYS_MAX:
            break
        chosen.append(entry)
    return chosen


def _publish(sighting: Sighting, now: float, history_problem: str) -> Published:
    assessment = assess(sighting, now)
    return Published(
        assessment,
        assessment.state.model_dump_json().encode(),
        {root: detail.model_dump_json().encode() for root, detail in assessment.details.items()},
        metrics_text(assessment.state, history_problem),
    )
