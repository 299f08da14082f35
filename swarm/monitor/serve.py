"""The life of `swarm-health`: database, monitor, probes and web server, in one loop."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import structlog

from swarm.access import Access
from swarm.commands import Ready, Stop
from swarm.dht.light import open_light
from swarm.errors import BadConfiguration
from swarm.groups import ungrouped
from swarm.identity import Identity
from swarm.monitor.app import make_app
from swarm.monitor.auditing import AuditLine, auditor
from swarm.monitor.children import ChildLimits, Joining
from swarm.monitor.contacts import SwarmDialler
from swarm.monitor.history import Database
from swarm.monitor.probing import prober
from swarm.monitor.service import Monitor, MonitorLimits, MonitorOptions
from swarm.monitor.state import API
from swarm.net import ports
from swarm.net.lan import ways_in
from swarm.net.reach import is_public
from swarm.options import Reading
from swarm.web import WebServer, url_of

_log = structlog.get_logger("swarm.monitor")


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthArguments:
    """The arguments of `swarm-health`."""

    listen: tuple[str, ports.Port]
    reading: Reading
    database: Path
    join_addresses: tuple[str, ...]
    probes: tuple[str, ...]
    probe_every_s: float
    gateways: tuple[str, ...] = ()  # URLs
    audits: tuple[str, ...] = ()
    audit_every_s: float = 300.0
    audit_share: float = 0.02
    audit_evidence: Path | None = None  # a folder
    limits: MonitorLimits = field(default_factory=MonitorLimits)


class HealthReady(Ready):
    """The ready file: `url` is the page's. Servers see `peer_id` when they are greeted."""

    url: str


async def serve_health(arguments: HealthArguments, ready: Callable[[Ready], None], stop: Stop) -> None:
    """Serve until asked to stop. Raises UsageError."""
    models_max = ChildLimits().models_max
    for option, models in (("--probe", arguments.probes), ("--audit", arguments.audits)):
        if len(models) > models_max:
            raise BadConfiguration(option, f"at most {models_max} models")
    if len(arguments.gateways) > API.gateways_max:
        raise BadConfiguration("--gateway", f"at most {API.gateways_max} gateways")
    reading, path = arguments.reading, arguments.reading.identity
    identity = Identity.generate() if path is None else Identity.load_or_create(path)
    own = None if path is None else identity.peer_id  # without a file it reads, and no listed peer answers it
    access = Access.load(reading.network_key, reading.allow_peers, own)
    peers = await ways_in(reading.initial_peers, reading.network, access, lan=reading.lan)
    arguments = replace(arguments, reading=replace(reading, initial_peers=peers))
    reading = arguments.reading
    with ports.listening(*arguments.listen) as listening:
        database = await asyncio.to_thread(Database, arguments.database)
        public = access.network_key is None and await is_public(reading.initial_peers)
        dialler = SwarmDialler(identity, reading.network, access, public=public, limits=arguments.limits.contacts)
        monitor = Monitor(
            MonitorOptions(
                network=reading.network,
                join_addresses=arguments.join_addresses or (reading.initial_peers if public else ()),
                gateways=arguments.gateways,
                public=public,
                limits=arguments.limits,
            ),
            lambda: open_light(reading.network, reading.initial_peers, time.time, access),
            dialler,
            database,
            time.time,
        )
        try:
            with ungrouped():
                await _live(arguments, identity, monitor, database, listening, ready, stop)
        finally:
            await dialler.close()
            await asyncio.to_thread(database.close)


async def _live(
    arguments: HealthArguments,
    identity: Identity,
    monitor: Monitor,
    database: Database,
    listening: socket.socket,
    ready: Callable[[Ready], None],
    stop: Stop,
) -> None:
    reading = arguments.reading
    joining = Joining(
        initial_peers=reading.initial_peers,
        network=reading.network,
        network_key=reading.network_key,
        allow_peers=reading.allow_peers,
        identity=reading.identity,
    )
    every_s, keep = arguments.probe_every_s, database.record_probe
    children, findings = monitor.children, asyncio.Queue[AuditLine](ChildLimits().lines_max)
    children.probers = [prober(model, every_s, joining, keep) for model in arguments.probes]
    if arguments.audits:
        schedule = arguments.audit_every_s, arguments.audit_share, arguments.audit_evidence
        children.auditor = auditor(arguments.audits, *schedule, joining, partial(_put, findings))
    server = WebServer(make_app(monitor))
    async with asyncio.TaskGroup() as group:
        working = [group.create_task(monitor.run()), *(group.create_task(child.run()) for child in children.all)]
        working.append(group.create_task(_take(findings, monitor)))
        serving = group.create_task(server.serve(sockets=[listening]))
        await monitor.read_once()
        url = url_of(listening)
        _log.info("ready", url=url, network=reading.network)
        ready(HealthReady(peer_id=identity.peer_id, addresses=(), pid=os.getpid(), url=url))
        await stop.wait()
        _log.info("stopping")
        monitor.board.stop()
        server.should_exit = True
        await serving
        for task in working:
            task.cancel()


def _put(findings: "asyncio.Queue[AuditLine]", line: AuditLine) -> None:
    with suppress(asyncio.QueueFull):
        findings.put_nowait(line)


async def _take(findings: "asyncio.Queue[AuditLine]", monitor: Monitor) -> None:
    """Hand the auditor's findings to the monitor, in order."""
    while True:
        await monitor.audited(await findings.get())
