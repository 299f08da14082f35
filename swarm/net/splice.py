"""A blind relay: two connections joined, byte for byte. It sees sealed frames only, and counts and limits them."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import cast

from swarm.net.flow import SharedBudget
from swarm.net.rate import TokenBucket


class Meter:
    """The rate that all pairs of a relay share, in turn, and the bytes that it has relayed. Lives in the event loop."""

    def __init__(self, bytes_per_s: float, burst: float) -> None:
        self.relayed_bytes = 0
        self.shared = SharedBudget(bytes_per_s, burst)


class Splice:
    """One joined pair. It ends when one side does, is silent for too long, or does not take its bytes."""

    def __init__(self, meter: Meter, own: TokenBucket, silent_s: float, ended: Callable[[], None]) -> None:
        """own: the rate of this pair. ended: called once, when both connections are closed."""
        self.relayed_bytes = 0
        self._meter, self._own, self._silent_s, self._ended = meter, own, silent_s, ended
        self._sides = (_Side(self), _Side(self))
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self.over = False

    async def join(self, first: socket.socket, second: socket.socket) -> None:
        """Begin, unless the pair ends meanwhile. Raises OSError where a connection has gone; both are closed then."""
        one, other = self._sides
        one.other, other.other = other, one
        left = [first, second]
        try:
            for side in self._sides:  # each reads only once the other can write
                if not self.over:
                    await self._loop.connect_accepted_socket(partial(_same, side), left.pop(0))
        except BaseException:
            self.end()
            raise
        finally:
            for sock in left:
                sock.close()
        if self.over:
            return
        for side in self._sides:
            side.begin()
        self._look()

    def end(self) -> None:
        """Close both connections."""
        if self.over:
            return
        self.over = True
        if self._watch is not None:
            self._watch.cancel()
        for side in self._sides:
            self._meter.shared.leave(side)
            side.close()
        self._ended()

    def passes(self, side: "_Side", n_bytes: int) -> tuple[float, bool]:
        """Count bytes that pass. Returns the seconds until the pair's rate allows more, and whether that of all does.

        If it does not, `side.paid` is called once it does.
        """
        now = self._heard_at = self._loop.time()
        self.relayed_bytes += n_bytes
        self._meter.relayed_bytes += n_bytes
        return self._own.owe(now, n_bytes), self._meter.shared.pay(side, n_bytes, now)

    def _look(self) -> None:
        left_s = self._heard_at + self._silent_s - self._loop.time()
        if left_s <= 0:
            self.end()
        else:
            self._watch = self._loop.call_later(left_s + 1e-3, self._look)


def _same(side: "_Side") -> "_Side":
    return side


class _Side(asyncio.Protocol):
    """One connection of a pair. The other sends the bytes that it receives."""

    def __init__(self, splice: Splice) -> None:
        self.other: _Side
        self._splice = splice
        self._transport: asyncio.Transport | None = None
        self._waits = {"for the other side"}  # it is read while there is no reason to wait
        self._early = b""  # uvloop begins to read after `connection_made`, even if that has paused it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connected = cast(asyncio.Transport, transport)
        if self._splice.over:
            connected.abort()
            return
        self._transport = connected
        connected.set_write_buffer_limits(high=128 * 1024)
        connected.pause_reading()

    def begin(self) -> None:
        """Read, now that both sides are there."""
        early, self._early = self._early, b""
        self._waits.discard("for the other side")
        if early:
            self.data_received(early)
        self._go_on()

    def data_received(self, data: bytes) -> None:
        if self._transport is None:  # the pair is over
            return
        if self.other._transport is None:
            self._early += data
            self._transport.pause_reading()
            return
        self.other._transport.write(data)
        wait_s, is_paid = self._splice.passes(self, len(data))
        if wait_s > 0:
            self._wait("for the pair's rate")
            asyncio.get_running_loop().call_later(wait_s, self._go_on, "for the pair's rate")
        if not is_paid:
            self._wait("for all pairs' rate")

    def paid(self, shared: object) -> None:
        """Its bytes are within the rate of all pairs now."""
        del shared
        self._go_on("for all pairs' rate")

    def pause_writing(self) -> None:
        self.other._wait("for the reader")

    def resume_writing(self) -> None:
        self.other._go_on("for the reader")

    def _wait(self, reason: str) -> None:
        self._waits.add(reason)
        if self._transport is not None:
            self._transport.pause_reading()

    def _go_on(self, reason: str = "") -> None:
        """Read again, unless there is another reason to wait."""
        self._waits.discard(reason)
        if not self._waits and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self._splice.end()

    def close(self) -> None:
        """Send the waiting bytes, then end; abort if the peer does not take them."""
        transport = self._transport
        if transport is not None:
            transport.close()
            if transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(5.0, transport.abort)
