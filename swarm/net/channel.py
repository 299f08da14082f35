"""A sealed channel: messages between two proven identities over any carrier of bytes.

It joins parts that do no input and output of their own, and are tested alone:

    greeting    the peer's first bytes -> its identity
    frames      bytes -> plaintexts, and back
    gate        how much a peer may have read, and when the channel goes on
    buffers     bytes that were sent and are not read
"""

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from swarm.activations import Activations
from swarm.errors import ChannelClosed, HandshakeFailed, InvalidMessage, NetworkError, SwarmError
from swarm.net.carrier import Carrier
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.flow import FlowControl
from swarm.net.frames import FrameReader
from swarm.net.gate import IDLE, PROGRESS, ReadGate, Toll
from swarm.net.greeting import Greeting, Proven
from swarm.net.inbound import Inbound
from swarm.net.outbound import Outbound
from swarm.net.pings import Pings
from swarm.net.timer import Timer
from swarm.protocol.base import Message
from swarm.protocol.bundles import unbundled
from swarm.protocol.codec import decode
from swarm.protocol.messages import AnyMessage, Ping, Pong

UNASKED = 0  # the nonce of a Pong that is a keepalive and answers nothing
_log = structlog.get_logger("swarm.net")

OnMessage = Callable[["Channel", AnyMessage, Activations | None], Toll]
"""Takes a channel's messages, one by one, in the loop, and returns the Toll of each. Must not block."""


def ignore(channel: "Channel", message: AnyMessage, activations: Activations | None) -> Toll:
    """Take a message where none is expected: an OnMessage."""
    del channel, message, activations
    return PROGRESS


