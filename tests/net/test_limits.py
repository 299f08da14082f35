"""What peers may cost: rates, and what is held for them."""

import asyncio
import random
import socket
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import psutil
import pytest
import torch

from swarm.activations import Activations
from swarm.errors import ChannelClosed
from swarm.identity import Identity
from swarm.net import channel as channel_module
from swarm.net.buffers import LARGE_BYTES, PIECE_BYTES, READ_BYTES, SMALL_BYTES, Backlog, Buffers, Unread
from swarm.net.carriers import tcp
from swarm.net.carriers.tcp import Listener, Turns, dial, gives_way
from swarm.net.channel import STEP_BYTES, Channel
from swarm.net.noise import ChannelKey
from swarm.net.rate import Bucket, Line
from swarm.protocol.messages import Close, Ping, Pong
from swarm.protocol.tensors import meta_of
from tests.net.test_channel import SESSION, Pair, step
from tests.net.test_tcp import address, remote, somebody, until


def test_a_bucket_gives_its_burst_at_once_and_then_its_rate():
    bucket = Bucket(10.0, 5.0)
    assert [bucket.take(1.0) for _ in range(5)] == [0.0] * 5
    assert 0 < bucket.take(1.0) <= 0.1
    taken = sum(bucket.take(1.0 + i / 1000) == 0.0 for i in range(1, 2001))
    assert 19 <= taken <= 21


def test_a_bucket_lends_what_is_large_and_makes_wait_for_it():
    bucket = Bucket(10.0, 5.0)
    assert bucket.take(1.0, 25.0) == 0.0
    assert bucket.take(1.0) == pytest.approx(2.0, abs=0.01)
    assert bucket.take(3.1) == 0.0


def test_what_is_owed_adds_up_and_comes_back():
    bucket = Bucket(10.0, 5.0)
    assert bucket.owe(0.0, 5.0) == 0.0
    assert [bucket.owe(0.0, 5.0) for _ in range(3)] == [0.5, 1.0, 1.5]
    assert not bucket.is_full(1.5)
    assert bucket.is_full(2.1)


@dataclass(eq=False)
class Patient:
    """Stands in line, and notes when it was paid for."""

    name: str
    at: list[tuple[str, float]]

    def paid(self, line):
        self.at.append((self.name, round(asyncio.get_running_loop().time(), 1)))


@pytest.mark.virtual_clock
async def test_a_line_lets_each_pay_in_its_turn_and_owes_nothing_for_those_who_have_left():
    loop, line, at = asyncio.get_running_loop(), Line(10.0, 10.0), []
    began = loop.time()
    first, second, leaves, last = (Patient(name, at) for name in ("first", "second", "leaves", "last"))
    assert line.pay(first, 20.0, began)  # so much is there at first, and lent
    assert not any(line.pay(payer, 10.0, began) for payer in (second, leaves, first))
    assert not line.pay(leaves, 1000.0, began)
    await asyncio.sleep(1.5)
    line.leave(leaves)
    assert not line.pay(last, 10.0, loop.time())
    assert line.wait_s(loop.time()) < 1.0
    await asyncio.sleep(10.0)
    assert at == [("second", round(began + 1, 1)), ("first", round(began + 2, 1)), ("last", round(began + 3, 1))]
    assert line.pay(last, 1.0, loop.time())


class Held:
    """A channel that holds so much, for so long."""

    def __init__(self, held_bytes, held_since):
        self.held_bytes, self.held_since, self.cut = held_bytes, held_since, False

    def cut_off(self, why):
        self.cut, self.held_bytes = True, 0


def test_when_too_much_is_held_the_oldest_holder_goes_and_an_honest_large_frame_does_not():
    buffers = Buffers(10 * SMALL_BYTES)
    hoarders = [Held(2 * SMALL_BYTES, float(i)) for i in range(4)]
    small = Held(SMALL_BYTES, -100.0)
    honest = Held(6 * SMALL_BYTES, 50.0)
    for channel in (small, *hoarders, honest):
        buffers.note(channel)
    assert [channel.cut for channel in hoarders] == [True, True, False, False]
    assert not honest.cut
    assert not small.cut


