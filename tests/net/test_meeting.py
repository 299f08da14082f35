"""Meetings over real sockets: an anchor brings a caller and a hidden peer together, in each way, within its limits."""

import asyncio
import contextlib
import socket
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest

from swarm.errors import ChannelClosed, NetworkError, Unreachable
from swarm.identity import Identity
from swarm.net.address import Tcp, ViaAnchor
from swarm.net.anchor import _Meeting
from swarm.net.calling import Caller, CallLimits
from swarm.net.channel import ignore
from swarm.net.dialer import Dialer
from swarm.net.halves import PREFACE_BYTES, WORD, Half, HalfLimits
from swarm.net.limits import ListenerLimits
from swarm.net.listener import Listener
from swarm.net.mooring import MooringLimits
from swarm.net.punch import PunchLimits, punch
from swarm.net.relay import Relayed, RelayLimits
from swarm.net.traversal import Traversal, TraversalLimits
from swarm.protocol.meeting import Call, Called, Meet, Moor
from swarm.protocol.messages import Close
from tests.net.places import limits, places, refusing
from tests.net.support import SESSION, endpoint, remote, until

pytestmark = pytest.mark.real_time


async def test_caller_and_hidden_peer_punch():
    async with places() as made:
        anchor = await made.place()
        hidden, caller = await made.hidden(anchor), made.caller()
        channel = await caller.call(anchor, hidden)
        assert channel.carrier.way == "punched"
        assert await channel.ping() > 0
        channel.send(Close(session=SESSION))
        await until(lambda: hidden.taken)
        ((taken, message),) = hidden.taken
        assert (taken.peer, taken.carrier.way, message) == (
            caller.me.identity.peer_id,
            "punched",
            Close(session=SESSION),
        )
        await until(lambda: anchor.ways.anchor.load.pairs == 0)  # the relayed connection is not kept


async def test_they_are_relayed_where_no_punch_succeeds():
    async with places() as made:
        anchor = await made.place()
        hidden, caller = await made.hidden(anchor, bounds=limits(punch=False)), made.caller(limits(punch=False))
        channel = await caller.call(anchor, hidden)
        assert channel.carrier.way == "relayed"
        before = anchor.ways.anchor.load.relayed_bytes
        channel.send(Close(session=SESSION))
        await until(lambda: hidden.taken)
        assert anchor.ways.anchor.load.relayed_bytes > before
        assert not any(isinstance(message, Close) for _, message in anchor.taken)
        channel.close()
        await until(lambda: anchor.ways.anchor.load.pairs == 0)


async def test_hidden_peer_dials_a_caller_that_can_be_dialled():
    async with places() as made:
        anchor, caller = await made.place(), await made.place()
        hidden = await made.hidden(anchor)
        caller.ways.caller.port = caller.ways.listener.address.port
        channel = await caller.ways.dial(anchor.via, remote(hidden.me), caller.me, ignore)
        assert (channel.carrier.way, channel.peer) == ("reverse", hidden.me.identity.peer_id)
        assert await channel.ping() > 0
        assert anchor.ways.anchor.load.relayed_bytes == 0


async def test_they_meet_where_dialling_back_fails():
    async with places() as made:
        anchor, caller = await made.place(), await made.place()
        hidden = await made.hidden(anchor)
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            caller.ways.caller.port = silent.getsockname()[1]  # it is wrong about itself
            channel = await caller.ways.dial(anchor.via, remote(hidden.me), caller.me, ignore)
        assert channel.carrier.way == "punched"


async def test_an_anchor_calls_its_own_hidden_peers():
    async with places() as made:
        anchor = await made.place()
        hidden = await made.hidden(anchor)
        with pytest.raises(Unreachable, match="nobody can dial"):
            await anchor.ways.dial(anchor.via, remote(hidden.me), anchor.me, ignore)
        own = anchor.ways.caller
        own.host, own.port = "127.0.0.1", anchor.ways.listener.address.port
        channel = await anchor.ways.dial(anchor.via, remote(hidden.me), anchor.me, ignore)
        assert (channel.carrier.way, channel.peer) == ("reverse", hidden.me.identity.peer_id)
        with pytest.raises(NetworkError, match="not moored"):
            await anchor.ways.dial(anchor.via, remote(endpoint()), anchor.me, ignore)


