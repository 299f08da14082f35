"""Channels and listeners over real sockets."""

import asyncio
import socket
import sys
import time

import pytest

from swarm.errors import AddressInUse, ChannelClosed, HandshakeFailed, Unreachable
from swarm.net.address import Tcp
from swarm.net.carriers.tcp import TcpCarrier, dial, dial_on
from swarm.net.channel import Channel, ignore
from swarm.net.congestion import set_congestion_control
from swarm.net.gate import PROGRESS
from swarm.net.halves import reusable
from swarm.net.limits import DialerLimits, HandshakeLimits, ListenerLimits
from swarm.net.listener import Listener
from swarm.net.noise import ChannelKey
from swarm.net.ports import EVERY, has_ipv6
from swarm.protocol.messages import Close
from tests.net.support import SESSION, endpoint, remote, step, until

pytestmark = pytest.mark.real_time


class Site:
    """A listener, and the messages that it has taken."""

    def __init__(self, host="127.0.0.1", *, handshakes=None, **limits):
        self.me, self.messages, self.served = endpoint(), [], []
        limits = ListenerLimits(HandshakeLimits(**(handshakes or {})), **limits)
        self.listener = Listener(self.me, host, 0, limits=limits)

    async def start(self, in_use=None):
        await self.listener.start(self.take, in_use)
        return self

    def take(self, channel, message, _):
        self.messages.append((channel.peer, message))
        self.served.append(channel)
        return PROGRESS

    async def dialled(self, me=None, **options):
        return await dial(self.listener.address, remote(self.me), me or endpoint(), ignore, **options)

    async def carrier(self, source=None):
        """A carrier whose channel is proven. source: an address of this machine that it comes from."""
        loop, address, me = asyncio.get_running_loop(), self.listener.address, endpoint()
        carrier = TcpCarrier(lambda carrier: Channel(carrier, me, ignore, remote(self.me)))
        local = None if source is None else (source, 0)
        await loop.create_connection(lambda: carrier, address.host, address.port, local_addr=local)
        await carrier.channel.ready
        return carrier

    @property
    def admission(self):
        return self.listener.admission


@pytest.fixture
async def site():
    site = await Site().start()
    yield site
    await site.listener.close()


async def test_a_message_crosses_a_socket(site):
    me = endpoint()
    channel = await site.dialled(me)
    channel.send(Close(session=SESSION))
    await until(lambda: site.messages)
    assert site.messages == [(me.identity.peer_id, Close(session=SESSION))]
    channel.close()
    await until(lambda: not site.admission.channels)


async def test_the_wrong_key_is_a_failed_handshake(site):
    with pytest.raises(HandshakeFailed):
        await dial(site.listener.address, remote(endpoint()), endpoint(), ignore)
    await until(lambda: not site.admission.channels)
    assert not site.admission.unproven


async def test_a_closed_port_is_unreachable():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Tcp(*free.getsockname())
    with pytest.raises(Unreachable, match=str(address)):
        await dial(address, remote(endpoint()), endpoint(), ignore)


async def test_a_peer_that_never_answers_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, limits = Tcp(*silent.getsockname()), DialerLimits(timeout_s=0.2)
        with pytest.raises(Unreachable):
            await dial(address, remote(endpoint()), endpoint(), ignore, limits=limits)


@pytest.mark.parametrize(
    ("error", "unreachable"),
    [
        (None, False),
        (ConnectionResetError(), False),
        (BrokenPipeError(), False),
        (TimeoutError(), True),
        (OSError(), True),
    ],
)
async def test_a_peers_end_is_told_from_the_networks(site, error, unreachable):
    carrier = await site.carrier()
    carrier.connection_lost(error)
    assert carrier.channel.closed
    assert carrier.channel.unreachable == unreachable
    carrier.abort()


def congestion_control(sock):
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


with_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux lets a socket choose")


@on_linux
async def test_both_ends_of_a_channel_choose_their_congestion_control(site):
    dialled = await site.dialled()
    await until(lambda: site.admission.channels)
    (accepted,) = site.admission.channels
    for end in (dialled, accepted):
        assert congestion_control(end.carrier._transport.get_extra_info("socket")) in {"cubic", "reno"}
    dialled.close()


@on_linux
def test_half_that_is_dialled_has_its_congestion_control_before():
    """Afterwards would be too late: a connection that began with BBR stays paced."""
    with reusable(socket.AF_INET) as sock:
        assert congestion_control(sock) in {"cubic", "reno"}


