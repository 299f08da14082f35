"""The addresses of this machine towards outside, and notice of their changes: a new network, or a night asleep.

    async for change in changes():
        announce(change.addresses)

All of it is asked of this machine's kernel. No packet is sent, and no other machine is asked.
"""

import asyncio
import ipaddress
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass

import psutil

from swarm.limits import limit
from swarm.net.address import Tcp
from swarm.net.ports import EVERY


@dataclass(frozen=True, slots=True)
class AddressLimits:
    """Of this machine's addresses, and of the notice of their changes."""

    addresses_max: int = limit(4, "addresses", "of one machine; diallers try no more")
    every_s: float = limit(3.0, "s", "between looks; each costs a few questions to the kernel")
    slept_s: float = limit(10.0, "s", "by which the wall clock is ahead of the monotonic one after a sleep")


@dataclass(frozen=True, slots=True)
class Change:
    """What has changed. addresses: of this machine now, at least one. slept_s: how long it was asleep, 0 if awake.

    gone: addresses that it used, and has no more.
    """

    addresses: tuple[str, ...]
    slept_s: float = 0.0
    gone: tuple[str, ...] = ()

    @property
    def breaks_connections(self) -> bool:
        """Whether connections have died: theirs is an address that is gone, or the peers have given them up."""
        return bool(self.gone) or self.slept_s > 0


# Addresses -----------------------------------------------------------------------------------------------------------


def own_addresses(limits: AddressLimits = AddressLimits()) -> tuple[str, ...]:
    """Return this machine's addresses from which it reaches others: global ones first, then IPv4 before IPv6.

    One of each family, from which the way out begins; where a family has no way out, as on a network of its own, those
    of all interfaces that are up. None where there is no network.
    """
    elsewhere = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # of documentation, so of no network
    found = [host for family, there in elsewhere.items() for host in _sources(family, there) or _of_interfaces(family)]
    return _sorted(filter(_leads_here, found))[: limits.addresses_max]


def dialled_at(address: Tcp) -> tuple[str, ...]:
    """Return where others dial a listener, as "host:port".

    Where it listens on every interface, they are this machine's addresses of the families that it takes, or loopback
    where there is no network.
    """
    hosts: tuple[str, ...] = (address.host,)
    if address.host in {EVERY, "0.0.0.0"}:  # noqa: S104 - compared, not bound
        both = address.host == EVERY
        hosts = tuple(host for host in own_addresses() if both or ":" not in host) or ("127.0.0.1",)
    return tuple(str(Tcp(host, address.port)) for host in hosts)


def _sources(family: socket.AddressFamily, there: str) -> tuple[str, ...]:
    """Return the address from which the kernel would send; none where it knows no way."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            if family == socket.AF_INET6:
                _prefer_lasting(probe)
            probe.connect((there, 9))  # sends nothing: only asks the kernel for a route
            return (str(probe.getsockname()[0]),)
    except OSError:
        return ()


def _prefer_lasting(probe: socket.socket) -> None:
    """Ask for the address that stays, and not for one that the kernel replaces each day for privacy (RFC 5014)."""
    options = {"linux": (72, 2), "darwin": (63, 0)}  # IPV6_ADDR_PREFERENCES: public; IPV6_PREFER_TEMPADDR: no
    if (option := options.get(sys.platform)) is not None:
        probe.setsockopt(socket.IPPROTO_IPV6, *option)


def held_addresses() -> frozenset[str]:
    """Return the addresses of all interfaces that are up: connections from these go on."""
    return frozenset((*_of_interfaces(socket.AF_INET), *_of_interfaces(socket.AF_INET6)))


def _of_interfaces(family: socket.AddressFamily) -> tuple[str, ...]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [each for name, all_ in psutil.net_if_addrs().items() if name in up for each in all_]
    return tuple(each.address for each in found if each.family == family)


def _leads_here(host: str) -> bool:
    """Whether others can dial an address: a link-local one of IPv6 is dialled through a link that only they know."""
    address = ipaddress.ip_address(host.partition("%")[0])
    of_one_link = address.version == 6 and address.is_link_local
    return not (address.is_loopback or of_one_link or address.is_unspecified or address.is_multicast)


def _sorted(hosts: Iterable[str]) -> tuple[str, ...]:
    def order(host: str) -> tuple[bool, int]:
        address = ipaddress.ip_address(host)
        return not address.is_global, address.version

    return tuple(sorted(dict.fromkeys(hosts), key=order))


# Changes -------------------------------------------------------------------------------------------------------------


class Watch:
    """Tells changes from looks at the addresses and two clocks."""

    def __init__(self, addresses: tuple[str, ...], wall: float, monotonic: float, slept_s: float) -> None:
        """wall, monotonic: seconds on a clock that runs while the machine sleeps, and on one that does not."""
        self._addresses, self._ahead, self._least_s = addresses, wall - monotonic, slept_s
        self._used = frozenset(addresses)  # connections may begin at each of them
        self._slept_s = 0.0

    def look(self, addresses: tuple[str, ...], held: Collection[str], wall: float, monotonic: float) -> Change | None:
        """Return what has changed since the last change. held: all addresses that this machine has.

        A machine without a network has nothing to say, and nobody to say it to: that it slept is kept until it has one.
        """
        before, self._ahead = self._ahead, wall - monotonic
        if self._ahead - before >= self._least_s:
            self._slept_s += self._ahead - before
        if not addresses:
            return None
        gone = self._used.difference(addresses, held)
        change = Change(addresses, self._slept_s, tuple(sorted(gone)))
        self._used = frozenset(addresses) if change.breaks_connections else self._used.union(addresses)
        if addresses == self._addresses and not change.breaks_connections:
            return None
        self._addresses, self._slept_s = addresses, 0.0
        return change


def changes(
    own: Callable[[], tuple[str, ...]] = own_addresses,
    held: Callable[[], Collection[str]] = held_addresses,
    *,
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    limits: AddressLimits = AddressLimits(),
) -> AsyncIterator[Change]:
    """Return an iterator over the changes of this machine's addresses, and its returns from sleep, from now on.

    A change that comes before the first step of the iterator is noticed at that step.
    """
    watch = Watch(own(), wall(), monotonic(), limits.slept_s)

    async def looked() -> AsyncIterator[Change]:
        while True:
            if (change := watch.look(own(), held(), wall(), monotonic())) is not None:
                yield change
            await sleep(limits.every_s)

    return looked()