async def test_many_callers_meet_at_once():
    async with places() as made:
        anchor = await made.place(limits(call_burst=64))
        hidden = [await made.hidden(anchor) for _ in range(3)]
        callers = [made.caller() for _ in range(5)]
        channels = await asyncio.gather(*(caller.call(anchor, each) for caller in callers for each in hidden))
        assert {channel.carrier.way for channel in channels} <= {"punched", "relayed"}
        await asyncio.gather(*(channel.ping() for channel in channels))


async def test_a_peer_that_is_not_moored_is_named():
    async with places() as made:
        anchor, stranger = await made.place(), await made.place()
        with pytest.raises(Unreachable, match="not moored here"):
            await made.caller().call(anchor, stranger)


async def test_an_anchor_that_is_gone_is_unreachable():
    async with places() as made:
        anchor = await made.place()
        hidden = await made.hidden(anchor)
        await anchor.ways.listener.close()
        with pytest.raises(NetworkError):
            await made.caller().call(anchor, hidden)


async def test_a_mooring_needs_a_record():
    async with places() as made:
        anchor, hidden = await made.place(check=refusing), await made.place()
        hidden.moor(anchor)
        await asyncio.sleep(0.3)
        assert (hidden.ways.moorings.anchors, anchor.ways.anchor.load.moored) == ((), 0)


async def test_a_refused_mooring_succeeds_later_on_the_same_line():
    refusals = [True]

    def check(peer, record):
        if refusals:
            refusing(peer, record)

    async with places() as made:
        anchor, hidden = await made.place(check=check), await made.place()
        hidden.moor(anchor)
        await until(lambda: anchor.ways.listener.admission.channels)
        await asyncio.sleep(0.3)
        refusals.clear()
        await until(lambda: hidden.ways.moorings.anchors == (anchor.via,))


async def test_moorings_of_one_host_are_bounded():
    async with places() as made:
        anchor = await made.place(limits(moorings_per_host_max=2))
        for _ in range(2):
            await made.hidden(anchor)
        third = await made.place()
        third.moor(anchor)
        await until(lambda: anchor.ways.anchor.load.refused)
        assert (third.ways.moorings.anchors, anchor.ways.anchor.load.moored) == ((), 2)


async def test_hidden_peer_finds_another_anchor_when_one_dies():
    async with places() as made:
        first, second = await made.place(), await made.place()
        hidden, changes = await made.hidden(first), []
        hidden.ways.moorings.on_change = lambda: changes.append(hidden.ways.moorings.anchors)
        await first.ways.close()
        await first.ways.listener.close()
        hidden.ways.moorings.offer([second.via])
        await until(lambda: hidden.ways.moorings.anchors == (second.via,))
        assert changes[-1] == (second.via,)
        channel = await made.caller().call(second, hidden)
        assert await channel.ping() > 0


async def test_an_anchor_that_stops_answering_is_left():
    async with places() as made:
        anchor = await made.place()
        hidden = await made.hidden(anchor)
        line = anchor.ways.anchor.moored[hidden.me.identity.peer_id]
        line.receive = lambda data: None
        await until(lambda: hidden.ways.moorings.anchors == ())


async def test_a_peer_that_has_moved_moors_anew_at_once():
    async with places() as made:
        anchor = await made.place()
        hidden = await made.hidden(anchor, bounds=TraversalLimits(moorings=MooringLimits(again_s=60.0)))
        old = anchor.ways.anchor.moored[hidden.me.identity.peer_id]
        changes = []
        hidden.ways.moorings.on_change = lambda: changes.append(len(hidden.ways.moorings.anchors))
        hidden.ways.moorings.renew()
        async with asyncio.timeout(30):
            await until(lambda: changes[-1:] == [1])
        assert anchor.ways.anchor.moored[hidden.me.identity.peer_id] is not old
        assert changes == [0, 1]


async def test_moorings_spread_over_networks():
    async with places() as made:
        hidden = await made.place()
        moorings = hidden.ways.moorings

        def at(host):
            me = endpoint()
            return ViaAnchor(me.identity.peer_id, me.key.public, Tcp(host, 1))

        near, far = at("1.2.3.4"), at("5.6.7.8")
        moorings._held[at("1.2.9.9")] = None
        moorings.offer([near, far])
        assert moorings._next(1) == [far]
        moorings._held.clear()


