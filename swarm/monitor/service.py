"""The monitor: reads the DHT every 30 s, shakes hands with every server, remembers, and publishes the results.

Three tasks: one reads, one visits, one asks gateways. The board (`swarm.monitor.board`) is renewed after each of them.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from swarm.dht.directory import Directory
from swarm.dht.light import LightStore
from swarm.dht.records import Announcement
from swarm.dht.validator import Clock
from swarm.errors import ClockSkew, SwarmError, Unreachable, UsageError
from swarm.limits import limit
from swarm.monitor.assess import KnownModel, Sighting
from swarm.monitor.auditing import AuditLine, Orders, left_out
from swarm.monitor.board import Board, Published
from swarm.monitor.children import Children, problem_of
from swarm.monitor.contacts import ContactLimits, Contacts, Dialler, Loads
from swarm.monitor.gateways import GatewayLimits, watch
from swarm.monitor.history import Database, Sample
from swarm.monitor.reading import DirectoryTimeout, Found, ReadingLimits, read
from swarm.monitor.state import API, GatewayState, Health, History, ModelSummary, ProbeStats, Reading, Window
from swarm.monitor.verdicts import AuditResult, Records, shown

Open = Callable[[], AbstractAsyncContextManager[LightStore]]
Result = TypeVar("Result")
_log = structlog.get_logger("swarm.monitor")


@dataclass(frozen=True, slots=True)
class MonitorLimits:
    """How often the monitor looks, and how much it keeps ready."""

    read_every_s: float = limit(30.0, "s", "the DHT is read this often")
    retry_s: float = limit(5.0, "s", "after a reading that failed")
    fresh_s: float = limit(120.0, "s", "a page whose last reading is older is not healthy itself")
    history_cache_s: float = limit(15.0, "s", "one history is handed out again for so long")
    history_cache_max: int = limit(256, "histories", "kept; then all are dropped")
    event_clients_max: int = limit(256, "clients", "that wait for events; more are refused")
    reading: ReadingLimits = field(default_factory=ReadingLimits)
    contacts: ContactLimits = field(default_factory=ContactLimits)
    gateways: GatewayLimits = field(default_factory=GatewayLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorOptions:
    """The operator's choices."""

    network: str
    join_addresses: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()  # URLs
    public: bool = False  # see swarm.net.reach
    limits: MonitorLimits = MonitorLimits()


@dataclass(slots=True)
class Knowledge:
    """The facts of the moment. known: models that were served lately, by root; probes by root.

    doubted: peers that audits doubt, by root.
    """

    found: Found = Found()  # noqa: RUF009 - frozen
    reading: Reading = field(default_factory=lambda: Reading(at=None, took_s=None))
    known: dict[str, KnownModel] = field(default_factory=dict)
    probes: dict[str, tuple[ProbeStats, ...]] = field(default_factory=dict)
    gateways: tuple[GatewayState, ...] = ()
    audits: Records = field(default_factory=dict)
    doubted: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def sighting(self, options: MonitorOptions, contacts: Contacts, loads: Loads) -> Sighting:
        """Return a copy for the assessment."""
        return Sighting(
            network=options.network,
            records=self.found.records,
            contacts=dict(contacts.known),
            known=dict(self.known),
            probes=self.probes,
            reading=self.reading,
            other_protocols=self.found.other_protocols,
            join_addresses=options.join_addresses,
            gateways=self.gateways,
            loads=dict(loads.known),
            audits=shown(self.audits, {(root, peer) for root, peers in self.doubted.items() for peer in peers}),
        )

    def served(self, summaries: tuple[ModelSummary, ...]) -> None:
        """Keep the models in mind that are served now, and forget others beyond `API.models_max`.

        First those that are not served now, then those of the fewest servers.
        """
        for model in sorted(summaries, key=lambda model: model.servers_online):
            if model.servers_online:
                self.known.pop(model.root, None)
                self.known[model.root] = KnownModel(model.name, model.n_blocks)
        for root in list(self.known)[: max(0, len(self.known) - API.models_max)]:
            del self.known[root]


