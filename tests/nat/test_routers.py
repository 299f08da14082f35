"""Each kind of router lets through what its name says."""

import asyncio
from collections.abc import Iterator
from itertools import product

import pytest

from tests.nat.sockets import WITHIN_S, dial, listening, meet, outcome
from tests.support.lab import KINDS, Host, Lab

DELAY_MS = 5.0
ROUTED = tuple(kind for kind, routers in KINDS.items() if routers)
RANDOM = {kind for kind, routers in KINDS.items() if any(router.random for router in routers)}
UNEXPECTED = {"public": "connected", "forwarded": "connected", "reject": "refused"}  # others are silent
MEETING_S = 2.0


class Places:
    """Two sites of each kind with a host, and two public observers."""

    def __init__(self, lab: Lab) -> None:
        self.ones = {kind: lab.site(kind, DELAY_MS).host() for kind in KINDS}
        self.twos = {kind: lab.site(kind, DELAY_MS).host() for kind in KINDS}
        self.observers = (lab.public_host(DELAY_MS), lab.public_host(DELAY_MS))


@pytest.fixture(scope="module")
def places(_possible: None) -> Iterator[Places]:
    with Lab() as lab:
        yield Places(lab)


def outer(host: Host) -> str:
    assert host.site is not None
    return host.site.public_address


def seen(host: Host, observer: Host, port: int) -> tuple[str, int]:
    """The address that an observer sees when a host connects from a port."""
    with listening(observer, 7001) as listener, dial(host, (observer.address, 7001), port):
        accepted, source = listener.accept()
        accepted.close()
        return str(source[0]), int(source[1])


@pytest.mark.parametrize("kind", KINDS)
def test_every_host_reaches_a_public_one(places: Places, kind: str):
    host, (observer, _) = places.ones[kind], places.observers
    with listening(observer, 7002) as listener, dial(host, (observer.address, 7002)) as one:
        two, source = listener.accept()
        with two:
            one.sendall(b"x")
            assert two.recv(1) == b"x"
        assert source[0] == outer(host)


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_reach_public_and_forwarded_hosts_only(places: Places, kind: str):
    host, (stranger, _) = places.ones[kind], places.observers
    with listening(host, 7003):
        assert outcome(stranger, (outer(host), 7003)) == UNEXPECTED.get(kind, "silent")


@pytest.mark.parametrize("kind", KINDS)
def test_two_observers_see_kept_or_random_ports(places: Places, kind: str):
    host, observers = places.ones[kind], places.observers
    ports = {seen(host, observer, 7004)[1] for observer in observers}
    assert (ports == {7004}) is (kind not in RANDOM)
    assert len(ports) == (2 if kind in RANDOM else 1)


@pytest.mark.parametrize(
    ("kind", "others_port", "other_host"),
    [
        ("full_cone", "connected", "connected"),
        ("address_restricted", "connected", "silent"),
        ("port_restricted", "silent", "silent"),
        ("reject", "refused", "refused"),
        ("symmetric", "silent", "silent"),
    ],
)
def test_an_outgoing_connection_opens_its_port(places: Places, kind: str, others_port: str, other_host: str):
    host, (known, stranger) = places.ones[kind], places.observers
    address = seen(host, known, 7005)
    with listening(host, 7005):
        assert outcome(known, address) == others_port
        assert outcome(stranger, address) == other_host


async def test_pairs_without_a_symmetric_router_meet(places: Places):
    pairs = list(product(ROUTED, ROUTED))

    async def met(number: int) -> bool:
        one, two = pairs[number]
        within_s = WITHIN_S if possible(one, two) else MEETING_S
        return await meet(places.ones[one], places.twos[two], 20000 + number, within_s)

    outcomes = dict(zip(pairs, await asyncio.gather(*map(met, range(len(pairs)))), strict=True))
    assert outcomes == {pair: possible(*pair) for pair in pairs}


def possible(one: str, two: str) -> bool:
    """A random port meets a router only that takes any port of an address to which its host has sent."""
    takes_any_port = {"forwarded", "full_cone", "address_restricted"}
    if one in RANDOM and two in RANDOM:
        return False
    return (one not in RANDOM or two in takes_any_port) and (two not in RANDOM or one in takes_any_port)