async def test_calls_of_one_caller_are_bounded():
    async with places() as made:
        anchor = await made.place(limits(call_burst=2.0, call_per_s=0.1))
        hidden, caller = await made.hidden(anchor), made.caller()
        for _ in range(3):  # the bucket lends one
            await caller.call(anchor, hidden)
        with pytest.raises(Unreachable, match=r"too many calls; again in \d+\.\d s"):
            await caller.call(anchor, hidden)
        assert await (await made.caller().call(anchor, hidden)).ping() > 0


async def test_a_caller_calls_again_when_the_anchor_is_busy_for_a_moment():
    async with places() as made:
        anchor = await made.place(limits(call_burst=2.0, call_per_s=5.0))
        hidden, caller = await made.hidden(anchor), made.caller()
        for _ in range(8):
            assert (await caller.call(anchor, hidden)).carrier.way == "punched"
        assert anchor.ways.anchor.load.refused > 0


async def test_a_crowd_of_eager_callers_keeps_no_quiet_one_away():
    """The honest one calls once, from a source of its own; the others always come first."""
    async with places() as made:
        anchor = await made.place(limits(call_burst=100.0, called_per_s=0.01, called_burst=32.0))
        hidden, said = await made.hidden(anchor), []
        hidden.ways.lines.on_called = lambda line, called: None

        peers = defaultdict(lambda: Identity.generate().peer_id)

        def call(host):
            carrier = SimpleNamespace(host=host, way="direct")
            caller = SimpleNamespace(closed=False, send=said.append, peer=peers[host], carrier=carrier)
            anchor.ways.anchor.take(caller, Call(call="0" * 32, callee=hidden.me.identity.peer_id, back="0" * 64))
            return said.pop().kind

        kinds = [call(f"11.0.0.{i}") for _ in range(16) for i in range(8)]
        assert 8 < kinds.count("calling") < 32
        assert call("11.0.0.0") == "uncalled"
        assert call("11.0.1.0") == "calling"


async def test_a_punch_may_take_as_long_as_the_relay_does(monkeypatch):
    """On a busy machine both are slow, and a relayed channel is for all of its life."""
    slow = asyncio.Event()

    async def later(*arguments):
        await slow.wait()
        return await punch(*arguments)

    monkeypatch.setattr("swarm.net.calling.punch", later)
    async with places() as made:
        anchor = await made.place()
        hidden, caller = await made.hidden(anchor), made.caller()
        become = caller.ways.caller._become

        async def slowly(sock, way, *arguments):
            channel = await become(sock, way, *arguments)
            if way == "relayed":
                await asyncio.sleep(0.5)
                asyncio.get_running_loop().call_later(0.2, slow.set)
            return channel

        caller.ways.caller._become = slowly
        assert (await caller.call(anchor, hidden)).carrier.way == "punched"


async def test_no_punch_is_waited_for_after_one_that_failed():
    stubborn = TraversalLimits(calls=CallLimits(punch=PunchLimits(least_s=2.0, most_s=60.0, tries_max=1000)))
    async with places() as made:
        anchor = await made.place()
        hidden, caller, took_s = await made.hidden(anchor), made.caller(stubborn), []

        async def never(*_):
            await asyncio.get_running_loop().create_future()

        caller.ways.caller._punch = never
        for _ in range(2):
            began = asyncio.get_running_loop().time()
            channel = await caller.call(anchor, hidden)
            took_s.append(asyncio.get_running_loop().time() - began)
            assert channel.carrier.way == "relayed"
            channel.close()
        assert took_s[1] < 2.0 <= took_s[0]


async def test_a_caller_that_leaves_while_its_punch_ends_leaves_no_channel(monkeypatch):
    ending, gate = asyncio.Event(), asyncio.Event()

    async def lingering(*_):
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ending.set()
            await gate.wait()

    monkeypatch.setattr("swarm.net.calling.punch", lingering)
    async with places() as made:
        anchor = await made.place()
        hidden, caller = await made.hidden(anchor), made.caller()
        calling = asyncio.create_task(caller.ways.caller.call(anchor.via, remote(hidden.me), ignore))
        await ending.wait()
        admission = hidden.ways.listener.admission
        await until(lambda: caller.me.identity.peer_id in admission.proven)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await until(lambda: caller.me.identity.peer_id not in admission.proven)
        gate.set()


