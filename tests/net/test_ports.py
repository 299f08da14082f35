"""Ports: the one that is named, or the first free one; of p2pd's, which would share theirs, too."""

import asyncio
import socket
import sys
from contextlib import AsyncExitStack, ExitStack

import pytest

from swarm.errors import AddressInUse
from swarm.net import ports
from swarm.net.p2p import P2PConfig, running_daemon
from swarm.net.p2p.multiaddr import port_of, where_to_listen
from swarm.net.ports import EVERY, has_ipv6, kept_for_p2pd, listening

HOST = "127.0.0.1"
with_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port cannot be kept for p2pd")


def port(sock):
    return sock.getsockname()[1]


@pytest.fixture
def several():
    """Ports that are free, a step apart, in a range that nobody else gets by chance."""
    for first in range(20000, 30000, 40):
        with ExitStack() as closing:
            try:
                for each in range(first, first + 40, 10):
                    closing.enter_context(listening(EVERY, each))
            except AddressInUse:
                continue
            return range(first, first + 40, 10)
    raise AssertionError("no free ports")


def test_named_port_that_is_taken_is_an_error():
    with listening(HOST, 0) as first, pytest.raises(AddressInUse, match=str(port(first))):
        listening(HOST, port(first))


def test_first_free_port_of_several_is_taken(several):
    with listening(HOST, several) as first, listening(HOST, several) as second, listening(HOST, several) as third:
        assert [port(first), port(second), port(third)] == list(several[:3])
        second.close()
        with listening(HOST, several) as again:
            assert port(again) == several[1]


def test_where_none_is_free_the_first_is_named(several):
    with ExitStack() as closing:
        for _ in several:
            closing.enter_context(listening(HOST, several))
        with pytest.raises(AddressInUse, match=str(several[0])):
            listening(HOST, several)


@with_ipv6
def test_every_address_takes_both_families(several):
    with listening(EVERY, several[0]):
        for host in (HOST, "::1"):
            socket.create_connection((host, several[0])).close()
            with pytest.raises(AddressInUse):
                listening(host, several[0])


def test_without_ipv6_every_address_is_of_ipv4(monkeypatch):
    monkeypatch.setattr(ports, "has_ipv6", lambda: False)
    with listening(EVERY, 0) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


@on_linux
def test_port_kept_for_one_p2pd_is_no_other_ones(several):
    with kept_for_p2pd(HOST, several) as first, kept_for_p2pd(HOST, several) as second:
        assert (first, second) == tuple(several[:2])


@on_linux
async def test_p2pds_that_start_at_once_take_different_ports(several):
    async with AsyncExitStack() as stack:
        daemons = [stack.enter_async_context(running_daemon(P2PConfig(None, (HOST, several)))) for _ in range(3)]
        running = await asyncio.gather(*daemons)
        assert sorted(daemon.listen[1] for daemon in running) == list(several[:3])
        for daemon in running:
            assert {port_of(address) for address in await daemon.addresses()} == {daemon.listen[1]}


@with_ipv6
async def test_p2pd_has_one_port_in_both_families():
    async with running_daemon(P2PConfig(None, (EVERY, 0))) as daemon:
        addresses = await daemon.addresses()
        assert {address.split("/")[1] for address in addresses} == {"ip4", "ip6"}
        assert {port_of(address) for address in addresses} == {daemon.listen[1]}
        for host in (HOST, "::1"):
            socket.create_connection((host, daemon.listen[1])).close()


def test_p2pd_listens_on_one_family_where_one_is_named():
    assert where_to_listen("0.0.0.0", 5) == ("/ip4/0.0.0.0/tcp/5",)
    assert where_to_listen("::1", 5) == ("/ip6/::1/tcp/5",)
