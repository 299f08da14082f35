"""Mappings that stay: found at the start, renewed while they are needed, removed at the end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random, SystemRandom
from typing import TypeAlias, TypeVar

import structlog

from swarm.groups import ungrouped
from swarm.net.mapping.gateway import Gateway, default_gateway
from swarm.net.mapping.limits import MappingLimits
from swarm.net.mapping.natpmp import NatPmp
from swarm.net.mapping.pcp import Pcp
from swarm.net.mapping.plan import Lease, is_lost, next_s
from swarm.net.mapping.upnp import Upnp
from swarm.net.mapping.way import Mapping, MappingFailed, Way, check

_log = structlog.get_logger("swarm.net")

Result = TypeVar("Result")
FindGateway: TypeAlias = Callable[[], Awaitable[Gateway]]
MakeWays: TypeAlias = Callable[[Gateway], Sequence[Way]]


@asynccontextmanager
async def map_ports(
    ports: Sequence[int],
    limits: MappingLimits | None = None,
    find_gateway: FindGateway = default_gateway,
    make_ways: MakeWays | None = None,
    *,
    wait: bool = True,
) -> "AsyncIterator[Mapped]":
    """Have the router forward these TCP ports for as long as the context lasts. Never raises for a router's sake.

    ports: of this machine; each is wished for outside, too. wait: until the router was asked; else `Mapped.tried` does.
    """
    limits = limits or MappingLimits()
    assert 0 < len(ports) <= limits.ports_max
    assert len({*ports}) == len(ports)
    mapped = Mapped(ports, limits, find_gateway, make_ways or (lambda gateway: all_ways(gateway, limits)))
    try:
        with ungrouped():
            async with asyncio.TaskGroup() as group:
                keeper = group.create_task(mapped.keep())
                try:
                    if wait:
                        await mapped.tried()
                    yield mapped
                finally:
                    keeper.cancel()
    finally:
        await mapped.remove()


def all_ways(gateway: Gateway, limits: MappingLimits, random: Random | None = None) -> Sequence[Way]:
    """Return the protocols that are tried with a router."""
    random = random or SystemRandom()
    return (Pcp(gateway, limits, random), NatPmp(gateway, limits), Upnp(gateway, limits, random))


@dataclass(frozen=True, slots=True)
class Found:
    """By which protocol the router maps our ports, and for how long."""

    way: Way
    mappings: tuple[Mapping, ...]
    lease: Lease


class Mapped:
    """The ports that the router forwards now. Lives in the event loop."""

    def __init__(
        self, ports: Sequence[int], limits: MappingLimits, find_gateway: FindGateway, make_ways: MakeWays
    ) -> None:
        self.refusals: tuple[MappingFailed, ...] = ()  # of the last attempt, if it found nothing
        self._ports, self._limits = ports, limits
        self._find_gateway, self._make_ways = find_gateway, make_ways
        self._gateway: Gateway | None = None  # that was asked last
        self._found: Found | None = None
        self._changed, self._asked, self._tried = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def mappings(self) -> tuple[Mapping, ...]:
        """One for each port, in their order; or none at all."""
        return self._found.mappings if self._found is not None else ()

    async def changed(self, since: tuple[Mapping, ...]) -> tuple[Mapping, ...]:
        """Return the mappings as soon as an address, a port or the protocol is another than in `since`."""
        while self.mappings == since:
            await self._changed.wait()
        return self.mappings

    async def tried(self) -> None:
        """Wait until the router was asked for the first time: at most `probe_s`, where none answers."""
        await self._tried.wait()

    def renew_soon(self) -> None:
        """Ask the router again now, for example because a port does not answer any more."""
        self._asked.set()

    async def keep(self) -> None:
        """Ask for the mappings; then renew them, or look for a router, for ever."""
        now_s = asyncio.get_running_loop().time
        await self.renew()
        self._tried.set()
        while True:
            lease = self._found.lease if self._found is not None else None
            due_s = now_s() + next_s(lease, now_s(), self._limits)
            while (left_s := due_s - now_s()) > 0 and not self._asked.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, self._limits.look_s)):
                        await self._asked.wait()
                if await self._elsewhere():
                    break
            self._asked.clear()
            await self.renew()

    async def renew(self) -> None:
        """Ask the router once: for what it forwards already, and where it does not answer, for anything."""
        before = self.mappings
        try:
            self._found = await self._renewed()
            self.refusals = ()
        except* MappingFailed as failures:
            self.refusals = tuple(error for error in failures.exceptions if isinstance(error, MappingFailed))
            if (found := self._found) is not None:
                lease = found.lease.failed()
                lost = is_lost(lease, asyncio.get_running_loop().time(), self._limits)
                self._found = None if lost else replace(found, lease=lease)
        if self.mappings != before:
            why = "; ".join(map(str, self.refusals))
            _log.info("ports at the router", mapped=[str(mapping) for mapping in self.mappings], why=why)
            self._changed.set()
            self._changed = asyncio.Event()

    async def remove(self) -> None:
        """Have the router forward no longer."""
        found, self._found = self._found, None
        if found is not None:
            await _unmap(found.way, found.mappings, self._limits)

    async def _elsewhere(self) -> bool:
        """Tell whether the gateway is another than the one that was asked last."""
        try:
            return await self._find_gateway() != self._gateway
        except MappingFailed:
            return self._gateway is not None

    async def _renewed(self) -> Found:
        """Raises a group of MappingFailed."""
        before, self._gateway = self._gateway, None
        try:
            self._gateway = await self._find_gateway()
        except MappingFailed as error:
            raise ExceptionGroup("no router", [error]) from None
        finally:
            if self._gateway != before:
                self._found = None  # what the router there forwards leads nowhere
        ports, at_s = {port: port for port in self._ports}, asyncio.get_running_loop().time()
        if (found := self._found) is not None:
            ports = {mapping.internal: mapping.external.port for mapping in found.mappings}
            with contextlib.suppress(MappingFailed):
                return _found(found.way, await map_all(found.way, ports, self._limits, renews=True), at_s)
        return _found(*await first_to_map(self._make_ways(self._gateway), ports, self._limits), at_s)


def _found(way: Way, mappings: tuple[Mapping, ...], at_s: float) -> Found:
    """at_s: a lease begins at the request at the earliest."""
    return Found(way, mappings, Lease(at_s, min(mapping.lifetime_s for mapping in mappings)))


async def first_to_map(
    ways: Sequence[Way], ports: dict[int, int], limits: MappingLimits
) -> tuple[Way, tuple[Mapping, ...]]:
    """Probe all ways side by side, and map by the first that answers; by the next, if it refuses.

    ports: the internal ones, each with the external one that is wished for. Raises a group of MappingFailed, one for
    each way.
    """
    probes = [asyncio.create_task(_probe(way, limits)) for way in ways]
    failures: list[MappingFailed] = []
    try:
        for probe in asyncio.as_completed(probes):
            try:
                way = await probe
                return way, await map_all(way, ports, limits)
            except MappingFailed as error:
                failures.append(error)
    finally:
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
    raise ExceptionGroup("no protocol", failures)


async def map_all(way: Way, ports: dict[int, int], limits: MappingLimits, renews: bool = False) -> tuple[Mapping, ...]:
    """Map all ports, or none. renews: what was renewed stays when another one fails. Raises MappingFailed."""
    done: list[Mapping] = []
    try:
        for internal, external in ports.items():
            done.append(await within(way, way.map(internal, external), limits.map_s))
            check(done[-1], limits)
    except (MappingFailed, asyncio.CancelledError):
        if not renews:
            await _unmap(way, done, limits)
        raise
    return tuple(done)


async def within(way: Way, answer: Awaitable[Result], seconds: float) -> Result:
    """Return what a way returns. Raises MappingFailed, also where it takes too long or the network fails."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise MappingFailed(way.by, f"no answer in {seconds:.1f} s") from None
    except OSError as error:
        raise MappingFailed(way.by, error.strerror or str(error)) from None


async def _probe(way: Way, limits: MappingLimits) -> Way:
    await within(way, way.probe(), limits.probe_s)
    return way


async def _unmap(way: Way, mappings: Sequence[Mapping], limits: MappingLimits) -> None:
    async def unmap(mapping: Mapping) -> None:
        try:
            await within(way, way.unmap(mapping), limits.unmap_s)
        except MappingFailed as error:
            _log.info("a port stays mapped until its lease ends", mapping=str(mapping), why=str(error))

    await asyncio.gather(*map(unmap, mappings))
