"""TCP hole punching: two peers behind routers connect to each other at the same moment.

Each has a half: a connection to the anchor, which tells it from where the other's half comes. Each connects to there,
from the very port of its half, and listens on it: a router that keeps its mappings lets the other's packets in as
answers. (Ford, Srisuresh, Kegel: Peer-to-Peer Communication Across Network Address Translators, 2005, section 4.)
"""

import asyncio
import ipaddress
import socket
from dataclasses import dataclass

from swarm.limits import limit
from swarm.net.address import Tcp
from swarm.net.halves import plain, reusable
from swarm.net.race import end
from swarm.net.reach import makes_sense


@dataclass(frozen=True, slots=True)
class PunchLimits:
    """How long a punch is tried.

    The caller's patience is `base_s` + `rtts` round trips of both halves together. On busy machines all takes longer:
    so it is also `times` as long as the handshake on the relayed connection takes, which runs beside the punch.
    """

    base_s: float = limit(0.1, "s", "of patience beside the round trips")
    rtts: float = limit(1.5, "round trips", "of patience")
    least_s: float = limit(0.2, "s", "of patience at least")
    times: float = limit(2.0, "handshakes", "of patience at least")
    most_s: float = limit(2.5, "s", "a punch ends after this; the relayed connection is used then")
    gap_s: float = limit(0.06, "s", "before the next try where the other's router answered that nothing listens")
    tries_max: int = limit(4, "connections", "to one address, so that no anchor can make this side flood another")
    failed_s: float = limit(600.0, "s", "after a punch that failed, no punch with the same peer is waited for")
    failed_max: int = limit(1024, "peers", "with which a punch failed that are remembered; the oldest is forgotten")

    def patience_s(self, rtt_ms: int) -> float:
        """Return the seconds after which a relayed connection that works is used."""
        return min(self.most_s, max(self.least_s, self.base_s + self.rtts * rtt_ms / 1000))


class Failures:
    """The peers with which a punch failed lately. Times are passed in.

    Their routers have not changed since: a relayed connection that takes the place of another waits for no punch.
    """

    def __init__(self, limits: PunchLimits) -> None:
        self._limits = limits
        self._at: dict[str, float] = {}  # the oldest first

    def add(self, peer: str, now: float) -> None:
        """Take note that a punch with a peer has failed."""
        self.forget(peer)
        self._at[peer] = now
        if len(self._at) > self._limits.failed_max:
            del self._at[next(iter(self._at))]

    def forget(self, peer: str) -> None:
        """Take note that one has succeeded."""
        self._at.pop(peer, None)

    def has(self, peer: str, now: float) -> bool:
        """Whether a punch with this peer failed lately."""
        return now - self._at.get(peer, float("-inf")) < self._limits.failed_s


@dataclass(frozen=True, slots=True)
class Here:
    """This side's end of a half: where a punch begins."""

    family: int
    host: str
    port: int

    @classmethod
    def of(cls, half: socket.socket) -> "Here":
        """Return the end of a connected half. Raises OSError."""
        host, port = half.getsockname()[:2]
        return cls(half.family, plain(host), port)


async def punch(
    here: Here, peer: Tcp, local: Tcp | None, public: bool, limits: PunchLimits = PunchLimits()
) -> socket.socket | None:
    """Connect from the half's port while the other side connects to us. Returns None where that does not work in time.

    local: the other one's address in its own network, where both halves come from one: two peers behind one router
    meet there, if it is of this side's network.
    """
    to = local if local is not None and _neighbours(here.host, local.host) else peer
    if to.port < 1024 or (to is peer and not makes_sense(peer.host, public)):
        return None
    try:
        door = reusable(here.family, here.port)  # the one who is a moment later comes in here
    except OSError:
        return None
    loop = asyncio.get_running_loop()
    found: socket.socket | None = None

    def drop(late: socket.socket | None) -> None:
        if late is not None and late is not found:
            late.close()

    try:
        door.listen(4)
        tasks = (loop.create_task(_come_in(door, to.host)), loop.create_task(_go_out(here, to, limits)))
        tasks[0].add_done_callback(lambda _: door.close())  # it waits for the door's connections until it has ended
    except OSError:
        door.close()
        return None
    try:
        async with asyncio.timeout(limits.most_s):
            waiting = set(tasks)
            while waiting and found is None:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                found = next((sock for task in done if (sock := task.result()) is not None), None)
    except (TimeoutError, OSError):
        pass
    finally:
        try:
            await end(tasks, drop)
        except asyncio.CancelledError:
            if found is not None:
                found.close()
            raise
    return found


async def _come_in(door: socket.socket, host: str) -> socket.socket | None:
    while True:
        try:
            sock, address = door.accept()  # not by the loop: a task that is cancelled then would lose the socket
        except BlockingIOError:
            await _readable(door)
            continue
        if plain(address[0]) == host:
            sock.setblocking(False)
            return sock
        sock.close()


async def _readable(sock: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)


async def _go_out(here: Here, to: Tcp, limits: PunchLimits) -> socket.socket | None:
    loop = asyncio.get_running_loop()
    host = f"::ffff:{to.host}" if here.family == socket.AF_INET6 and ":" not in to.host else to.host
    for _ in range(limits.tries_max):
        sock = None
        try:
            sock = reusable(here.family, here.port)
            await loop.sock_connect(sock, (host, to.port))
            return sock
        except (ConnectionRefusedError, ConnectionResetError):  # its router answers before its own packet has left
            if sock is not None:
                sock.close()
            await asyncio.sleep(limits.gap_s)
        except OSError:  # the other one has come in
            if sock is not None:
                sock.close()
            return None
        except BaseException:
            if sock is not None:
                sock.close()
            raise
    return None


def _neighbours(here: str, there: str) -> bool:
    """Whether two addresses are of one private network, as far as that can be told: /24, or /64 of IPv6."""
    try:
        ours, theirs = ipaddress.ip_address(here), ipaddress.ip_address(there)
    except ValueError:
        return False
    if ours.version != theirs.version or theirs.is_loopback or theirs.is_multicast or theirs.is_unspecified:
        return False
    network = ipaddress.ip_network((here, 24 if ours.version == 4 else 64), strict=False)
    return theirs in network and ours != theirs
