"""Channels over an in-memory carrier, in virtual time. Their parts have tests of their own; sockets: test_tcp.py."""

import asyncio
from itertools import pairwise

import pytest
import torch

from swarm.access import Access
from swarm.activations import Activations
from swarm.config import PROTOCOL_VERSION
from swarm.errors import ChannelClosed, HandshakeFailed, ProtocolMismatch
from swarm.identity import Identity
from swarm.net.channel import UNASKED, Channel
from swarm.net.flow import FlowControl
from swarm.net.frames import FrameReader
from swarm.net.gate import IDLE, PROGRESS, Toll
from swarm.net.greeting import MAGIC, PREFACE, Greeting
from swarm.protocol.codec import encode
from swarm.protocol.messages import Close, Hello, Output, Ping, Pong
from tests.net.support import SESSION, Pair, Pipe, channel_limits, endpoint, remote, step

pytestmark = pytest.mark.virtual_clock
LIMITS = channel_limits()
LITTLE = {"bytes_per_s": 1000.0, "bytes_burst": 1000.0}  # of a peer's own: a greeting and a step
ONE = (1, 1, 8)  # a decode step's activations
AT_ONCE = 256 * 1024  # that a carrier reads


def now():
    return asyncio.get_running_loop().time()


def proven(channel):
    return channel.ready.done() and channel.ready.exception() is None


def nothing_to_share(**changes):
    """Shared budgets that will have nothing for long."""
    flow = FlowControl(channel_limits(**{**LITTLE, **changes}, all_bytes_per_s=1e-3, all_idle_per_s=1e-3))
    flow.read.owe(now(), 1e9)
    flow.idle.owe(now(), 1e9)
    return flow


def throttled(**changes):
    """A pair whose b reads no more than a has free, and has a debt already."""
    pair = Pair(flow=nothing_to_share(**changes)).shake()
    for shape in ((1, 100, 8), (1, 1, 1)):
        assert not pair.b.is_paused
        pair.a.send(*step(0, shape))
        pair.to_b.deliver()
    assert pair.b.is_paused
    assert pair.to_b.paused
    pair.at_b.clear()
    return pair


# Messages


async def test_a_message_arrives_as_it_was_sent():
    pair = Pair().shake()
    assert (pair.a.peer, pair.b.peer) == (pair.b_id.peer_id, pair.a_id.peer_id)
    message, sent = step()
    pair.a.send(message, sent)
    pair.to_b.deliver()
    ((received, got),) = pair.at_b
    assert received == message
    assert torch.equal(got.hidden, sent.hidden)


async def test_messages_of_one_turn_share_a_frame_and_keep_their_order():
    pair = Pair().shake()
    for number in range(3):
        pair.a.send(*step(number, ONE), soon=number < 2)  # the last one goes with those that wait
    assert pair.to_b.held == []
    await asyncio.sleep(0)
    assert len(pair.to_b.held) == 1
    pair.a.send(*step(3, ONE), soon=True)
    pair.a.send(Close(session=SESSION))  # what waits goes first
    pair.to_b.deliver()
    assert [getattr(message, "step", "close") for message, _ in pair.at_b] == [0, 1, 2, 3, "close"]
    await asyncio.sleep(0)
    assert pair.to_b.held == []


async def test_peer_that_knows_no_bundles_gets_frames_of_their_own():
    pair = Pair().shake()
    pair.a._out.bundles = False  # as after the Hello of a version before
    for number in range(2):
        pair.a.send(*step(number, ONE), soon=True)
    assert len(pair.to_b.held) == 2
    pair.to_b.deliver()
    assert [message.step for message, _ in pair.at_b] == [0, 1]


async def test_messages_that_wait_are_dropped_with_the_channel():
    pair = Pair().shake()
    pair.a.send(*step(1, ONE), soon=True)
    pair.a.cut_off("a test")
    await asyncio.sleep(0)
    assert pair.to_b.held == []
    with pytest.raises(ChannelClosed):
        pair.a.send(*step(2, ONE), soon=True)