async def test_a_half_that_comes_as_its_time_ends_is_closed():
    me, loop, (ours, theirs) = endpoint(), asyncio.get_running_loop(), socket.socketpair()

    class Waiting:
        def expect(self, token, take):
            loop.call_soon(take, Half(ours, Tcp("127.0.0.1", 1), Tcp("127.0.0.1", 1)))

        def forget(self, token):
            pass

    anchor = SimpleNamespace(summon=lambda *_: None)
    caller = Caller(me, None, Waiting(), anchor, limits=CallLimits(reverse_s=0.0))
    caller.port = 5000
    via = ViaAnchor(me.identity.peer_id, me.key.public, Tcp("127.0.0.1", 5000))
    with theirs, pytest.raises(Unreachable, match="does not come"):
        await caller.call(via, remote(endpoint()), ignore)
    assert ours.fileno() == -1


async def test_waiting_meetings_are_bounded_and_end():
    async with places() as made:
        anchor = await made.place(limits(meetings_max=2, meeting_s=1.2))
        hidden = await made.hidden(anchor)
        hidden.ways.lines.on_called = lambda line, called: None  # it never comes
        callers = [made.caller(limits(meet_s=1.0)) for _ in range(3)]
        results = await asyncio.gather(*(caller.call(anchor, hidden) for caller in callers), return_exceptions=True)
        assert all(isinstance(result, Unreachable) for result in results)
        assert sum("too many meetings" in str(result) for result in results) == 1
        await until(lambda: not anchor.ways.anchor._meetings)
        assert not anchor.ways.halves._expected


@pytest.mark.parametrize(
    "relay", [RelayLimits(bytes_per_s=0.0), RelayLimits(pairs_max=0), RelayLimits(pairs_per_peer_max=0)]
)
async def test_an_anchor_that_relays_nothing_lets_them_punch(relay):
    async with places() as made:
        anchor = await made.place(limits(relay=relay))
        hidden = await made.hidden(anchor)
        channel = await made.caller().call(anchor, hidden)
        assert channel.carrier.way == "punched"
        assert anchor.ways.anchor.load.relayed_bytes == 0


class Other:
    """A pair that an anchor relays."""

    ended = False

    def end(self):
        self.ended = True


async def test_a_crowds_pair_ends_for_another_source():
    async with places() as made:
        anchor = await made.place(limits(relay=RelayLimits(pairs_max=2)))
        hidden = await made.hidden(anchor, bounds=limits(punch=False))
        crowd = [Other(), Other()]
        anchor.ways.anchor._pairs.update({pair: Relayed(str(i), str(-i), "11.0.0.1") for i, pair in enumerate(crowd)})
        assert (await made.caller(limits(punch=False)).call(anchor, hidden)).carrier.way == "relayed"
        assert [pair.ended for pair in crowd] == [False, True]
        anchor.ways.anchor._pairs = {}


async def test_an_anchor_names_no_third_host_and_no_system_port():
    """What a caller says decides the port alone: the host is the one that the anchor sees."""
    async with places() as made:
        anchor = await made.place()
        hidden, called = await made.hidden(anchor), []
        hidden.ways.lines.on_called = lambda line, message: called.append(message)
        caller = made.caller()
        line = await caller.ways.lines.open(anchor.via)
        for port in (22, 1023, 4000):
            call = Call(call=f"{port:032x}", callee=hidden.me.identity.peer_id, port=port, back="ab" * 32)
            line.send(call)
        await until(lambda: len(called) == 3)
        assert [message.reach for message in called] == ["", "", "127.0.0.1:4000"]


async def test_a_relayed_caller_is_not_dialled_back():
    """Its channel comes from another anchor, and the caller would choose a port of that one."""
    async with places() as made:
        anchor = await made.place()
        hidden, called = await made.hidden(anchor), []
        hidden.ways.lines.on_called = lambda line, message: called.append(message)
        caller = made.caller()
        line = await caller.ways.lines.open(anchor.via)
        await line.ping()
        (taken,) = [one for one in anchor.ways.listener.admission.channels if one.peer == caller.me.identity.peer_id]
        taken.carrier.way = "relayed"
        line.send(Call(call="0" * 32, callee=hidden.me.identity.peer_id, port=4000, back="ab" * 32))
        await until(lambda: called)
        assert called[0].reach == ""


