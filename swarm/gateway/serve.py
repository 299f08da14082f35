"""The life of `swarm-gateway`: the directory, the models and the web server, in one loop."""

import asyncio
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog

from swarm.access import Access
from swarm.client.auditing.auditor import AuditLimits
from swarm.client.planning.preferences import Quality
from swarm.client.session.membership import joined
from swarm.commands import Ready, Stop
from swarm.compute.task import Probe
from swarm.compute.thread import ComputeThread
from swarm.config import UpstreamSettings, Way
from swarm.dht.reading import chosen, open_directory
from swarm.errors import BadConfiguration
from swarm.gateway.admission import AdmissionLimits, GenerationLimits
from swarm.gateway.ahead import DraftUse
from swarm.gateway.app import Gateway, GatewayLimits, make_app
from swarm.gateway.conversations import ConversationLimits
from swarm.gateway.doors import DoorOptions
from swarm.gateway.engine import EngineLimits, PrefixUse
from swarm.gateway.following import Following, followed
from swarm.gateway.health import Readiness
from swarm.gateway.keys import Keys
from swarm.gateway.loading import ModelOptions
from swarm.gateway.models import Models, serving
from swarm.gateway.recorder import Recorder
from swarm.gateway.upstream import polled
from swarm.identity import Identity
from swarm.model.allocator import bound_kernels, keep_free_memory, return_kept_memory
from swarm.net import ports
from swarm.net.lan import ways_in
from swarm.options import Reading
from swarm.web import WebServer, url_of