async def test_messages_arrive_in_any_pieces():
    pair = Pair().shake()
    for number in range(3):
        pair.a.send(*step(number))
    stream = b"".join(pair.to_b.held)
    for i in range(0, len(stream), 7):
        pair.b.receive(stream[i : i + 7])
    assert [message.step for message, _ in pair.at_b] == [0, 1, 2]


async def test_a_long_message_arrives_in_pieces():
    pair = Pair().shake()
    message, sent = step(1, (1, 1 << 13, 64))
    pair.a.send(message, sent)
    stream = b"".join(pair.to_b.held)
    for start in range(0, len(stream), 1 << 16):
        assert pair.at_b == []
        pair.b.receive(stream[start : start + (1 << 16)])
    await asyncio.sleep(1.0)  # it is more than is free
    assert torch.equal(pair.at_b[0][1].hidden, sent.hidden)
    assert pair.b.held()[0] == pair.to_a.unsent_bytes()  # keepalives, while it was not read


async def test_a_flipped_bit_anywhere_is_rejected():
    for position in range(4 + 16 + 300):
        pair = Pair().shake()
        pair.a.send(*step())
        frame = bytearray(pair.to_b.held.pop())
        if position >= len(frame):
            break
        frame[position] ^= 1 << (position % 8)
        pair.b.receive(bytes(frame) + bytes(1 << 16))
        assert pair.at_b == []
        assert pair.b.closed or position < 4  # a longer length waits for bytes that never come


@pytest.mark.parametrize("attack", ["replay", "reorder", "drop", "reflect"])
async def test_a_frame_out_of_its_place_is_rejected(attack):
    pair = Pair().shake()
    for number in (1, 2):
        pair.a.send(*step(number))
    first, second = pair.to_b.held
    pair.to_b.held = []
    victim = pair.b
    match attack:
        case "replay":
            stream = first + first
        case "reorder":
            stream = second + first
        case "drop":
            stream = second
        case "reflect":
            stream, victim = first, pair.a
    victim.receive(stream)
    assert victim.closed
    assert len(pair.at_b) == (1 if attack == "replay" else 0)
    assert pair.at_a == []


async def test_a_frame_of_another_channel_is_rejected():
    ids = Identity.generate(), Identity.generate()
    one, two = Pair(ids=ids).shake(), Pair(ids=ids).shake()
    one.a.send(*step())
    two.b.receive(one.to_b.held[0])
    assert two.b.closed
    assert two.at_b == []


async def test_bytes_behind_a_message_without_tensors_are_rejected():
    pair = Pair().shake()
    pair.a.send(Output(session=SESSION, epoch=0, step=1), Activations(torch.ones(4)))
    pair.to_b.deliver()
    assert pair.b.closed
    assert pair.at_b == []


async def test_a_second_hello_ends_the_channel():
    pair = Pair().shake()
    pair.a.send(Hello(public_key=pair.a_id.public_key.hex(), signature="00" * 64, software="1"))
    pair.to_b.deliver()
    assert "comes once" in pair.b.ended.result()


# The greeting


async def test_a_failed_greeting_is_a_network_error():
    """A peer may send anything before it is proven: a caller of `dial` gets a NetworkError."""
    for garbage in ([b"no message"], encode(Close(session=SESSION))):
        me, carrier, frames = endpoint(access=Access(allowed=frozenset())), Pipe(), FrameReader("a", 1024)
        a, b = Channel(carrier, endpoint(), lambda *_: PROGRESS, remote(me)), Greeting(me, None, frames)
        frames.feed(carrier.held[0])
        b.advance()  # it has a list, so its Hello would come last
        a.receive(b.take_outgoing())
        a.receive(b.sealer.seal(garbage))
        assert a.closed
        assert carrier.closed
        with pytest.raises(HandshakeFailed):
            a.ready.result()


async def test_a_peer_of_another_protocol_is_disconnected():
    pair = Pair()
    pair.b.receive(b"GET / HTTP/1.1\r\n")
    assert pair.b.closed
    assert pair.to_a.closed
    assert pair.to_a.held == []


