"""The blind relay: what one side sends the other receives, at the rate that is allowed, until one of them ends."""

import asyncio
import contextlib
import socket

import pytest

from swarm.loops import new_event_loop
from swarm.net.rate import TokenBucket
from swarm.net.splice import Meter, Splice
from tests.net.support import until

PLENTY = 1e9


class Pair:
    """Two ends that a splice joins."""

    def __init__(self, own=PLENTY, shared=PLENTY, silent_s=60.0, meter=None):
        self.meter, self.ended = meter or Meter(shared, shared), []
        self.splice = Splice(self.meter, TokenBucket(own, own), silent_s, lambda: self.ended.append(True))

    async def __aenter__(self):
        (left, first), (second, right) = socket.socketpair(), socket.socketpair()
        for sock in (left, first, second, right):
            sock.setblocking(False)
        await self.splice.join(first, second)
        self.left, self.right = [await asyncio.open_connection(sock=sock) for sock in (left, right)]
        return self

    async def __aexit__(self, *_):
        self.splice.end()
        for _, writer in (self.left, self.right):
            writer.close()
        await until(lambda: self.ended)


async def test_bytes_pass_both_ways_in_order():
    async with Pair() as pair:
        (reads_left, left), (reads_right, right) = pair.left, pair.right
        data = bytes(range(256)) * 4096
        left.write(data)
        right.write(data[::-1])
        assert await reads_right.readexactly(len(data)) == data
        assert await reads_left.readexactly(len(data)) == data[::-1]
        assert pair.splice.relayed_bytes == pair.meter.relayed_bytes == 2 * len(data)


@pytest.mark.parametrize("loop_factory", [new_event_loop, asyncio.SelectorEventLoop])
def test_bytes_that_come_before_both_are_joined_pass(loop_factory):
    async def early():
        pair = Pair()
        (left, first), (second, right) = socket.socketpair(), socket.socketpair()
        for sock in (left, first, second, right):
            sock.setblocking(False)
        left.sendall(b"to the right")
        right.sendall(b"to the left")
        await pair.splice.join(first, second)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(30):
            assert await loop.sock_recv(right, 100) == b"to the right"
            assert await loop.sock_recv(left, 100) == b"to the left"
        pair.splice.end()
        for sock in (left, right):
            sock.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(early())


async def test_the_last_bytes_arrive_before_the_end():
    async with Pair() as pair:
        (_, left), (reads_right, _) = pair.left, pair.right
        left.write(b"last words")
        left.close()
        assert await reads_right.read() == b"last words"
        assert pair.ended == [True]


@pytest.mark.parametrize("rates", [{"own": 200_000.0}, {"shared": 200_000.0}])
async def test_a_pair_is_read_no_faster_than_its_rate(rates):
    async with Pair(**rates) as pair:
        loop = asyncio.get_running_loop()
        (_, left), (reads_right, _) = pair.left, pair.right
        left.write(bytes(600_000))  # the first 200,000 are the burst
        began = loop.time()
        await reads_right.readexactly(600_000)
        left.write(b"x")
        await reads_right.readexactly(1)
        assert loop.time() - began > 0.8


async def test_pairs_that_have_ended_leave_no_debt_to_others():
    meter, loop = Meter(200_000.0, 200_000.0), asyncio.get_running_loop()
    async with Pair(meter=meter) as honest:
        async with contextlib.AsyncExitStack() as ending:
            for _ in range(8):
                pair = await ending.enter_async_context(Pair(meter=meter))
                pair.left[1].write(bytes(1_000_000))
            await until(lambda: meter.relayed_bytes > 1_000_000)
        began = loop.time()
        for _ in range(3):
            honest.left[1].write(b"x")
            assert await honest.right[0].readexactly(1) == b"x"
        assert loop.time() - began < 3


async def test_a_side_that_does_not_read_stops_the_other():
    async with Pair() as pair:
        (_, left), _ = pair.left, pair.right
        pair.right[0]._transport.pause_reading()
        for _ in range(200):
            left.write(bytes(65536))
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)
        assert pair.splice.relayed_bytes < 4 << 20
        assert left.transport.get_write_buffer_size() > 4 << 20
        left.transport.abort()


async def test_a_silent_pair_ends():
    async with Pair(silent_s=0.2) as pair:
        reads_left, left = pair.left
        left.write(b"x")
        assert await reads_left.read() == b""
        assert pair.ended == [True]


async def test_a_half_whose_peer_has_gone_ends_the_other():
    pair = Pair()
    (left, first), (second, right) = socket.socketpair(), socket.socketpair()
    right.close()
    for sock in (left, first, second):
        sock.setblocking(False)
    await pair.splice.join(first, second)
    assert await asyncio.get_running_loop().sock_recv(left, 1) == b""
    assert pair.ended == [True]
    left.close()


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("loop_factory", [new_event_loop, asyncio.SelectorEventLoop])
def test_a_pair_that_ends_while_it_joins_closes_both_sides(loop_factory, turns):
    async def ended_early():
        pair, loop = Pair(), asyncio.get_running_loop()
        (left, first), (second, right) = socket.socketpair(), socket.socketpair()
        for sock in (left, first, second, right):
            sock.setblocking(False)
        joining = asyncio.create_task(pair.splice.join(first, second))
        for _ in range(turns):
            await asyncio.sleep(0)
        pair.splice.end()
        async with asyncio.timeout(5):
            await joining
            assert [await loop.sock_recv(sock, 1) for sock in (left, right)] == [b"", b""]
        assert pair.ended == [True]
        for sock in (left, right):
            sock.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(ended_early())


@pytest.mark.parametrize("turns", range(1, 4))
@pytest.mark.parametrize("loop_factory", [new_event_loop, asyncio.SelectorEventLoop])
def test_a_pair_that_ended_and_is_cancelled_closes_both_sides(loop_factory, turns):
    async def cancelled():
        pair, loop = Pair(), asyncio.get_running_loop()
        (left, first), (second, right) = socket.socketpair(), socket.socketpair()
        for sock in (left, first, second, right):
            sock.setblocking(False)
        joining = asyncio.create_task(pair.splice.join(first, second))
        await asyncio.sleep(0)
        pair.splice.end()
        for _ in range(turns):
            await asyncio.sleep(0)
        joining.cancel()
        await asyncio.wait((joining,))
        async with asyncio.timeout(5):
            assert [await loop.sock_recv(sock, 1) for sock in (left, right)] == [b"", b""]
        for sock in (left, right):
            sock.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(cancelled())