async def test_name_leads_to_the_address_that_answers(site, monkeypatch):
    address = site.listener.address
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, address.port)) for host in ("127.0.0.2", address.host)]

    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def resolve(host, port, **options):
        return found if host == "a-name" else await real(host, port, **options)

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    (await dial(Tcp("a-name", address.port), remote(site.me), endpoint(), ignore)).close()
    del found[1:]
    with pytest.raises(Unreachable):
        await dial(Tcp("a-name", address.port), remote(site.me), endpoint(), ignore)


@with_ipv6
async def test_listener_of_every_address_takes_channels_of_both_families():
    me = endpoint()
    listener = Listener(me, EVERY, 0)
    await listener.start(ignore)
    for host in ("127.0.0.1", "::1"):
        channel = await dial(Tcp(host, listener.address.port), remote(me), endpoint(), ignore)
        await until(lambda: listener.admission.channels)
        assert [accepted.carrier.host for accepted in listener.admission.channels] == [host]
        channel.close()
        await until(lambda: not listener.admission.channels)
    await listener.close()


@on_linux
@with_ipv6
async def test_each_ipv4_address_is_a_source_of_its_own_where_both_families_are_taken():
    """They come as ::ffff:..., which is one network of IPv6: one address would use up the turns of all."""
    site = await Site(EVERY, handshakes={"burst": 1.0, "per_s": 1e-3}).start()
    site.listener.address = Tcp("127.0.0.1", site.listener.address.port)
    try:
        carriers = [await site.carrier("127.0.0.2")]
        with pytest.raises(HandshakeFailed):
            await site.carrier("127.0.0.2")
        carriers.append(await site.carrier("127.0.0.3"))
        assert sorted(site.admission.channels.values()) == ["127.0.0.2", "127.0.0.3"]
        for carrier in carriers:
            carrier.channel.close()
    finally:
        await site.listener.close()


@on_linux
async def test_half_has_the_congestion_control_of_its_listener(site):
    halves = []
    site.listener.on_half = halves.append
    _, writer = await asyncio.open_connection(site.listener.address.host, site.listener.address.port)
    writer.write(b"half/")
    await until(lambda: halves)
    writer.close()
    with halves[0] as half:
        assert congestion_control(half) in {"cubic", "reno"}


@pytest.mark.parametrize("allowed", [["cubic", "reno"], ["reno"], []])
def test_best_congestion_control_that_is_allowed_is_taken(allowed):
    class Socket:
        chosen = None

        def setsockopt(self, level, option, name):
            if name.decode() not in allowed:
                raise PermissionError
            self.chosen = name.decode()

    sock = Socket()
    set_congestion_control(sock)
    assert sock.chosen == next(iter(allowed), None)


# Admission: its decisions are tested in test_admission.py


async def test_a_silent_connection_is_ended():
    site = await Site(handshakes={"timeout_s": 0.1}).start()
    reader, writer = await asyncio.open_connection(site.listener.address.host, site.listener.address.port)
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()
    assert not site.admission.unproven
    await site.listener.close()


async def test_a_port_in_use_is_named(site):
    address = site.listener.address
    with pytest.raises(AddressInUse, match=str(address.port)):
        Listener(endpoint(), address.host, address.port)


async def test_listener_has_its_port_before_it_starts():
    site = Site()
    address = site.listener.address
    with pytest.raises(AddressInUse, match=str(address.port)):
        Listener(endpoint(), address.host, address.port)
    with pytest.raises((HandshakeFailed, Unreachable)):  # at once, not at its time-out
        async with asyncio.timeout(DialerLimits().timeout_s / 2):
            await site.dialled()
    await site.start()
    (await site.dialled()).close()
    await site.listener.close()


async def test_a_paused_listener_keeps_its_address(site):
    before = await site.dialled()
    site.listener.pause()
    await until(lambda: before.closed)
    with pytest.raises((HandshakeFailed, Unreachable)):
        await site.dialled()
    assert site.messages == []
    await site.start()
    after = await site.dialled()
    after.send(Close(session=SESSION))
    await until(lambda: site.messages)


async def test_of_too_many_mute_connections_the_oldest_ends():
    site, mute = await Site(handshakes={"unproven_max": 2}).start(), []
    for count in (1, 2):
        mute.append(await asyncio.open_connection(site.listener.address.host, site.listener.address.port))
        await until(lambda count=count: len(site.admission.unproven) == count)
    channel = await site.dialled()
    async with asyncio.timeout(30):
        assert await mute[0][0].read() == b""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await mute[1][0].read()
    for _, writer in mute:
        writer.close()
    channel.close()
    await site.listener.close()


