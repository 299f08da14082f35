"""Hole punching on loopback, where no router is in the way: who meets, and who is never dialled."""

import asyncio
import gc
import socket
import warnings
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from swarm.net.address import Tcp
from swarm.net.punch import Failures, Here, PunchLimits, _neighbours, punch

pytestmark = pytest.mark.real_time

PATIENT = PunchLimits(most_s=5.0)


@asynccontextmanager
async def ends(count=2):
    """Ends of halves: ports that something else of this process is connected from."""
    with socket.create_server(("127.0.0.1", 0)) as anchor:
        halves = []
        for _ in range(count):
            half = socket.socket()
            half.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            half.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            half.bind(("127.0.0.1", 0))
            half.connect(anchor.getsockname())
            halves.append(half)
        try:
            yield [Here.of(half) for half in halves]
        finally:
            for half in halves:
                half.close()


def at(here):
    return Tcp("127.0.0.1", here.port)


async def test_two_that_punch_at_once_meet():
    async with ends() as (one, other):
        socks = await asyncio.gather(
            punch(one, at(other), None, False, PATIENT), punch(other, at(one), None, False, PATIENT)
        )
        left, right = socks
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(left, b"hello")
        assert await loop.sock_recv(right, 5) == b"hello"
        for sock in socks:
            sock.close()


async def test_a_late_one_comes_in():
    async with ends() as (one, other):
        early = asyncio.create_task(punch(one, at(other), None, False, PATIENT))
        await asyncio.sleep(0.5)  # its own tries are over
        late = await punch(other, at(one), None, False, PATIENT)
        first = await early
        assert None not in (late, first)
        late.close()
        first.close()


async def test_who_gives_up_at_any_moment_leaves_no_socket_open(monkeypatch):
    async def found(*_):
        return socket.socket()

    monkeypatch.setattr("swarm.net.punch._go_out", found)
    async with ends(1) as (one,):
        moments = Counter()
        with warnings.catch_warnings(record=True) as left:
            warnings.simplefilter("always", ResourceWarning)
            for turns in range(12):
                punching = asyncio.create_task(punch(one, Tcp("127.0.0.9", 4000), None, False, PATIENT))
                for _ in range(turns):
                    await asyncio.sleep(0)
                punching.cancel()
                (sock,) = await asyncio.gather(punching, return_exceptions=True)
                moments[type(sock)] += 1
                if isinstance(sock, socket.socket):
                    sock.close()
                del sock, punching
                await asyncio.sleep(0.01)
                gc.collect()
        assert not [str(each.message) for each in left]
        assert moments[asyncio.CancelledError] > 3
        assert moments[socket.socket] > 1


async def test_patience_ends():
    async with ends(1) as (one,):
        began = asyncio.get_running_loop().time()
        assert await punch(one, Tcp("127.0.0.1", one.port - 1), None, False, PunchLimits(most_s=0.2)) is None
        assert asyncio.get_running_loop().time() - began < 2


@pytest.mark.parametrize(
    ("public", "peer", "local"),
    [
        (True, Tcp("127.0.0.1", 4000), None),
        (True, Tcp("192.168.0.9", 4000), None),
        (False, Tcp("127.0.0.1", 1023), None),
        (False, Tcp("127.0.0.2", 4000), Tcp("127.0.0.1", 22)),  # a neighbour would be, but for its port
        (False, Tcp("224.0.0.1", 4000), None),
    ],
)
async def test_nonsense_is_dialled_by_no_punch(public, peer, local, monkeypatch):
    monkeypatch.setattr("swarm.net.punch._neighbours", lambda here, there: True)
    async with ends(1) as (one,):
        async with asyncio.timeout(30):
            assert await punch(one, peer, local, public, PATIENT) is None


async def test_a_neighbour_is_met_at_its_own_address(monkeypatch):
    monkeypatch.setattr("swarm.net.punch._neighbours", lambda here, there: True)
    async with ends() as (one, other):
        nowhere = Tcp("127.0.0.1", 1024)
        socks = await asyncio.gather(
            punch(one, nowhere, at(other), True, PATIENT), punch(other, nowhere, at(one), True, PATIENT)
        )
        assert None not in socks
        for sock in socks:
            sock.close()


async def test_only_the_expected_host_comes_in():
    async with ends(1) as (one,):
        waiting = asyncio.create_task(punch(one, Tcp("127.0.0.9", 4000), None, False, PunchLimits(most_s=1.0)))
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        assert await reader.read() == b""
        writer.close()
        assert await waiting is None


@pytest.mark.parametrize(
    ("here", "there", "near"),
    [
        ("192.168.1.2", "192.168.1.9", True),
        ("192.168.1.2", "192.168.2.9", False),
        ("192.168.1.2", "192.168.1.2", False),
        ("192.168.1.2", "fd00::9", False),
        ("fd00::2", "fd00::9", True),
        ("fd00::2", "fd00:0:0:1::9", False),
        ("127.0.0.1", "127.0.0.2", False),
        ("0.0.0.1", "0.0.0.0", False),
        ("224.0.0.1", "224.0.0.2", False),
        ("192.168.1.2", "router", False),
    ],
)
def test_neighbours_are_of_one_private_network(here, there, near):
    assert _neighbours(here, there) is near


def test_failures_are_remembered_for_a_while_until_a_punch_succeeds():
    failures = Failures(PunchLimits(failed_s=10.0))
    for peer in ("one", "other"):
        failures.add(peer, 0.0)
    failures.forget("other")
    assert [failures.has(peer, 9.0) for peer in ("one", "other", "a stranger")] == [True, False, False]
    assert not failures.has("one", 10.0)


def test_of_too_many_failures_the_oldest_is_forgotten():
    failures = Failures(PunchLimits(failed_max=2))
    for peer in ("one", "two", "one", "three"):
        failures.add(peer, 0.0)
    assert [failures.has(peer, 0.0) for peer in ("one", "two", "three")] == [True, False, True]