async def test_hidden_peer_dials_no_private_host_in_a_public_swarm():
    async with places() as made:
        hidden = await made.place(public=True)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            reach = f"127.0.0.1:{server.getsockname()[1]}"
            called = Called(
                call="0" * 32, token="0" * 64, caller=hidden.me.identity.peer_id, reach=reach, back="0" * 64
            )
            assert not await hidden.ways.moorings._dial_back(called)
            with pytest.raises(BlockingIOError):
                server.accept()


async def test_hidden_peer_dials_no_port_of_a_systems_service(monkeypatch):
    dials = []

    async def refused(at, *_):
        dials.append(at.port)
        raise ConnectionRefusedError

    monkeypatch.setattr("swarm.net.mooring.open_half", refused)
    async with places() as made:
        hidden = await made.place()
        for port in (22, 1023, 1024):
            called = Called(call="0" * 32, token="0" * 64, caller=hidden.me.identity.peer_id,
                            reach=f"127.0.0.1:{port}", back="0" * 64)  # fmt: skip
            assert not await hidden.ways.moorings._dial_back(called)
    assert dials == [1024]


async def test_hidden_peer_ignores_calls_that_come_too_fast():
    async with places() as made:
        anchor = await made.place()
        hidden, come = await made.hidden(anchor), []
        moorings = hidden.ways.moorings

        async def coming(line, via, called):
            come.append(called)

        moorings._come = coming
        line = anchor.ways.anchor.moored[hidden.me.identity.peer_id]
        for i in range(100):
            line.send(Called(call=f"{i:032x}", token="0" * 64, caller=hidden.me.identity.peer_id, back="0" * 64))
        await until(lambda: len(come) >= 32)
        await asyncio.sleep(0.1)
        assert len(come) < 50  # a burst of 40, one that is lent, and a few that the rate allows


async def test_a_peer_offers_itself_no_mooring_and_remembers_few_anchors():
    async with places() as made:
        hidden = await made.place()
        moorings = hidden.ways.moorings
        moorings.offer([hidden.via])
        assert moorings._known == {}
        moorings.offer(ViaAnchor(str(i), b"", Tcp("1.2.3.4", 2000 + i)) for i in range(100))
        assert len(moorings._known) == 32


async def test_one_anchor_at_two_addresses_is_one_mooring():
    async with places() as made:
        anchor = await made.place()
        hidden = await made.hidden(anchor)
        hidden.ways.moorings.offer([replace(anchor.via, at=Tcp("localhost", anchor.via.at.port))])
        await asyncio.sleep(0.3)  # longer than a mooring takes
        assert hidden.ways.moorings.anchors == (anchor.via,)


async def test_an_answer_on_an_ended_line_never_comes():
    async with places() as made:
        anchor, other = await made.place(), Traversal(endpoint(), limits=limits())
        made.made.append(other)
        line = await other.lines.open(anchor.via)
        line.close()
        await line.ended
        with pytest.raises(ChannelClosed):
            await other.lines.expect(line, "0" * 32)


async def test_a_newer_mooring_of_a_peer_replaces_the_older():
    async with places() as made:
        anchor = await made.place()
        hidden = await made.hidden(anchor)
        old = anchor.ways.anchor.moored[hidden.me.identity.peer_id]
        other = Traversal(hidden.me, limits=limits())
        made.made.append(other)
        line = await other.lines.open(anchor.via)
        line.send(Moor(record=""))
        await until(lambda: anchor.ways.anchor.moored[hidden.me.identity.peer_id] is not old)
        new = anchor.ways.anchor.moored[hidden.me.identity.peer_id]
        old.cut_off("it is replaced")
        await asyncio.sleep(0.05)
        assert anchor.ways.anchor.moored[hidden.me.identity.peer_id] is new
        new.cut_off("this one ends, too")
        await until(lambda: anchor.ways.anchor.moored.get(hidden.me.identity.peer_id) is not new)