async def test_an_older_peer_is_told_our_version():
    pair = Pair()
    pair.b.receive(MAGIC + bytes([PROTOCOL_VERSION - 1]))
    assert isinstance(pair.b.ready.exception(), ProtocolMismatch)
    assert pair.to_a.held == [PREFACE]


async def test_a_connection_that_ends_early_says_why_it_may():
    pair = Pair(b_access=Access(allowed=frozenset()))
    pair.shake()
    assert pair.b.closed
    assert isinstance(pair.b.ready.exception(), HandshakeFailed)
    pair.a.lost("the other side ended it")
    assert "not on" in str(pair.a.ready.exception())


async def test_an_unlisted_peer_is_refused_and_nothing_of_it_processed():
    listed, stranger, server = (Identity.generate() for _ in range(3))
    access = Access(allowed=frozenset({listed.peer_id}))
    for client, admitted in ((listed, True), (stranger, False)):
        pair = Pair(b_access=access, ids=(client, server))
        pair.to_b.deliver()
        pair.to_a.deliver()
        assert pair.to_a.held == []  # the server does not name itself to a peer that it does not know
        pair.a.send(*step())
        pair.to_b.deliver()  # a Hello and a step at once
        pair.to_a.deliver()
        assert proven(pair.a) == admitted
        assert (len(pair.at_b), proven(pair.b), pair.b.closed) == (int(admitted), admitted, not admitted)
        if not admitted:
            assert stranger.peer_id in str(pair.b.ready.exception())


async def test_an_unlisted_remote_gets_no_byte():
    pair = Pair(a_access=Access(allowed=frozenset()))
    assert pair.to_b.held == []
    with pytest.raises(HandshakeFailed, match=f"{pair.b_id.peer_id}.*list of allowed peers"):
        await pair.a.ready


# Ends


async def test_sending_on_a_closed_channel_says_so():
    pair = Pair().shake()
    pair.a.close()
    with pytest.raises(ChannelClosed):
        pair.a.send(Close(session=SESSION))


async def test_a_peer_that_does_not_read_is_cut_off():
    pair = Pair(limits=channel_limits(frames={"held_bytes_max": 4 << 20})).shake()
    big = step(1, (1, 1 << 16, 4))  # 1 MiB
    for _ in range(3):
        pair.b.send(*big)
        assert not pair.b.closed
    pair.b.send(*big)
    with pytest.raises(ChannelClosed, match="hold too much"):
        pair.b.send(*step())
    assert pair.to_a.held == []  # the bytes that waited for it are gone


class Holder:
    """Another channel, that holds so much."""

    def __init__(self, size):
        self.size, self.cut = size, False

    def held(self):
        return self.size, now() + 100.0

    def cut_off(self, why):
        self.cut = True


async def test_a_closing_channel_counts_until_its_carrier_has_ended():
    pair = Pair(limits=channel_limits(frames={"held_bytes_max": 5 << 20})).shake()
    pair.to_a.sender = None  # the carrier takes its time
    pair.b.send(*step(1, (1, 1 << 16, 16)))  # 4 MiB
    pair.b.close()
    assert pair.flow.buffers.total > 4 << 20
    other = Holder(2 << 20)
    pair.flow.buffers.note(other)
    assert pair.to_a.held == []  # let go at once
    assert not other.cut
    pair.b.lost("closed")
    assert pair.flow.buffers.total == other.size


async def test_an_ended_channel_holds_nothing():
    pair = Pair().shake()
    pair.b.send(*step(1, (1, 1 << 16, 16)))  # 4 MiB
    assert pair.flow.buffers.total > 4 << 20
    pair.b.lost("gone")
    assert pair.flow.buffers.total == 0


async def test_a_frame_that_never_ends_ends_the_channel():
    pair = Pair(limits=channel_limits(frames={"timeout_s": 10.0})).shake()
    pair.a.send(*step())
    frame = pair.to_b.held.pop()
    pair.b.receive(frame[:40])
    await asyncio.sleep(6.0)
    pair.b.receive(frame[40:])
    await asyncio.sleep(20.0)
    assert not pair.b.closed  # it came in time, and nothing is unfinished
    pair.a.send(*step())
    pair.b.receive(pair.to_b.held.pop()[:-1])
    began = now()
    for _ in range(5):
        await asyncio.sleep(1.0)
        pair.b.receive(b"")
    assert "did not come" in await pair.b.ended
    assert now() - began == pytest.approx(10.0, abs=0.01)