def test_what_has_been_read_meanwhile_counts_no_more():
    buffers = Buffers(10 * SMALL_BYTES)
    channels = [Held(4 * SMALL_BYTES, float(i)) for i in range(20)]
    for channel in channels:
        buffers.note(channel)
        channel.held_bytes = 0
    assert not any(channel.cut for channel in channels)


def test_a_backlog_is_as_old_as_what_waits_longest_and_tells_a_slow_reader_from_none():
    unsent = 0
    backlog = Backlog(lambda: unsent)
    backlog.wrote(100, 1.0)
    assert backlog.since(5.0) == 5.0  # all of it has left
    for now in (6.0, 7.0):
        unsent += 100
        backlog.wrote(100, now)
    assert backlog.moves()
    assert not backlog.moves()
    assert (backlog.since(9.0), backlog.sent) == (6.0, 100)
    unsent = 50
    assert backlog.sent == 250
    assert backlog.since(9.0) == 9.0  # what waited at 6.0 has left, and of the rest we know no better
    assert backlog.moves()


async def test_a_closing_channel_counts_until_its_carrier_has_ended():
    pair = Pair().shake()
    pair.to_a.sender = None  # the carrier takes its time
    buffers, big = pair.b._me.buffers, torch.zeros(1, 1 << 16, 16)  # 4 MiB
    message = step()[0].model_copy(update={"hidden": meta_of(big)})
    pair.b.send(message, Activations(big))
    pair.b.close()
    assert buffers._total > 4 << 20
    buffers._held_bytes_max = 5 << 20
    other = Held(2 << 20, time.monotonic() + 100)
    buffers.note(other)
    assert pair.to_a.held == []  # let go at once
    assert not other.cut