_log = structlog.get_logger("swarm.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayArguments:
    """The arguments of `swarm-gateway`. models: none for those that the swarm serves and this gateway may load."""

    listen: tuple[str, ports.Port]
    models: tuple[str, ...]
    reading: Reading
    options: ModelOptions
    keys: Path | None = None
    is_open: bool = False  # without keys, and on any address
    allowed_origins: tuple[str, ...] = ()
    allowed_downloads: tuple[str, ...] = ()
    upstreams: tuple[UpstreamSettings, ...] = ()
    threads: int | None = None
    directory: Way = "auto"
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    engine: EngineLimits = field(default_factory=EngineLimits)


def arguments_of(
    reading: Reading,
    upstreams: tuple[UpstreamSettings, ...],
    *,
    listen: tuple[str, ports.Port],
    model: tuple[str, ...],
    allow_download: tuple[str, ...],
    keys: Path | None,
    concurrency: int,
    prefixes: PrefixUse,
    draft: DraftUse,
    no_keys: bool,
    allow_origin: tuple[str, ...],
    ends_memory: int | None,
    revision: str | None,
    token: str | None,
    cache_dir: Path | None,
    dtype: str,
    quality: Quality,
    exact: bool,
    keep_conversations: float,
    step_timeout: float,
    audit: float,
    threads: int | None,
    directory: Way,
) -> GatewayArguments:
    """Return the command's options, which come by their names, as arguments."""
    return GatewayArguments(
        listen=listen,
        models=model,
        reading=reading,
        options=ModelOptions(
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            dtype=dtype,
            ends_bytes_max=ends_memory,
            audits=AuditLimits(share=audit),
            quality=quality,
            exact=exact,
        ),
        keys=keys,
        is_open=no_keys,
        allowed_origins=allow_origin,
        allowed_downloads=allow_download,
        upstreams=upstreams,
        threads=threads,
        directory=directory,
        limits=GatewayLimits(
            admission=AdmissionLimits(running_max=concurrency), generations=GenerationLimits(concurrency)
        ),
        engine=EngineLimits(
            step_timeout_s=step_timeout,
            sessions_max=max(60, concurrency + 12),
            conversations=ConversationLimits(idle_s=keep_conversations),
            prefixes=prefixes,
            draft=draft,
        ),
    )


class GatewayReady(Ready):
    """The ready file: `url` is where requests go."""

    url: str
    models: tuple[str, ...]


async def serve_gateway(arguments: GatewayArguments, ready: Callable[[Ready], None], stop: Stop) -> None:
    """Serve until asked to stop. Raises UsageError or NetworkError."""
    doors, reading, path = doors_of(arguments), arguments.reading, arguments.reading.identity
    way = chosen(arguments.directory)
    identity = Identity.generate() if path is None else Identity.load_or_create(path)
    with ports.listening(*arguments.listen) as listening, computing(arguments.threads) as compute:
        access = Access.load(reading.network_key, reading.allow_peers)
        peers = await ways_in(reading.initial_peers, reading.network, access, lan=reading.lan)
        reading = replace(reading, initial_peers=peers)
        join = partial(open_directory, reading.network, reading.initial_peers, access, way)
        joining = joined(join, identity, network=reading.network, access=access)
        async with AsyncExitStack() as entered:
            upstreams = await entered.enter_async_context(polled(arguments.upstreams))
            member = await entered.enter_async_context(joining)
            options = arguments.options
            models = await entered.enter_async_context(serving(Models(member, compute, options, arguments.engine)))
            for name in arguments.models:
                await models.add(name)
            following = Following(member.directory, models, options, arguments.allowed_downloads, time.monotonic)
            await entered.enter_async_context(followed(None if arguments.models else following))
            recorder = Recorder()
            models.watch(recorder)
            gateway = Gateway(
                models,
                arguments.limits,
                doors=doors,
                recorder=recorder,
                readiness=partial(readiness, models, doors.keys, all_needed=bool(arguments.models)),
                upstreams=upstreams,
            )
            await _live(gateway, models, compute, identity, listening, ready, stop)


def doors_of(arguments: GatewayArguments) -> DoorOptions:
    """Return which requests are let in. Raises BadConfiguration for a gateway that strangers could use unawares."""
    on_loopback = _is_loopback(arguments.listen[0])
    keys = None if arguments.keys is None else Keys(arguments.keys, time.monotonic)
    if keys is not None and arguments.is_open:
        raise BadConfiguration("--no-keys", "there are --keys, too; leave one of them out")
    if keys is None and not on_loopback and not arguments.is_open:
        why = "others could use this gateway without a key; pass --keys FILE, or --no-keys if that is meant"
        raise BadConfiguration("--listen", why)
    return DoorOptions(keys, on_loopback and not arguments.is_open, frozenset(arguments.allowed_origins))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def readiness(models: Models, keys: Keys | None, *, all_needed: bool) -> Readiness:
    """Return whether models have routes now: all of them, or one at least where they follow the swarm."""
    routes = await models.routes()
    has_route = [not why for why in routes.values()]
    is_ready = bool(has_route) and (all(has_route) if all_needed else any(has_route))
    return Readiness(is_ready, routes, (keys.problem,) if keys is not None and keys.problem else ())


async def _live(
    gateway: Gateway,
    models: Models,
    compute: ComputeThread,
    identity: Identity,
    listening: socket.socket,
    ready: Callable[[Ready], None],
    stop: Stop,
) -> None:
    url, names = url_of(listening), tuple(models.names)

    def on_started() -> None:
        _log.info("ready", url=url, models=names)
        ready(GatewayReady(peer_id=identity.peer_id, addresses=(), pid=os.getpid(), url=url, models=names))

    server = WebServer(make_app(gateway), on_started)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listening]))
        limits = gateway.limits
        upkeep = compute.watch(), _close_old(models, limits.close_old_s), _give_back(compute, limits.give_back_s)
        upkeeping = [group.create_task(each) for each in upkeep]
        await stop.wait()
        _log.info("stopping")
        server.should_exit = True
        await serving
        for task in upkeeping:
            task.cancel()


async def _close_old(models: Models, every_s: float) -> NoReturn:
    """Close conversations in time, for ever: without a request, nothing else would, and servers hold their memory."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await models.close_old()
        except Exception:  # noqa: BLE001 - of one conversation; the others have requests
            _log.exception("an idle conversation did not close")


async def _give_back(compute: ComputeThread, every_s: float) -> NoReturn:
    """Give freed memory back to the system, for ever: the allocator keeps what long prompts took."""
    while True:
        await asyncio.sleep(every_s)
        compute.submit(Probe(return_kept_memory, is_chore=True), lambda _: None)


@contextmanager
def computing(threads: int | None) -> Iterator[ComputeThread]:
    """Run a compute thread within the block."""
    bound_kernels()
    keep_free_memory()
    compute = ComputeThread(asyncio.get_running_loop(), threads)
    try:
        yield compute
    finally:
        compute.stop()