async def test_a_preface_that_never_ends_ends_the_channel():
    pair = Pair(limits=channel_limits(frames={"timeout_s": 10.0}))
    pair.b.receive(pair.to_b.held[0][:3])
    await asyncio.sleep(11.0)
    assert pair.b.closed


async def test_a_frame_is_not_late_while_it_is_not_read():
    pair = throttled(bytes_per_s=1.0, pause_s_max=1000.0, frames={"timeout_s": 10.0})
    pair.a.send(*step())
    pair.b.receive(pair.to_b.held.pop()[:40])
    await asyncio.sleep(500.0)
    assert pair.b.is_paused
    assert not pair.b.closed


# Pings


async def test_a_ping_measures_the_round_trip():
    loop = asyncio.get_running_loop()
    pair = Pair(clock=loop.time).shake()
    loop.call_later(0.05, pair.shake)
    assert await pair.a.ping() == pytest.approx(0.05)


async def test_callers_that_ping_at_once_share_the_answer():
    pair = Pair().shake()
    pings = [asyncio.create_task(pair.a.ping()) for _ in range(100)]
    await asyncio.sleep(0)
    assert len(pair.to_b.held) == 1
    pair.shake()
    assert len(await asyncio.gather(*pings)) == 100
    pings = [asyncio.create_task(pair.a.ping()) for _ in range(100)]
    await asyncio.sleep(0)
    pair.a.lost("gone")
    ends = await asyncio.gather(*pings, return_exceptions=True)
    assert {type(end) for end in ends} == {ChannelClosed}


async def test_a_ping_that_was_given_up_measures_nothing():
    pair = Pair().shake()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await pair.a.ping()
    ping = asyncio.create_task(pair.a.ping())
    await asyncio.sleep(0)
    later = pair.to_b.held.pop()
    pair.shake()
    await asyncio.sleep(0.01)
    assert not ping.done()
    pair.to_b.held.append(later)
    pair.shake()
    await ping


# Turns and debts