async def test_the_rates_of_callers_are_bounded_in_number():
    async with places() as made:
        anchor = await made.place(limits(callers_max=4, call_per_s=0.01))
        hidden = await made.hidden(anchor)
        results = await asyncio.gather(*(made.caller().call(anchor, hidden) for _ in range(6)), return_exceptions=True)
        refused = [str(result) for result in results if isinstance(result, Unreachable)]
        assert len(refused) == 4  # two of the four are the hidden peer's own and that of the callers' host
        assert all("too many callers" in why for why in refused)


async def test_only_neighbours_learn_each_others_own_addresses():
    async with places() as made:
        anchor = await made.place()
        for host, known in (("127.0.0.1", True), ("127.0.0.2", False)):
            met = []
            anchor.ways.anchor._meetings.clear()
            sides = [SimpleNamespace(closed=False, send=met.append, peer=str(i)) for i in range(2)]
            ends = [socket.socketpair() for _ in range(2)]
            meeting = _Meeting("0" * 32, tuple(sides), (b"0" * 32, b"1" * 32))
            for side, (sock, _) in enumerate(ends):
                outer = Tcp("127.0.0.1" if side == 0 else host, 4000)
                anchor.ways.anchor._arrive(meeting, side, Half(sock, outer, Tcp("192.168.0.2", 5000)))
            await until(lambda met=met: len(met) == 2)
            assert {bool(message.local) for message in met} == {known}
            for _, end in ends:
                end.close()


async def test_a_stranger_answers_no_call():
    """An anchor that was not asked sends what it likes."""
    async with places() as made:
        anchor = await made.place()
        hidden, caller = await made.hidden(anchor), made.caller()
        line = anchor.ways.anchor.moored[hidden.me.identity.peer_id]
        line.send(Meet(token="0" * 64, peer="127.0.0.1:1", rtt_ms=1))
        assert await (await caller.call(anchor, hidden)).ping() > 0


async def test_a_half_with_an_unknown_token_is_closed():
    async with places() as made:
        anchor = await made.place()
        reader, writer = await asyncio.open_connection("127.0.0.1", anchor.ways.listener.address.port)
        writer.write(WORD + bytes(PREFACE_BYTES - len(WORD)))
        assert await reader.read() == b""
        writer.close()


async def test_halves_that_say_nothing_are_bounded():
    async with places() as made:
        place = await made.place()
        place.ways.halves._limits = HalfLimits(preface_s=0.3, reading_max=2)
        address = place.ways.listener.address
        ends = [await asyncio.open_connection(address.host, address.port) for _ in range(3)]
        for _, writer in ends:
            writer.write(WORD)
        await until(lambda: len(place.ways.halves._reading) == 2)
        for reader, writer in ends:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()


async def test_a_connection_that_says_nothing_is_closed_unless_it_speaks():
    me = endpoint()
    listener = Listener(me, "127.0.0.1", 0, limits=ListenerLimits(first_byte_s=0.2))
    listener.on_half = lambda sock: sock.close()
    await listener.start(ignore)
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.address.port)
    assert await reader.read() == b""
    writer.close()
    assert not listener.admission.channels
    dialer = Dialer(endpoint(), ignore)
    channel = await dialer.connect(remote(me), [listener.address])
    assert await channel.ping() > 0
    await dialer.close()
    await listener.close()


async def test_a_dialer_without_ways_says_so():
    me = endpoint()
    dialer = Dialer(me, ignore)
    with pytest.raises(Unreachable, match="behind a router"):
        await dialer.connect(remote(endpoint()), [ViaAnchor(me.identity.peer_id, me.key.public, Tcp("127.0.0.1", 1))])


async def test_a_dialer_tries_anchors_beside_a_silent_address():
    async with places() as made:
        anchor = await made.place()
        hidden = await made.hidden(anchor)
        me = endpoint()
        ways = Traversal(me, limits=limits())
        dialer = Dialer(me, ignore, ways.dial)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts in the kernel, and says nothing
            dead = Tcp("127.0.0.1", silent.getsockname()[1])
            channel = await dialer.connect(remote(hidden.me), [dead, anchor.via])
        assert channel.carrier.way == "punched"
        await dialer.close()
        await ways.close()