class Monitor:
    """Lives in the loop; `run` is its life."""

    def __init__(
        self, options: MonitorOptions, open_store: Open, dialler: Dialler, database: Database, clock: Clock
    ) -> None:
        self.children = Children()
        self._options, self._open, self._clock, self._database = options, open_store, clock, database
        self._contacts = Contacts(dialler, clock, options.limits.contacts)
        self._loads = Loads(dialler, clock, options.limits.contacts)
        self._knowledge = Knowledge()
        self._new_records, self._first = asyncio.Event(), asyncio.Event()
        self._histories: dict[tuple[str | None, Window], tuple[float, bytes]] = {}
        first = Published.of(self._knowledge.sighting(options, self._contacts, self._loads), clock(), "")
        self.board = Board(first, options.limits.event_clients_max)

    async def run(self) -> None:
        """Read and visit until cancelled. Raises UsageError for initial peers that are no addresses."""
        await self._recall()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_forever())
            group.create_task(self._visit_forever())
            if self._options.gateways:
                group.create_task(watch(self._options.gateways, self._options.limits.gateways, self._told))

    async def read_once(self) -> None:
        """Wait until the first reading has ended, well or not."""
        await self._first.wait()

    def health(self) -> Health:
        """Return the condition of the monitor itself."""
        at = self._knowledge.reading.at
        age_s = None if at is None else max(0.0, self._clock() - at)
        return Health(
            ok=age_s is not None and age_s <= self._options.limits.fresh_s,
            reading_age_s=age_s,
            history=self._database.problem[: API.text_chars] or "ok",
            probe=problem_of(self.children.probers)[: API.text_chars],
            audit=problem_of([auditor] if (auditor := self.children.auditor) else ())[: API.text_chars],
        )

    async def history(self, root: str | None, window: Window) -> bytes | None:
        """Return a History in JSON, or None while the disk cannot be read."""
        now, limits = self._clock(), self._options.limits
        cached = self._histories.get((root, window))
        if cached is not None and 0 <= now - cached[0] < limits.history_cache_s:
            return cached[1]
        try:
            found: History = await asyncio.wrap_future(self._database.history(root, window, now))
        except sqlite3.DatabaseError as error:
            _log.warning("no history", why=str(error))
            return None
        if len(self._histories) >= limits.history_cache_max:
            self._histories.clear()
        self._histories[root, window] = (now, found.model_dump_json().encode())
        return self._histories[root, window][1]

    # --- reading -----------------------------------------------------------------------------------------------------

    async def _recall(self) -> None:
        remembered = await self._asked(self._database.remembered(self._clock()))
        if remembered is not None:
            self._knowledge.known = {root: KnownModel(*facts) for root, facts in remembered.models.items()}
            self._contacts.recall(remembered.first_seen)

    async def _read_forever(self) -> None:
        options = self._options
        while True:
            try:
                async with self._open() as store:
                    directory = Directory(
                        store, identity=None, network=options.network, clock=self._clock, public=options.public
                    )
                    while store.alive:
                        began = time.monotonic()
                        await self._read(directory)
                        await asyncio.sleep(max(1.0, options.limits.read_every_s - (time.monotonic() - began)))
            except UsageError:  # an initial peer that is no address
                raise
            except SwarmError as error:
                await self._failed(error)
            except Exception:  # noqa: BLE001 - whatever strangers' records bring about: the page goes on
                _log.exception("a reading failed")
            await asyncio.sleep(options.limits.retry_s)

    async def _failed(self, error: SwarmError) -> None:
        """Note that the last reading failed: in full in the log, without addresses on the page."""
        _log.warning("the swarm cannot be read", why=str(error))
        why = "no node of the swarm answers" if isinstance(error, Unreachable) else str(error)
        if not isinstance(error, Unreachable | ClockSkew | DirectoryTimeout):
            why = type(error).__name__
        reading = self._knowledge.reading
        self._knowledge.reading = reading.model_copy(update={"error": why[: API.text_chars]})
        await self._republish()
        self._first.set()

    async def _read(self, directory: Directory) -> None:
        """Read everything once. Raises NetworkError, RecordError."""
        began, knowledge = time.monotonic(), self._knowledge
        found = await read(directory, knowledge.known, self._options.limits.reading)
        now = self._clock()
        knowledge.found, knowledge.reading = found, Reading(at=now, took_s=round(time.monotonic() - began, 3))
        self._new_records.set()
        stats = await self._asked(self._database.probe_stats(now))
        knowledge.probes = stats if stats is not None else knowledge.probes
        audits = await self._asked(self._database.audits(now))
        knowledge.audits = audits if audits is not None else knowledge.audits
        await self._republish()
        await self._remember(now)
        self._first.set()

    async def _remember(self, now: float) -> None:
        """Write one sample of each model, and keep in mind those that are served."""
        summaries, knowledge = self.board.published.assessment.state.models, self._knowledge
        knowledge.served(summaries)
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
            if model.servers_online or model.root in knowledge.known  # names alone must not fill the disk
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
            try:
                await self._visit()
            except Exception:  # noqa: BLE001 - as above
                _log.exception("a round of visits failed")

    async def _visit(self) -> None:
        records, now = self._knowledge.found.records, self._clock()
        online = [key for key, contact in self._contacts.known.items() if contact.online(now)]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._loads.visit(records, online))  # first: calls leave few questions to an anchor
            group.create_task(self._contacts.visit(records))
        self._order_audits(records)
        await self._republish()

    def _order_audits(self, records: Sequence[Announcement]) -> None:
        """Tell the auditor which servers answer, and which of them it leaves out."""
        auditor = self.children.auditor
        if auditor is None:
            return
        now, known = self._clock(), self._contacts.known
        answering = {r.peer_id for r in records if r.public_key in known and known[r.public_key].online(now)}
        wrong = {peer for (_, peer), record in self._knowledge.audits.items() if left_out(record, now)}
        auditor.tell(Orders.of(answering, wrong).model_dump_json().encode())

    async def audited(self, line: AuditLine) -> None:
        """Take an audit's findings."""
        result = AuditResult(line.root, line.at, line.agreed, line.disputed, line.wrong)
        self._knowledge.doubted[line.root] = line.doubted
        await self._asked(self._database.record_audit(result))
        audits = await self._asked(self._database.audits(self._clock()))
        self._knowledge.audits = audits if audits is not None else self._knowledge.audits
        self._order_audits(self._knowledge.found.records)
        await self._republish()

    async def _told(self, gateways: tuple[GatewayState, ...]) -> None:
        self._knowledge.gateways = gateways
        await self._republish()

    async def _republish(self) -> None:
        sighting = self._knowledge.sighting(self._options, self._contacts, self._loads)
        await self.board.publish(sighting, self._clock(), self._database.problem)
