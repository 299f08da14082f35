"""Mappings at routers that are made here: renewed on a virtual clock, asked by real datagrams, and hostile ones."""

import asyncio
import contextlib
import socket
from random import Random

import pytest

from swarm.net.address import Tcp
from swarm.net.mapping import Mapping, MappingLimits, map_ports, natpmp
from swarm.net.mapping.ask import Question, ask, connected
from swarm.net.mapping.gateway import Gateway
from swarm.net.mapping.keeping import all_ways
from swarm.net.mapping.natpmp import NatPmp
from swarm.net.mapping.upnp import locate
from swarm.net.mapping.way import MappingFailed
from tests.net.routers import answering, at
from tests.net.test_mapping_answers import ADDRESS, FOUND, PORT

PORTS = (31330, 31331)
HOME, ELSEWHERE = Gateway("192.168.1.1", "192.168.1.2"), Gateway("10.0.0.1", "10.0.0.2")
LIMITS = MappingLimits()
QUICK = MappingLimits(probe_s=0.3, resend_s=(0.05,), map_s=0.3, unmap_s=0.3)

virtual = pytest.mark.virtual_clock


class FakeWay:
    """A router that speaks one protocol. `fails`: why it refuses to map, while it does."""

    def __init__(self, by="PCP", host="8.8.4.4", lifetime_s=3600):
        self.by, self.host, self.lifetime_s = by, host, lifetime_s
        self.fails, self.silent, self.refused = "", False, ()
        self.has: dict[int, int] = {}
        self.asked: list[int] = []  # external ports
        self.gives: dict[int, int] = {}  # others than were asked for
        self.mapped_at_s: list[float] = []

    async def probe(self):
        if self.silent:
            await asyncio.Event().wait()

    async def map(self, internal, external):
        if self.fails or internal in self.refused:
            raise MappingFailed(self.by, self.fails or "not this one")
        self.asked.append(external)
        external = self.gives.get(external, external)
        self.has[internal] = external
        self.mapped_at_s.append(asyncio.get_running_loop().time())
        return Mapping(internal, Tcp(self.host, external), self.by, self.lifetime_s)

    async def unmap(self, mapping):
        del self.has[mapping.internal]


class Network:
    """Where the machine is."""

    def __init__(self, *ways, gateway=HOME):
        self.ways, self.gateway = ways, gateway

    async def find_gateway(self):
        if self.gateway is None:
            raise MappingFailed("any protocol", "no gateway")
        return self.gateway

    def map_ports(self, ports=PORTS, limits=LIMITS, **options):
        return map_ports(ports, limits, self.find_gateway, lambda _: self.ways, **options)


def now_s():
    return asyncio.get_running_loop().time()


@virtual
async def test_ports_are_mapped_until_the_end() -> None:
    router = FakeWay()
    async with Network(router).map_ports() as mapped:
        assert [str(mapping) for mapping in mapped.mappings] == [
            "port 31330 is 8.8.4.4:31330 outside (PCP)",
            "port 31331 is 8.8.4.4:31331 outside (PCP)",
        ]
        assert mapped.refusals == ()
    assert router.has == {}


@virtual
@pytest.mark.parametrize(("lifetime_s", "every_s"), [(3600, 120), (100, 50)])
async def test_mappings_are_renewed_before_their_lease_ends(lifetime_s: int, every_s: int) -> None:
    router = FakeWay(lifetime_s=lifetime_s)
    async with Network(router).map_ports(PORTS[:1]):
        await asyncio.sleep(every_s * 3 + 1)
    assert router.mapped_at_s == [0, every_s, 2 * every_s, 3 * every_s]


@virtual
async def test_a_renewal_asks_for_the_port_that_was_given() -> None:
    router = FakeWay()
    router.gives = {31330: 40000}
    async with Network(router).map_ports() as mapped:
        assert [mapping.external.port for mapping in mapped.mappings] == [40000, 31331]
        mapped.renew_soon()
        await asyncio.sleep(1)
    assert router.asked == [31330, 31331, 40000, 31331]


@virtual
async def test_another_external_address_is_told() -> None:
    router = FakeWay()
    async with Network(router).map_ports() as mapped:
        before = mapped.mappings
        router.host = "9.9.9.9"
        assert (await mapped.changed(before))[0].external == Tcp("9.9.9.9", 31330)
        assert now_s() == 120


@virtual
async def test_a_failed_renewal_is_tried_again_before_ports_are_lost() -> None:
    router = FakeWay()
    async with Network(router).map_ports() as mapped:
        before = mapped.mappings
        router.fails = "busy"
        await asyncio.sleep(135)
        assert mapped.mappings == before
        assert await mapped.changed(before) == ()
        assert now_s() == 140
        assert [failure.why for failure in mapped.refusals] == ["busy"]
        router.fails = ""
        assert await mapped.changed(()) == before
        assert now_s() == 440


@virtual
async def test_a_router_that_becomes_silent_loses_its_lease_in_time() -> None:
    router = FakeWay(lifetime_s=60)
    async with Network(router).map_ports(limits=MappingLimits(failures_max=100)) as mapped:
        before = mapped.mappings
        router.fails, router.silent = "gone", True
        assert await mapped.changed(before) == ()
        assert 60 <= now_s() < 60 + LIMITS.retry_s + LIMITS.probe_s


@virtual
async def test_another_network_is_seen_and_asked_at_once() -> None:
    here, there = FakeWay(), FakeWay("UPnP", "9.9.9.9")
    network = Network(here)
    async with network.map_ports() as mapped:
        before = mapped.mappings
        network.gateway = None
        assert await mapped.changed(before) == ()
        assert now_s() == 10
        network.gateway, network.ways = ELSEWHERE, (there,)
        assert [(found.by, found.external.host) for found in await mapped.changed(())] == [("UPnP", "9.9.9.9")] * 2
        assert now_s() == 20


