"""A carrier of a relayed channel, which may go on over a better connection (docs/reach.md).

The channel above does not notice: its frames go on with their next numbers.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from swarm.errors import FrameRejected
from swarm.limits import limit
from swarm.net.carriers.connection import TcpCarrier, close
from swarm.net.channel import Channel
from swarm.net.transfer import MoveSecrets, Transfer

_log = structlog.get_logger("swarm.net")


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """How long a channel may take to change its carrier. Meanwhile it has two connections."""

    begin_s: float = limit(8.0, "s", "a connection by which the other side has not begun to move by then ends")
    move_s: float = limit(60.0, "s", "for the bytes that are under way by the old connection; then the channel ends")


class MovableCarrier(TcpCarrier):
    """Carries one channel over one connection, and then over another one."""

    def __init__(
        self, make_channel: Callable[[TcpCarrier], Channel], way: str, limits: MoveLimits = MoveLimits()
    ) -> None:
        def make(carrier: TcpCarrier) -> Channel:
            self.write = self._count
            return make_channel(carrier)

        super().__init__(make, way)
        self._limits = limits
        self._sent = self._received = 0  # bytes by the old connection, also of a move that is given up
        self._move: _Move | None = None  # while there are two connections
        self._is_paused = False

    def data_received(self, data: bytes) -> None:
        """Hand bytes to the channel: those of the old connection, or, after the move, of the new one."""
        self._received += len(data)
        if self._move is None:
            super().data_received(data)
        else:
            self._take(self._move, data, old=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """The old connection is lost, or, after the move, the new one."""
        move = self._move
        if move is not None and move.transfer.lost(old=True) == "goes on":
            self._finish(move)
            return
        if move is not None:
            self._drop(move)
        super().connection_lost(exc)

    # The move

    @property
    def can_move(self) -> bool:
        """Whether its channel may go on over a better connection now."""
        free = self.way == "relayed" and self._move is None
        return free and self._transport is not None and not self._transport.is_closing()

    def move(self, fresh: TcpCarrier, secrets: MoveSecrets, *, first: bool) -> None:
        """Go on over the connection of a fresh channel with the same peer, which ends that channel.

        first: this end has dialled. Neither end has sent anything on the fresh channel since both agreed.
        """
        assert self.can_move
        assert self.channel is not None
        transfer = Transfer(secrets, self._received, first=first, peer=self.channel.peer)
        self._move = move = _Move(self, transfer, fresh)
        move.arm(self._limits.begin_s, self._late)
        self._go_on(move)

    def take_new(self, move: "_Move", data: bytes) -> None:
        """Take bytes of the new connection, while there are two."""
        if self._move is move:
            self._take(move, data, old=False)

    def lost_new(self, move: "_Move", exc: Exception | None) -> None:
        """The new connection is lost, while there are two."""
        if self._move is not move:
            return
        self._drop(move)
        if move.transfer.lost(old=False) == "ends":
            assert self._transport is not None
            self._transport.set_protocol(asyncio.Protocol())
            self._transport.abort()
            super().connection_lost(exc)

    def _take(self, move: "_Move", data: bytes, *, old: bool) -> None:
        assert self.channel is not None
        try:
            following = move.transfer.take_old(data) if old else move.transfer.take_new(data)
        except FrameRejected as error:
            self._fail(move, str(error))
            return
        if following:
            self.channel.receive(following)
        if self._move is move and not self.channel.closed:
            self._go_on(move)

    def _go_on(self, move: "_Move") -> None:
        """Do all that is due."""
        assert self._transport is not None
        if move.transfer.must_depart:
            move.transport.write(move.transfer.depart(self._sent))
            self.way, self.host, self.write = move.way, move.host, move.transport.write
            self.unsent_bytes = partial(_unsent, self._transport, move.transport)
            move.arm(self._limits.move_s, self._late)
        if move.transfer.is_free:
            self._finish(move)
        else:
            self._read(move)

    def _finish(self, move: "_Move") -> None:
        """Both directions have moved: the old connection is not needed any more."""
        assert self._transport is not None
        old, self._transport, self._move = self._transport, move.transport, None
        move.timer.cancel()
        old.set_protocol(asyncio.Protocol())
        close(old)
        self._transport.set_protocol(self)
        self.unsent_bytes = self._transport.get_write_buffer_size
        _let(self._transport, reads=not self._is_paused)
        if self.channel is not None:
            _log.info("a channel has moved", peer=self.channel.peer, way=self.way)

    def _fail(self, move: "_Move", why: str) -> None:
        """The other side does not move as it must."""
        assert self.channel is not None
        if move.transfer.lost(old=False) == "stays":
            self._drop(move)
        else:
            self.channel.cut_off(why)

    def _drop(self, move: "_Move") -> None:
        """End the new connection: the channel stays, or its owner ends it."""
        self._move = None
        move.timer.cancel()
        move.transport.set_protocol(asyncio.Protocol())
        move.transport.abort()

    def _late(self, move: "_Move") -> None:
        if move.transfer.over:  # the other side leaves the old connection open
            self._finish(move)
        else:
            self._fail(move, "it does not move to its new connection")

    # Carrier

    def _count(self, data: bytes, /) -> None:
        assert self._transport is not None
        self._sent += len(data)
        self._transport.write(data)

    def close(self) -> None:
        """As `Carrier.close`."""
        if self._move is not None:
            close(self._move.transport)
        super().close()

    def abort(self) -> None:
        """As `Carrier.abort`."""
        if self._move is not None:
            self._move.transport.abort()
        super().abort()

    def pause_reading(self) -> None:
        """As `Carrier.pause_reading`."""
        self._is_paused = True
        super().pause_reading()
        if self._move is not None:
            self._read(self._move)

    def resume_reading(self) -> None:
        """As `Carrier.resume_reading`."""
        self._is_paused = False
        super().resume_reading()
        if self._move is not None:
            self._read(self._move)

    def _read(self, move: "_Move") -> None:
        """Read the new connection, or let it wait."""
        _let(move.transport, reads=move.transfer.wants_new and not (self._is_paused and move.transfer.arrived))


class _Move(asyncio.Protocol):
    """The new connection of a move, and its decisions."""

    def __init__(self, carrier: MovableCarrier, transfer: Transfer, fresh: TcpCarrier) -> None:
        self.transfer, self.way, self.host = transfer, fresh.way, fresh.host
        self._carrier = carrier
        self._loop = asyncio.get_running_loop()
        self.timer: asyncio.Handle = self._loop.call_soon(_nothing)
        self.transport = fresh.give(self)

    def arm(self, seconds: float, late: "Callable[[_Move], None]") -> None:
        """Call `late` after so long, and no other time."""
        self.timer.cancel()
        self.timer = self._loop.call_later(seconds, late, self)

    def data_received(self, data: bytes) -> None:
        self._carrier.take_new(self, data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._carrier.lost_new(self, exc)


def carrier_of(make_channel: Callable[[TcpCarrier], Channel], way: str) -> TcpCarrier:
    """Return the carrier of a connection that has come about in this way."""
    return (MovableCarrier if way == "relayed" else TcpCarrier)(make_channel, way)


def _unsent(*transports: asyncio.Transport) -> int:
    return sum(transport.get_write_buffer_size() for transport in transports)


def _let(transport: asyncio.Transport, *, reads: bool) -> None:
    if not transport.is_closing():
        (transport.resume_reading if reads else transport.pause_reading)()


def _nothing() -> None:
    """Stand for a timer that is not armed."""