async def test_bytes_that_came_during_a_pause_are_read_after_it():
    pair = throttled()
    for number in range(5):
        pair.a.send(*step(number))
    stream = b"".join(pair.to_b.held)
    pair.to_b.held = []
    pair.b.receive(stream[: len(stream) // 2])  # the carrier had it already
    pair.b.receive(stream[len(stream) // 2 :])
    assert pair.at_b == []
    await asyncio.sleep(10.0)
    assert [message.step for message, _ in pair.at_b] == list(range(5))
    assert not pair.to_b.paused


async def test_a_channel_that_ends_while_paused_is_not_resumed():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    pair = throttled()
    resumed = pair.to_b.resumed
    pair.b.lost("gone")
    await asyncio.sleep(20.0)
    assert (pair.to_b.resumed, pair.to_a.held, complaints) == (resumed, [], [])


async def test_many_frames_at_once_leave_others_their_turn():
    pair, turn = Pair().shake(), int(LIMITS.frames.turn)
    for number in range(3 * turn):
        pair.a.send(*step(number))
    pair.to_b.deliver()
    assert len(pair.at_b) == turn
    assert pair.to_b.paused
    await asyncio.sleep(0.01)
    assert len(pair.at_b) == 3 * turn
    assert not pair.to_b.paused


async def test_a_large_frame_is_a_turn_of_its_own():
    pair = Pair().shake()
    for number in range(3):
        pair.a.send(*step(number, (1, 1 << 8, 1 << 10)))  # 1 MiB
    pair.to_b.deliver()
    assert len(pair.at_b) == 1
    await asyncio.sleep(0.1)
    assert len(pair.at_b) == 3


async def test_accepted_decode_steps_do_not_count_as_bytes():
    for worth, is_paused in ((Toll(free_bytes=1000), False), (PROGRESS, True)):
        pair = Pair(flow=nothing_to_share()).shake()
        pair.worth = worth
        for number in range(10):
            pair.a.send(*step(number))
            pair.b.receive(pair.to_b.held.pop())
        assert pair.b.is_paused == is_paused


async def test_messages_that_move_nothing_are_charged_to_their_payer():
    few = {"idle_per_s": 0.1, "idle_burst": 4.0, "bytes_burst": 1e6}
    for pays in ("the sender", "another"):
        pair, other = (Pair(flow=nothing_to_share(**few)).shake() for _ in range(2))
        pair.worth = IDLE if pays == "the sender" else Toll(idle=True, payer=other.b)
        for number in range(6):
            pair.a.send(*step(number))
            pair.b.receive(pair.to_b.held.pop())
        assert (pair.b.is_paused, other.b.is_paused) == (pays == "the sender", pays == "another")
        assert other.to_b.paused == other.b.is_paused


async def test_a_charge_counts_the_bytes_of_the_tensors():
    pair = Pair(flow=nothing_to_share(idle_per_s=0.1, idle_burst=4.0, idle_bytes=100, bytes_burst=1e6)).shake()
    pair.worth = IDLE
    for number in range(2):
        pair.a.send(*step(number))  # 96 bytes
        pair.b.receive(pair.to_b.held.pop())
    assert not pair.b.is_paused
    for number in range(2, 4):
        pair.a.send(*step(number))
        pair.b.receive(pair.to_b.held.pop())
    assert pair.b.is_paused


async def test_an_allowance_is_shared_by_all_channels_of_a_peer():
    one = throttled()
    for ids, shares in (((one.a_id, one.b_id), True), ((Identity.generate(), one.b_id), False)):
        other = Pair(ids=ids, flow=one.flow).shake()
        other.a.send(*step(0, (1, 20, 1)))
        other.to_b.deliver()
        assert other.b.is_paused == shares


async def test_a_flood_of_pings_is_answered_at_the_shared_rate():
    pair = Pair(limits=channel_limits(all_idle_per_s=50.0, all_idle_burst=1.0)).shake()
    for nonce in range(300):
        pair.a.send(Ping(nonce=nonce))
    pair.to_b.deliver()
    await asyncio.sleep(0.5)
    allowed = LIMITS.reading.idle_burst + (50 + LIMITS.reading.idle_per_s) * 0.5
    answered = len(pair.to_a.held)
    assert LIMITS.reading.idle_burst < answered <= allowed + 3
    assert not pair.b.closed


async def test_bytes_that_come_too_fast_are_not_read_at_once():
    pair = Pair(flow=nothing_to_share()).shake()
    pair.b.receive((32 << 20).to_bytes(4, "big"))
    for _ in range(8):
        pair.b.receive(bytes(1 << 20))
    assert pair.to_b.paused
    assert not pair.b.closed
    assert pair.b.held()[0] == 4 + (8 << 20)


async def read_of(pairs, for_s):
    """Bytes that each b reads of a frame without end when each a sends without a pause."""
    read, ends = [0] * len(pairs), now() + for_s
    while now() < ends:
        for i, pair in enumerate(pairs):
            if not pair.to_b.paused:
                pair.b.receive(bytes(AT_ONCE))
                read[i] += AT_ONCE
        await asyncio.sleep(0.01)
    return read


def crowd(flow, size):
    """So many peers, whose channels share this, in the middle of a large frame."""
    pairs = [Pair(flow=flow).shake() for _ in range(size)]
    for pair in pairs:
        pair.b.receive((32 << 20).to_bytes(4, "big"))
    return pairs


async def test_a_crowd_is_read_in_turn_and_leaves_no_debt():
    per_s = 4 * AT_ONCE
    limits = channel_limits(bytes_per_s=1.0, all_bytes_per_s=per_s, all_bytes_burst=per_s)
    flow = FlowControl(limits)
    *hostile, honest = pairs = crowd(flow, 64)
    read = await read_of(pairs, 24.0)
    first = len(pairs) * 2 * AT_ONCE  # the burst of each, and the one read that exceeds it
    assert first + 20 * per_s <= sum(read) <= first + 24 * per_s + per_s
    assert max(read) - min(read) <= 2 * AT_ONCE
    for pair in hostile:
        pair.b.cut_off("it has gone")
    assert flow.read.wait_s(now()) <= AT_ONCE / per_s
    (alone,) = await read_of([honest], 4.0)
    assert alone >= 3 * per_s


async def test_a_throttled_peer_keeps_its_free_rate_and_gets_keepalives():
    pairs, for_s = crowd(nothing_to_share(bytes_per_s=LIMITS.reading.bytes_per_s), 9), 20.0
    heard = asyncio.create_task(keepalives(pairs[0], for_s))
    read = await read_of(pairs, for_s)
    assert min(read) >= 0.7 * LIMITS.reading.bytes_per_s * for_s
    assert max(after - before for before, after in pairwise(await heard)) < 0.5


# Keepalives


async def keepalives(pair, for_s):
    """When a hears from b. Bytes cross at once, as on a carrier whose peer reads."""
    at, began = [], now()
    while now() < began + for_s:
        if pair.to_a.held:
            at.append(round(now() - began, 2))
            pair.to_a.deliver()
        await asyncio.sleep(0.01)
    return at


async def test_a_peer_that_is_not_read_for_long_gets_keepalives():
    """Else a client takes a server for dead that reads a crowd's prompts no faster than it may."""
    pair = throttled(pause_s_max=2.0, bytes_per_s=1.0)
    read_at = pair.b.heard_at
    assert await keepalives(pair, 2.0) == pytest.approx([0.3, 0.6, 0.9, 1.2, 1.5, 1.8], abs=0.1)
    assert pair.a.heard_at > read_at + 1.7
    assert (pair.at_a, pair.to_b.held) == ([], [])  # it is no answer, and has none


async def test_a_turn_that_is_over_brings_no_keepalive():
    pair = Pair(limits=channel_limits(frames={"turn": 1.0})).shake()
    heard = asyncio.create_task(keepalives(pair, 3.0))
    for number in range(250):
        pair.a.send(*step(number))
        pair.to_b.deliver()
        await asyncio.sleep(0.01)
    assert await heard == []


async def test_keepalives_do_not_pile_up():
    pair = throttled(bytes_per_s=1.0)
    await asyncio.sleep(5.0)
    assert len(pair.to_a.held) == 1


async def test_a_throttled_crowd_gets_no_more_keepalives_than_the_limit():
    pair = throttled(bytes_per_s=1.0, keepalives={"all_per_s": 1.0, "all_burst": 1.0})
    assert len(await keepalives(pair, 5.0)) == pytest.approx(6, abs=1)


async def test_a_peer_that_has_proven_nothing_gets_no_keepalive():
    pair = Pair(flow=nothing_to_share(bytes_per_s=1.0, bytes_burst=1.0))
    pair.to_b.deliver()
    pair.to_a.deliver()
    pair.b.receive(b"\0")  # of a Hello
    assert pair.b.is_paused
    await asyncio.sleep(2.0)
    assert not proven(pair.b)
    assert pair.to_a.held == []


async def test_keepalives_are_free_from_a_peer_that_was_dialled():
    few = {"idle_burst": 1.0, "idle_per_s": 0.01, "bytes_burst": 1e6}

    async def until_paused(receiver, sender, pipe, every_s):
        """How many keepalives are taken before their sender is throttled."""
        for count in range(100):
            if receiver.is_paused:
                return count
            sender.send(Pong(nonce=UNASKED))
            pipe.deliver()
            await asyncio.sleep(every_s)
        return None

    for every_s, least, most in ((LIMITS.keepalives.every_s, None, None), (0.01, LIMITS.keepalives.burst, 13)):
        pair = Pair(a_flow=nothing_to_share(**few)).shake()
        count = await until_paused(pair.a, pair.b, pair.to_a, every_s)
        assert count is None if least is None else least <= count <= most
    pair = Pair(flow=nothing_to_share(**few)).shake()
    assert (
        await until_paused(pair.b, pair.a, pair.to_b, LIMITS.keepalives.every_s) < 6
    )  # a peer that has connected pays