@virtual
async def test_asking_sooner_asks_now() -> None:
    router = FakeWay()
    async with Network(router).map_ports(PORTS[:1]) as mapped:
        await asyncio.sleep(5)
        mapped.renew_soon()
        await asyncio.sleep(1)
        assert router.mapped_at_s == [0, 5]


@virtual
async def test_a_router_that_never_answers_takes_a_second_and_a_half() -> None:
    silent = FakeWay()
    silent.silent = True
    async with Network(silent, silent).map_ports() as mapped:
        assert now_s() == 1.5
        assert mapped.mappings == ()
        assert [str(failure) for failure in mapped.refusals] == ["no port by PCP: no answer in 1.5 s"] * 2


@virtual
async def test_caller_that_does_not_wait_goes_on_at_once_and_learns_later() -> None:
    silent = FakeWay()
    silent.silent = True
    async with Network(silent).map_ports(wait=False) as mapped:
        assert now_s() == 0
        await mapped.tried()
        assert now_s() == 1.5
    async with Network(FakeWay()).map_ports(wait=False) as mapped:
        await mapped.tried()
        assert len(mapped.mappings) == len(PORTS)


@virtual
async def test_the_next_protocol_maps_what_the_first_refuses() -> None:
    first, second, silent = FakeWay(), FakeWay("NAT-PMP"), FakeWay("UPnP")
    first.fails, silent.silent = "not allowed", True
    async with Network(first, second, silent).map_ports() as mapped:
        assert {mapping.by for mapping in mapped.mappings} == {"NAT-PMP"}
        assert now_s() < LIMITS.probe_s
        assert silent.has == {}


@virtual
async def test_all_ports_are_mapped_or_none() -> None:
    router = FakeWay()
    router.refused = PORTS[1:]
    async with Network(router).map_ports() as mapped:
        assert mapped.mappings == ()
        assert router.has == {}


@virtual
async def test_a_port_behind_a_second_nat_does_not_count() -> None:
    router = FakeWay(host="100.64.3.2")
    async with Network(router).map_ports() as mapped:
        assert mapped.mappings == ()
        assert "'100.64.3.2', is not global" in str(mapped.refusals[0])
        assert router.has == {}


@virtual
async def test_an_error_of_the_caller_comes_out_as_it_is() -> None:
    router = FakeWay()
    with pytest.raises(KeyError):
        async with Network(router).map_ports():
            raise KeyError("of the caller")
    assert router.has == {}


# By real datagrams ----------------------------------------------------------------------------------------------------


async def test_a_lost_datagram_is_sent_again() -> None:
    asked = []

    def react(sock, data, asker):
        asked.append(data)
        if len(asked) > 1:
            sock.sendto(ADDRESS, asker)

    async with answering(react) as port:
        await NatPmp(at(port), LIMITS).probe()
    assert asked == [natpmp.address_request()] * 2


async def test_datagrams_of_strangers_are_ignored() -> None:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as stranger:
        try:
            stranger.bind(("127.0.0.2", 0))
        except OSError:
            pytest.skip("127.0.0.2 is no address here")

        def react(sock, data, asker):
            search = data.startswith(b"M-SEARCH")
            evil = (
                FOUND.replace(b"192.168.1.1:5000", b"127.0.0.1:6666")
                if search
                else ADDRESS.replace(b"\x08\x08", b"\x09\x09")
            )
            stranger.sendto(evil, asker)
            sock.sendto(FOUND.replace(b"192.168.1.1", b"127.0.0.1") if search else ADDRESS, asker)

        async with answering(react) as port:
            assert await locate(at(port), LIMITS) == "http://127.0.0.1:5000/root.xml"
            question = Question("127.0.0.1", natpmp.read_address, LIMITS)
            request = [(natpmp.address_request(), None)]
            assert await ask("NAT-PMP", connected("127.0.0.1", port), request, question, 1.5, LIMITS) == "8.8.4.4"


async def test_a_malformed_datagram_ends_nothing_and_is_the_reason() -> None:
    sent = [b"", b"\xff" * 2000, b"\0" * 60000]
    async with answering(lambda sock, _, asker: sock.sendto(sent.pop(), asker) if sent else None) as port:
        with pytest.raises(MappingFailed, match="malformed answer"):
            await NatPmp(at(port), QUICK).probe()
    answers = [ADDRESS, b"\xff"]
    async with answering(lambda sock, _, asker: sock.sendto(answers.pop(), asker)) as port:
        await NatPmp(at(port), LIMITS).probe()


async def test_a_router_without_any_protocol_says_so_in_time() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        nobody = at(free.getsockname()[1])
    began_s = now_s()
    network = Network(*all_ways(nobody, QUICK, Random(1)), gateway=nobody)
    async with network.map_ports(limits=QUICK) as mapped:
        whys = [failure.why for failure in mapped.refusals]
    assert sorted(whys) == ["no answer in 0.3 s", "the router does not speak it", "the router does not speak it"]
    assert now_s() - began_s < 5.0


async def test_nat_pmp_asks_for_the_address_and_then_for_the_port() -> None:
    answers = [PORT, ADDRESS]
    async with answering(lambda sock, _, asker: sock.sendto(answers.pop(), asker)) as port:
        mapping = await NatPmp(at(port), LIMITS).map(31330, 31330)
    assert (mapping.external, mapping.lifetime_s) == (Tcp("8.8.4.4", 31331), 3600)