async def test_a_mute_connection_by_an_anchor_takes_no_turn():
    site = await Site(handshakes={"all_burst": 1.0, "all_per_s": 0.01}).start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = [socket.create_connection(server.getsockname()) for _ in range(4)]
        for _ in near:
            site.listener.adopt(server.accept()[0], "relayed")
    near[-1].setblocking(False)
    channel = await dial_on(near[-1], "relayed", remote(site.me), endpoint(), ignore)
    assert await channel.ping() > 0
    for sock in near[:-1]:
        sock.close()
    channel.close()
    await site.listener.close()


@pytest.mark.parametrize("processes", [1, 6])
async def test_a_silent_channel_is_cut_off_for_a_new_one(processes):
    site = await Site(channels_per_peer_max=6, silent_s=1.5).start()
    most = 4 if processes == 1 else 6
    me = endpoint()
    mine = [me, *(endpoint(me.identity, key=ChannelKey()) for _ in range(processes - 1))]
    bystander = await site.dialled()
    channels = [await site.dialled(mine[i % processes]) for i in range(most)]
    await until(lambda: len(site.admission.proven[me.identity.peer_id]) == most)
    silent, *others = channels
    await asyncio.sleep(1.55)
    for channel in others:
        await channel.ping()
    channels.append(await site.dialled(me))
    await until(lambda: silent.closed)
    for channel in others:
        await channel.ping()
    one_more = await site.dialled(me)
    await until(lambda: one_more.closed)
    assert sum(channel.closed for channel in (*channels, bystander)) == 1
    for channel in (*channels, bystander):
        channel.close()
    await until(lambda: not site.admission.proven)
    await site.listener.close()


async def test_silent_channels_end_and_those_in_use_do_not():
    used = endpoint()
    site = await Site(sweep_s=0.05, idle_s=0.2).start(lambda: {used.identity.peer_id})
    kept, silent, talks = [await site.dialled(me) for me in (used, endpoint(), endpoint())]
    for _ in range(8):
        await talks.ping()
        await asyncio.sleep(0.05)
    assert (kept.closed, silent.closed, talks.closed) == (False, True, False)
    await site.listener.close()
    await until(lambda: kept.closed and talks.closed)


async def test_a_peer_that_reads_nothing_is_cut_off():
    site = await Site(sweep_s=0.1).start()
    carrier = await site.carrier()
    carrier.channel.send(Close(session=SESSION))
    await until(lambda: site.served)
    carrier.pause_reading()
    carrier.pause_reading()  # again is fine
    (served,) = site.served
    served.send(*step(1, (1, 1 << 16, 64)))  # 16 MiB: more than the kernel takes
    await until(lambda: served.closed)
    assert "does not read" in served.ended.result()
    with pytest.raises(ChannelClosed):
        served.send(Close(session=SESSION))
    carrier.abort()
    await site.listener.close()
    await asyncio.sleep(0.01)


async def test_connections_are_accepted_at_a_rate_and_none_is_forgotten():
    site = await Site(accepts_per_s=50.0, accepts_burst=1.0).start()
    began = time.monotonic()
    address = site.listener.address
    sockets = [socket.create_connection((address.host, address.port)) for _ in range(12)]
    await until(lambda: len(site.admission.unproven) == 12)
    assert time.monotonic() - began > 0.15
    for sock in sockets:
        sock.close()
    await until(lambda: not site.admission.unproven)
    await site.listener.close()


async def test_one_source_with_many_identities_keeps_no_other_out():
    """It lets each channel say something every minute, and opens sessions with as many of its peers as it likes."""
    greedy = [endpoint() for _ in range(8)]
    site = await Site(channels_max=8).start(lambda: {me.identity.peer_id for me in greedy[1:]})
    held = [await site.dialled(me) for me in greedy]
    await until(lambda: len(site.admission.proven) == 8)
    for gone in (1, 2):  # the one that is not in use, and then one that is
        honest = (await site.carrier(f"127.0.0.{1 + gone}")).channel
        await until(lambda gone=gone: sum(channel.closed for channel in held) == gone)
        assert held[0].closed
        await honest.ping()
    assert len(site.admission.channels) == 8
    for channel in held:
        channel.close()
    await until(lambda: len(site.admission.channels) == 2)
    await site.listener.close()