async def test_a_paused_channel_goes_on_where_it_was_with_frames_that_were_read_already():
    pair = Pair().shake()
    for number in range(5):
        message, hidden = step(number)
        pair.a.send(message, Activations(hidden))
    stream = b"".join(pair.to_b.held)
    pair.to_b.held = []
    pair.b.pause(0.05)
    assert pair.to_b.paused
    pair.b.receive(stream[: len(stream) // 2])  # the carrier had it already
    pair.b.receive(stream[len(stream) // 2 :])
    assert pair.at_b == []
    await until(lambda: len(pair.at_b) == 5)
    assert [message.step for message, _ in pair.at_b] == list(range(5))
    assert not pair.to_b.paused


async def test_a_channel_that_ends_while_it_is_paused_is_not_resumed():
    pair = Pair().shake()
    pair.b.pause(0.02)
    pair.b.lost("gone")
    pair.to_b.resume_reading = lambda: pytest.fail("resumed")
    await asyncio.sleep(0.05)


async def test_many_frames_at_once_leave_others_their_turn():
    pair = Pair().shake()
    for number in range(3 * channel_module.TURN_FRAMES):
        message, hidden = step(number)
        pair.a.send(message, Activations(hidden))
    pair.to_b.deliver()
    assert len(pair.at_b) == channel_module.TURN_FRAMES
    await until(lambda: len(pair.at_b) == 3 * channel_module.TURN_FRAMES)


async def test_a_large_frame_is_a_turn_of_its_own():
    pair = Pair().shake()
    big = torch.zeros(1, 1 << 8, 1 << 10)  # 1 MiB
    for number in range(3):
        pair.a.send(step(number)[0].model_copy(update={"hidden": meta_of(big)}), Activations(big))
    pair.to_b.deliver()
    assert len(pair.at_b) == 1
    await until(lambda: len(pair.at_b) == 3)


@pytest.mark.parametrize("size", [1, 1000, 1 << 16, 1 << 18])
async def test_a_long_frame_is_read_whatever_pieces_it_comes_in(size):
    pair = Pair().shake()
    big = torch.arange(1 << 18, dtype=torch.float32).reshape(1, -1, 64)
    if size == 1:
        big = big[:, :8].contiguous()
    pair.a.send(step(1)[0].model_copy(update={"hidden": meta_of(big)}), Activations(big))
    stream = b"".join(pair.to_b.held)
    for start in range(0, len(stream), size):
        assert pair.at_b == []
        pair.b.receive(stream[start : start + size])
    await until(lambda: len(pair.at_b) == 1)
    assert torch.equal(pair.at_b[0][1].hidden, big)
    assert len(pair.b._unread) == 0


def test_what_comes_a_byte_at_a_time_is_not_kept_byte_by_byte():
    unread = Unread()
    for _ in range(PIECE_BYTES + 10):
        unread.add(b"x")
    assert len(unread) == PIECE_BYTES + 10
    assert len(unread._pieces) == 2
    assert unread.take() == b"x" * (PIECE_BYTES + 10)
    assert len(unread) == 0


@pytest.mark.parametrize("behind", [0, 10, READ_BYTES, 3 * READ_BYTES])
def test_a_large_frame_is_put_together_where_it_will_be_whole(behind):
    whole, unread = random.Random(1).randbytes(LARGE_BYTES + behind), Unread()
    unread.begin(LARGE_BYTES)
    for start in range(0, len(whole), 100_000):
        unread.add(whole[start : start + 100_000])
    assert len(unread) == len(whole)
    taken = unread.take()
    assert isinstance(taken, memoryview) == (behind <= READ_BYTES)
    assert taken == whole
    assert len(unread) == 0
    unread.add(b"next")
    assert unread.take() == b"next"


def test_a_claim_of_a_large_frame_takes_no_memory():
    before = psutil.Process().memory_info().rss
    claims = [Unread() for _ in range(20)]
    for unread in claims:
        unread.begin(64 << 20)
        unread.add(b"x")
    assert psutil.Process().memory_info().rss - before < 8 << 20


async def test_decode_steps_that_were_taken_do_not_count_as_bytes_of_their_peer():
    channel = Pair().shake().b
    free = channel._allowance.inflow
    free.change(1e-9)
    for _ in range(20):
        channel._charge(free, channel._me.inflow, STEP_BYTES, 0.0)
        channel.note_decode(STEP_BYTES)
    assert free.wait_s(0.0) == 0
    for _ in range(20):
        channel._charge(free, channel._me.inflow, 2 * STEP_BYTES, 0.0)
        channel.note_decode(2 * STEP_BYTES)
    assert free.take(0.0) > 0  # of a larger one so much is free, and no more


async def test_what_is_free_is_free_once_for_all_channels_of_a_peer():
    one = Pair().shake()
    for ids, is_shared in (((one.a_id, one.b_id), True), ((Identity.generate(), one.b_id), False)):
        other = Pair(ids=ids)
        other.b._me = replace(other.b._me, allowances=one.b._me.allowances)
        other.shake()
        assert (other.b._allowance is one.b._allowance) == is_shared


async def test_a_flood_of_pings_is_answered_at_the_rate_that_all_share():
    began = time.monotonic()
    pair = Pair().shake()
    pair.b._me.chatter._per_s = 50.0
    pair.b._me.chatter.owe(asyncio.get_running_loop().time(), channel_module.ALL_CHATTER_BURST)
    for nonce in range(300):
        pair.a.send(Ping(nonce=nonce))
    pair.to_b.deliver()
    await asyncio.sleep(0.5)
    answered = len(pair.to_a.held)
    allowed = channel_module.CHATTER_BURST + (50 + channel_module.CHATTER_PER_S) * (time.monotonic() - began)
    assert channel_module.CHATTER_BURST < answered <= allowed + 3
    assert not pair.b.closed


async def test_bytes_that_come_too_fast_are_read_at_the_rate_that_all_share():
    pair = Pair().shake()
    # So much that a slow machine does not work it off while the rest arrives.
    pair.b._me.inflow.owe(asyncio.get_running_loop().time(), 100 * channel_module.ALL_BYTES_BURST)
    pair.b.receive((32 << 20).to_bytes(4, "big"))
    for _ in range(8):
        pair.b.receive(bytes(1 << 20))
    assert pair.to_b.paused
    assert not pair.b.closed


async def read_of(pairs, for_s):
    """Bytes that each b reads of a frame without end, in virtual time, when each a sends what it can."""
    loop, read = asyncio.get_running_loop(), [0] * len(pairs)
    ends = loop.time() + for_s
    while loop.time() < ends:
        for i, pair in enumerate(pairs):
            if not pair.to_b.paused:
                pair.b.receive(bytes(READ_BYTES))
                read[i] += READ_BYTES
        await asyncio.sleep(0.01)
    return read


def crowd(inflow, size, free_per_s):
    """So many peers, whose channels share this, in the middle of a large frame."""
    pairs = [Pair().shake() for _ in range(size)]
    for pair in pairs:
        pair.b._me = replace(pair.b._me, inflow=inflow)
        pair.b._allowance.inflow.change(free_per_s)
        pair.b.receive((32 << 20).to_bytes(4, "big"))
    return pairs


@pytest.mark.virtual_clock
async def test_a_crowd_is_read_in_turn_and_no_faster_than_all_of_them_may_and_owes_nothing_when_it_has_gone():
    loop, per_s = asyncio.get_running_loop(), 4 * READ_BYTES
    inflow = Line(per_s, per_s)
    *hostile, honest = pairs = crowd(inflow, 64, 1.0)
    read = await read_of(pairs, 24.0)
    first = len(pairs) * 2 * READ_BYTES  # what each has free, and the one read that tells that it has no more
    assert first + 20 * per_s <= sum(read) <= first + 24 * per_s + per_s
    assert max(read) - min(read) <= 2 * READ_BYTES
    for pair in hostile:
        pair.b.cut_off("it has gone")
    assert inflow.wait_s(loop.time()) <= READ_BYTES / per_s
    (alone,) = await read_of([honest], 4.0)
    assert alone >= 3 * per_s


@pytest.mark.virtual_clock
async def test_whoever_waits_behind_a_crowd_is_read_as_fast_as_is_free_for_it_and_hears_that_this_side_is_alive():
    hostile = crowd(Line(1.0, 1.0), 8, 1.0)
    (honest,) = crowd(hostile[0].b._me.inflow, 1, channel_module.BYTES_PER_S)
    heard = asyncio.create_task(signs(honest, 20.0))
    read = await read_of([*hostile, honest], 20.0)
    assert max(read[:-1]) <= 3 * READ_BYTES
    assert read[-1] >= 0.7 * channel_module.BYTES_PER_S * 20
    at = await heard
    assert max(after - before for before, after in pairwise(at)) < 0.5


# Signs of life


async def signs(pair, for_s):
    """When a hears from b, in virtual time. Bytes cross at once, as on a carrier whose peer reads."""
    loop, at, began = asyncio.get_running_loop(), [], asyncio.get_running_loop().time()
    while loop.time() < began + for_s:
        if pair.to_a.held:
            at.append(round(loop.time() - began, 2))
            pair.to_a.deliver()
        await asyncio.sleep(0.01)
    return at


@pytest.mark.virtual_clock
async def test_a_peer_that_is_not_read_for_long_hears_that_this_side_is_alive():
    """Else a client takes a server for dead that reads a crowd's prompts no faster than it may."""
    pair = Pair().shake()
    pair.b.pause(2.0)
    assert await signs(pair, 10.0) == pytest.approx([0.3, 0.6, 0.9, 1.2, 1.5, 1.8, 2.1], abs=0.1)
    assert pair.a.heard_at > pair.b.heard_at + 1.9
    assert (pair.at_a, pair.to_b.held) == ([], [])  # it is nobody's answer, and has none


@pytest.mark.virtual_clock
async def test_a_peer_that_is_read_between_many_short_pauses_hears_it_too():
    """What it asks waits behind megabytes then."""
    pair = Pair().shake()
    heard = asyncio.create_task(signs(pair, 3.0))
    for _ in range(20):
        pair.b.pause(0.1)
        await asyncio.sleep(0.15)
    at = [0.0, *await heard]
    gaps = [after - before for before, after in pairwise(at)]
    assert len(gaps) >= 3.0 / 0.5
    assert 0.29 <= min(gaps) <= max(gaps) < 0.5  # within the least patience of a client


@pytest.mark.virtual_clock
async def test_whose_turn_it_is_not_hears_nothing():
    pair = Pair().shake()
    heard = asyncio.create_task(signs(pair, 3.0))
    for _ in range(300):
        pair.b.pause(0.0)
        await asyncio.sleep(0.01)
    assert await heard == []


@pytest.mark.virtual_clock
async def test_what_a_peer_does_not_read_does_not_grow_by_signs():
    pair = Pair().shake()
    pair.b.pause(5.0)
    await asyncio.sleep(5.0)
    assert len(pair.to_a.held) == 1


@pytest.mark.virtual_clock
async def test_a_crowd_that_is_not_read_costs_no_more_signs_than_all_of_them_may():
    pair = Pair().shake()
    pair.b._me = replace(pair.b._me, signs=Bucket(1.0, 1.0))
    pair.b.pause(5.0)
    assert len(await signs(pair, 5.0)) == pytest.approx(6, abs=1)


@pytest.mark.virtual_clock
async def test_a_peer_that_has_proven_nothing_hears_nothing():
    pair = Pair()
    pair.to_b.deliver()
    pair.to_a.deliver()  # its Hello is on the way
    pair.b.pause(1.0)
    await asyncio.sleep(1.0)
    assert not pair.b.proven
    assert pair.to_a.held == []


@pytest.mark.virtual_clock
async def test_a_peer_that_has_gone_is_given_no_sign():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    pair = Pair().shake()
    pair.b.pause(1.0)
    pair.b.lost("gone")
    await asyncio.sleep(1.0)
    assert (pair.to_a.held, complaints) == ([], [])


@pytest.mark.virtual_clock
async def test_signs_are_free_where_this_side_has_dialled_and_no_oftener_than_they_may_come(monkeypatch):
    pair = Pair().shake()
    charged = {pair.a: 0, pair.b: 0}
    monkeypatch.setattr(Channel, "note_chatter", lambda channel: charged.update({channel: charged[channel] + 1}))

    async def signal(sender, pipe, count, every_s):
        for _ in range(count):
            sender.send(Pong(nonce=channel_module.UNASKED))
            pipe.deliver()
            await asyncio.sleep(every_s)

    await signal(pair.b, pair.to_a, 100, channel_module.SIGN_S)
    assert charged == {pair.a: 0, pair.b: 0}
    await signal(pair.b, pair.to_a, 100, 0.01)
    assert charged[pair.a] >= 100 - channel_module.SIGNS_BURST - 1.0 / channel_module.SIGN_S - 1
    await signal(pair.a, pair.to_b, 10, channel_module.SIGN_S)
    assert charged[pair.b] == 10


# Listeners


def another_process(me):
    return replace(me, key=ChannelKey())


@pytest.fixture
async def listener():
    listener = Listener(somebody(), "127.0.0.1", 0)
    await listener.start(lambda *_: None)
    yield listener
    await listener.close()


def test_a_source_that_connects_too_often_waits_its_turn_and_is_then_turned_away_while_others_are_not():
    turns = Turns()
    waits = [turns.wait_s("10.0.0.1", 0.0) for _ in range(100)]
    at_once, in_line = waits[: int(tcp.ALL_HANDSHAKES_BURST)], waits[: int(tcp.HANDSHAKES_BURST)]
    assert at_once == [0.0] * len(at_once)
    assert None not in in_line
    assert max(in_line) < tcp.TURN_WAIT_S
    late = waits[int(tcp.HANDSHAKES_BURST) :]
    assert 0 < late[0] <= tcp.TURN_WAIT_S
    assert late[-1] is None
    assert turns.wait_s("10.0.0.2", 0.0) < 1.0
    assert turns.wait_s("10.0.0.1", 60.0) == 0.0


def test_all_addresses_of_one_ipv6_network_are_one_source():
    assert tcp._source("2001:db8::1") == tcp._source("2001:db8::ffff:1")
    assert tcp._source("2001:db8:0:1::1") != tcp._source("2001:db8::1")


async def test_when_too_many_prove_nothing_the_oldest_goes(listener, monkeypatch):
    monkeypatch.setattr(tcp, "HANDSHAKES_MAX", 2)
    mute = []
    for count in (1, 2):
        mute.append(await asyncio.open_connection(*listener.address))
        await until(lambda count=count: len(listener._shaking) == count)
    channel = await dial(address(listener), remote(listener._me), somebody(), lambda *_: None)
    async with asyncio.timeout(5):
        assert await mute[0][0].read() == b""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await mute[1][0].read()
    for _, writer in mute:
        writer.close()
    channel.close()


@pytest.mark.parametrize("processes", [1, 6])
async def test_of_one_peers_many_channels_one_that_was_silent_for_long_gives_way_and_no_other_one(
    listener, monkeypatch, processes
):
    """Else a client whose connections died unnoticed cannot come back for minutes. It may be one process, or many."""
    monkeypatch.setattr(tcp, "CHANNELS_PER_PEER_MAX", 6)
    most = tcp.CHANNELS_PER_PROCESS_MAX if processes == 1 else tcp.CHANNELS_PER_PEER_MAX
    me, other = somebody(), somebody()
    mine = [me, *(another_process(me) for _ in range(processes - 1))]
    reach = address(listener), remote(listener._me)
    bystander = await dial(*reach, other, lambda *_: None)
    channels = [await dial(*reach, mine[i % processes], lambda *_: None) for i in range(most)]
    await until(lambda: len(listener._proven[me.identity.peer_id]) == most)
    silent, *others = listener._proven[me.identity.peer_id]
    silent.heard_at -= 60
    channels.append(await dial(*reach, me, lambda *_: None))
    await until(lambda: silent.closed)
    one_more = await dial(*reach, me, lambda *_: None)
    await until(lambda: one_more.closed)
    assert not any(channel.closed for channel in others)
    assert sum(channel.closed for channel in (*channels, bystander)) == 1
    assert len(listener._proven[me.identity.peer_id]) == most
    for channel in (*channels, bystander):
        channel.close()
    await until(lambda: not listener._proven)


async def test_processes_of_one_identity_do_not_take_each_others_channels(listener):
    """Somebody has five notebooks open, and all of them are in use."""
    me = somebody()
    reach = address(listener), remote(listener._me)
    channels = []
    for process in (me, another_process(me)):
        channels += [await dial(*reach, process, lambda *_: None) for _ in range(tcp.CHANNELS_PER_PROCESS_MAX)]
    await until(lambda: len(listener._proven[me.identity.peer_id]) == len(channels))
    one_more = await dial(*reach, me, lambda *_: None)
    await until(lambda: one_more.closed)
    oldest = next(known for known in listener._channels if known.remote_key != me.key.public)
    oldest.heard_at -= 60
    one_more = await dial(*reach, me, lambda *_: None)  # whose own ones are all in use
    await until(lambda: one_more.closed)
    assert not any(channel.closed for channel in channels)
    for channel in channels:
        channel.close()
    await until(lambda: not listener._proven)


async def test_silent_channels_end_and_those_in_use_do_not(monkeypatch):
    monkeypatch.setattr(tcp, "SWEEP_S", 0.05)
    monkeypatch.setattr(tcp, "IDLE_S", 0.2)
    used = somebody()
    listener = Listener(somebody(), "127.0.0.1", 0)
    await listener.start(lambda *_: None, lambda: {used.identity.peer_id})
    peers = (used, somebody(), somebody())
    kept, silent, talks = [await dial(address(listener), remote(listener._me), me, lambda *_: None) for me in peers]
    for _ in range(8):
        await talks.ping()
        await asyncio.sleep(0.05)
    assert (kept.closed, silent.closed, talks.closed) == (False, True, False)
    await listener.close()
    await until(lambda: kept.closed and talks.closed)


async def test_whoever_takes_nothing_of_what_waits_for_it_is_cut_off(monkeypatch):
    monkeypatch.setattr(tcp, "SWEEP_S", 0.1)
    served = []
    listener = Listener(somebody(), "127.0.0.1", 0)
    await listener.start(lambda channel, *_: served.append(channel))
    reads_nothing = await dial(address(listener), remote(listener._me), somebody(), lambda *_: None)
    reads_nothing.send(Close(session=SESSION))
    await until(lambda: served)
    reads_nothing._carrier.pause_reading()
    big = torch.zeros(1, 1 << 16, 64)  # 16 MiB: more than the kernel takes
    served[0].send(step()[0].model_copy(update={"hidden": meta_of(big)}), Activations(big))
    await until(lambda: served[0].closed)
    assert "does not read" in served[0].ended.result()
    with pytest.raises(ChannelClosed):
        served[0].send(Close(session=SESSION))
    reads_nothing._carrier.abort()
    await listener.close()
    await asyncio.sleep(0.01)


async def test_connections_are_accepted_at_a_rate_and_none_is_forgotten(listener, monkeypatch):
    listener._accepts = Bucket(50.0, 1.0)
    began = time.monotonic()
    sockets = [socket.create_connection(listener.address) for _ in range(12)]
    await until(lambda: len(listener._shaking) == 12)
    assert time.monotonic() - began > 0.15
    for sock in sockets:
        sock.close()
    await until(lambda: not listener._shaking)


async def test_one_source_with_many_identities_keeps_nobody_out(listener, monkeypatch):
    """It lets each channel say something every minute, and opens sessions with as many of its peers as it likes."""
    listener._channels_max = 8
    reach = address(listener), remote(listener._me)
    greedy = [somebody() for _ in range(8)]
    held = [await dial(*reach, me, lambda *_: None) for me in greedy]
    await until(lambda: len(listener._proven) == 8)
    await listener.start(lambda *_: None, lambda: {me.identity.peer_id for me in greedy[1:]})
    monkeypatch.setattr(tcp, "_source", lambda host: "another")
    for gone in (1, 2):  # the one that is not in use, and then one that is
        honest = await dial(*reach, somebody(), lambda *_: None)
        await until(lambda gone=gone: sum(channel.closed for channel in held) == gone)
        assert held[0].closed
        await honest.ping()
    assert len(listener._channels) == 8
    for channel in held:
        channel.close()
    await until(lambda: len(listener._channels) == 2)


@dataclass(eq=False)
class Present:
    """An accepted channel, as far as giving way goes."""

    peer: str
    heard_at: float


def test_of_too_many_channels_the_most_silent_one_of_the_largest_source_gives_way():
    few, some, many = (
        [Present(f"{name}{i}", float(i)) for i in range(n)] for name, n in zip("abc", (2, 3, 4), strict=True)
    )
    channels = {channel: name for name, crowd in zip("abc", (few, some, many), strict=True) for channel in crowd}
    assert gives_way(channels, ()) is many[0]
    assert gives_way(channels, {"c0"}) is some[0]
    assert gives_way(channels, {"c0", "c1"}) is some[0]
    assert gives_way(channels, {channel.peer for channel in (*some, *many)}) is few[0]
    everybody = {channel.peer for channel in channels}
    assert gives_way(channels, everybody) is None
    most = {**channels, **{Present("c", 10.0 + i): "c" for i in range(3)}}
    assert gives_way(most, {"c0"}) is many[1]
    assert gives_way(most, everybody | {"c"}) is many[0]
    assert gives_way({}, ()) is None


def test_sources_that_use_all_channels_keep_nobody_out(monkeypatch):
    """One session makes all channels of an identity used, and each of two sources has only half of them."""
    monkeypatch.setattr(tcp, "CHANNELS_PER_PEER_MAX", 2)
    channels = {Present(source, 10.0 * at + i): source for at, source in enumerate("abc") for i in range(at + 1)}
    assert gives_way(channels, {"a", "b", "c"}).heard_at == 20.0
    monkeypatch.setattr(tcp, "CHANNELS_PER_PEER_MAX", 3)
    assert gives_way(channels, {"a", "b", "c"}) is None