class Channel:
    """One connection to one peer. Lives in the event loop."""

    def __init__(
        self,
        carrier: Carrier,
        me: Endpoint,
        on_message: OnMessage,
        remote: Remote | None = None,
        flow: FlowControl | None = None,
    ) -> None:
        """remote: the peer to reach, which makes this side the initiator; None waits for any peer.

        flow: shared by the channels of one side. `ready` is done when the peer has proven its identity, or raises
        the NetworkError that says why not; `ended` is done, with the reason, when the channel is over.
        """
        loop = asyncio.get_running_loop()
        self.peer = remote.peer if remote is not None else "an unproven peer"
        self.ready: asyncio.Future[Proven] = loop.create_future()
        self.ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # may end unobserved
        self.ended: asyncio.Future[str] = loop.create_future()
        self.closed = False
        self.heard_at = loop.time()  # when bytes last arrived
        self.unreachable = False  # it has ended because the network failed; the peer did nothing
        self._on_message = on_message
        flow = flow or FlowControl()
        frames = FrameReader(self.peer, flow.limits.frames.hello_bytes_max)
        self._in = Inbound(flow, frames, ReadGate(flow.limits, self._wake))
        self._out = Outbound(carrier, flow.limits.frames.held_bytes_small, partial(flow.buffers.note, self))
        self._pings = Pings(me.clock)
        self._timer = Timer(self._wake)
        self._greeting = Greeting(me, remote, frames)
        try:
            self._greet()
        except SwarmError as error:  # `ready` tells
            self.close(error)

    # Sending

    def send(self, message: Message, activations: Activations | None = None, *, soon: bool = False) -> None:
        """Seal and queue one message. Raises ChannelClosed when the channel has ended.

        soon: at the end of this turn of the loop, perhaps in one frame with others.
        """
        if self.closed:
            raise ChannelClosed(self.peer, self.ended.result())
        self._out.send(message, activations, soon=soon)

    async def ping(self) -> float:
        """Send a ping and wait for the answer, under the caller's deadline. Returns seconds. Raises ChannelClosed.

        Callers that ask while others wait for an answer get the same one.
        """
        return await self._pings.ask(self.send)

    @property
    def skips(self) -> bool:
        """Whether the peer takes steps without activations. Asked once it is proven."""
        return self.ready.result().skips

    @property
    def unsent_bytes(self) -> int:
        """Bytes that are queued and not yet on their way."""
        return 0 if self.closed else self._out.carrier.unsent_bytes()

    @property
    def sent_bytes(self) -> int:
        """Bytes that are on their way or have arrived, since the start."""
        return self._out.sent

    # State

    @property
    def carrier(self) -> Carrier:
        """What carries it."""
        return self._out.carrier

    @property
    def is_paused(self) -> bool:
        """Whether nothing is read now."""
        return not self._in.gate.is_open

    def held(self) -> tuple[int, float]:
        """Return the bytes that are not read, by this side or by the peer, and since when, in the loop's time."""
        now = self._timer.time()
        size = self._in.frames.rest + self._out.carrier.unsent_bytes()
        return size, min(self._out.since(now), self._in.held_since(now))

    def charge_idle(self, n_bytes: int) -> None:
        """Charge a message that moved no session forward, perhaps one that came on another channel.

        n_bytes: of its tensors.
        """
        now = self._timer.time()
        self._in.gate.charge_idle(n_bytes, self._in.flow.idle, now)
        if not self._in.gate.is_open:
            self._settle(now)

    def close(self, error: SwarmError | None = None) -> None:
        """End the channel in good order. error: why this side ends it, where something is wrong."""
        self._end("closed by this side" if error is None else str(error), error)
        self._out.carrier.close()

    def cut_off(self, why: str) -> None:
        """End the channel at once, with nothing more sent."""
        self._end(why, ChannelClosed(self.peer, why))
        self._out.carrier.abort()

    # Receiving: called by the carrier

    def receive(self, data: bytes) -> None:
        """Take bytes as they arrive, in any pieces."""
        if self.closed:
            return
        self.heard_at = now = self._timer.time()
        frames, gate = self._in.frames, self._in.gate
        frames.feed(data)
        self._read(now)
        gate.charge_read(len(data), self._in.flow.read, now)
        if frames.rest or not gate.is_open:
            self._settle(now)

    def lost(self, why: str, *, unreachable: bool = False) -> None:
        """The carrier has ended. unreachable: because the network failed."""
        self.unreachable = unreachable
        self._end(why)
        self._in.flow.buffers.discard(self)

    def _read(self, now: float) -> None:
        """Take the frames that are whole, while the gate is open."""
        frames, gate, turn = self._in.frames, self._in.gate, 0.0
        try:
            while frames.rest and gate.is_open and not self.closed:
                if not self._greeting.done:
                    if not self._greet():
                        break
                    continue
                plaintext = frames.next()
                if plaintext is None:
                    break
                turn += self._take(plaintext) + len(plaintext) / 65536
                if turn >= self._in.limits.turn:
                    gate.yield_turn(now)
        except SwarmError as error:
            self.close(error)

    def _take(self, plaintext: bytearray | memoryview) -> int:
        """Take the messages of one frame, and charge their tolls. Returns how many there are."""
        parts = unbundled(*decode(memoryview(plaintext)))
        for message, activations in parts:
            if self.closed:
                break
            if message.kind in ("hello", "ping", "pong"):  # a tenth of the time of isinstance
                toll = self._answer(message)
            else:
                toll = self._on_message(self, message, activations)
            if toll.free_bytes:
                self._in.gate.give_back(toll.free_bytes)
            if toll.idle:
                (toll.payer or self).charge_idle(0 if activations is None else activations.n_bytes)
        return len(parts)

    def _answer(self, message: AnyMessage) -> Toll:
        """Take a message that is the channel's own."""
        match message:
            case Ping():
                self.send(Pong(nonce=message.nonce))
                return IDLE
            case Pong() if self._pings.answer(message.nonce):
                return PROGRESS
            case Pong():
                # A keepalive is free from a peer that this side has dialled: a peer that connects gains nothing by it.
                free = self._greeting.remote is not None and message.nonce == UNASKED
                return PROGRESS if free and self._in.gate.is_free_keepalive(self._timer.time()) else IDLE
            case _:
                raise InvalidMessage("hello", "it comes once")

    def _greet(self) -> bool:
        """Go on with the greeting. Returns whether it is over."""
        try:
            proven = self._greeting.advance()
        finally:
            self._out.sealer = self._greeting.sealer
            if (outgoing := self._greeting.take_outgoing()) and not self.closed:
                self._out.write(outgoing, self._timer.time())
        if proven is not None:
            self.peer = proven.peer
            self._out.bundles = proven.bundles
            gate = self._in.gate
            gate.trust(self._in.flow.allowance(proven.peer, gate.allowance))
            self.ready.set_result(proven)
        return proven is not None

    def _settle(self, now: float) -> None:
        """Nothing more is read for now: keep the rest of the bytes, and look again in time."""
        if self.closed:
            return
        inbound = self._in
        inbound.hold(now)
        if inbound.frames.rest > inbound.limits.held_bytes_small:
            inbound.flow.buffers.note(self)
        if not inbound.gate.is_open:
            self._out.carrier.pause_reading()
        self._timer.arm(inbound.wake_at(now))

    def _wake(self) -> None:
        """Do all that is due: called by the timer, and when a shared budget has paid."""
        if self.closed:
            return
        now, inbound = self._timer.time(), self._in
        was_open = inbound.gate.is_open
        # Bytes that a peer does not read must not grow by keepalives, and those to all peers must stay cheap.
        due = inbound.gate.wake(now) and self._out.carrier.unsent_bytes() == 0
        if due and inbound.flow.keepalives.take(now) == 0:
            self.send(Pong(nonce=UNASKED))
        if inbound.gate.is_open and not was_open:
            self._out.carrier.resume_reading()
            self._read(now)
        try:
            inbound.check(now)
        except SwarmError as error:
            self.close(error)
        self._settle(now)

    # The end

    def _end(self, why: str, error: SwarmError | None = None) -> None:
        """Let go of everything. error: the reason, where it is no orderly end."""
        if self.closed:
            return
        self.closed = True
        if error is not None:
            _log.info("channel failed", peer=self.peer, why=why)
        if not self.ready.done():
            if error is None:
                hint = "it may have another network key, or a list of allowed peers that this side is not on"
                why_not = f"the connection ended: {why}" + (f"; {hint}" if self._greeting.remote is not None else "")
                error = HandshakeFailed(self.peer, why_not)
            self.ready.set_exception(
                error if isinstance(error, NetworkError) else HandshakeFailed(self.peer, str(error))
            )
        self.ended.set_result(why)
        self._in.end()
        self._out.end()
        self._timer.cancel()
        self._pings.end(ChannelClosed(self.peer, why))
