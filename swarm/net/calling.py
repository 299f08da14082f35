"""The caller's side of a meeting: reach a hidden peer through an anchor at which it is moored (docs/reach.md)."""

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from swarm.errors import AnchorBusy, NetworkError, Unreachable
from swarm.limits import limit
from swarm.net.address import ViaAnchor, dialable
from swarm.net.anchor import Anchor
from swarm.net.carriers.tcp import dial_on
from swarm.net.channel import Channel, OnMessage
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.flow import FlowControl
from swarm.net.halves import TOKEN_BYTES, Half, Halves, open_half
from swarm.net.limits import DialerLimits
from swarm.net.lines import Lines
from swarm.net.punch import Failures, Here, PunchLimits, punch
from swarm.net.race import end
from swarm.protocol.meeting import Call, Calling, Meet

Result = TypeVar("Result")
_Join = Callable[[socket.socket, Here, Meet, Remote, OnMessage], Awaitable[Channel]]
_log = structlog.get_logger("swarm.net")


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How long a caller waits for each part of a meeting."""

    answer_s: float = limit(4.0, "s", "an anchor that has not answered a call by then is left")
    calls_max: int = limit(3, "calls", "to an anchor that is busy for a moment; then the next anchor is asked")
    again_s: float = limit(0.5, "s", "an anchor that is busy for longer is not called again")
    reverse_s: float = limit(1.5, "s", "for the hidden peer to dial this side, where that is possible")
    meet_s: float = limit(6.0, "s", "for the hidden peer to come to the anchor")
    punch: PunchLimits = field(default_factory=PunchLimits)


class Caller:
    """Makes one process's calls. Lives in the event loop."""

    def __init__(
        self,
        me: Endpoint,
        lines: Lines,
        halves: Halves | None = None,
        anchor: Anchor | None = None,
        flow: FlowControl | None = None,
        limits: CallLimits = CallLimits(),
    ) -> None:
        """halves, anchor: of this process, where it listens. flow: shared with its other channels."""
        self.port = 0  # at which this process can be dialled from outside, once that is known
        self.host = ""  # the same, for peers that are moored at this process itself
        self._me, self._lines, self._halves, self._anchor = me, lines, halves, anchor
        self._flow, self._limits, self._dialer_limits = flow or FlowControl(), limits, DialerLimits()
        self._failures = Failures(limits.punch)

    async def call(self, anchor: ViaAnchor, remote: Remote, on_message: OnMessage, *, relayed: bool = True) -> Channel:
        """Return a proven channel to a hidden peer: reverse, punched or, if it may be, relayed. Raises NetworkError."""
        if anchor.peer == self._me.identity.peer_id:
            return await self._summon(remote, on_message)
        line = await self._lines.open(anchor)
        try:
            channel = await self._through(line, anchor, remote, on_message, self._best if relayed else self._straight)
            _log.info("met a hidden peer", peer=remote.peer, way=channel.carrier.way, anchor=str(anchor.at))
            return channel
        except (OSError, ValueError) as error:
            raise Unreachable(remote.peer, (str(anchor),), 0.0, str(error)) from None
        finally:
            self._lines.release(line)

    async def _summon(self, remote: Remote, on_message: OnMessage) -> Channel:
        """Let a peer that is moored at this very process dial it."""
        if self._anchor is None or not self.port:
            raise Unreachable(remote.peer, (), 0.0, "it is moored at this process, which nobody can dial")
        with _Back(self._halves) as back:
            call = Call(call=secrets.token_hex(16), callee=remote.peer, port=self.port, back=back.token.hex())
            self._anchor.summon(self._me.identity.peer_id, call, self.host)
            sock = await back.come(self._limits.reverse_s, remote.peer, "it does not come")
        return await self._become(sock, "reverse", remote, on_message)

    async def _through(
        self, line: Channel, anchor: ViaAnchor, remote: Remote, on_message: OnMessage, join: _Join
    ) -> Channel:
        limits = self._limits
        with _Back(self._halves if self.port else None) as back:
            calling = await self._ask_again(line, remote.peer, back.token.hex())
            if self.port:
                try:
                    sock = await back.come(limits.reverse_s, remote.peer, "it does not dial back")
                    return await self._become(sock, "reverse", remote, on_message)
                except NetworkError as error:
                    _log.debug("not dialled back", peer=remote.peer, why=str(error))
        return await self._meet(line, anchor, calling, remote, on_message, join)

    async def _ask_again(self, line: Channel, callee: str, back: str) -> Calling:
        """Call at an anchor, and again where it says that it is busy for a moment. Raises NetworkError."""
        limits = self._limits
        for _ in range(limits.calls_max - 1):
            try:
                return await self._ask(line, callee, back)
            except AnchorBusy as busy:
                if not 0 < busy.retry_after_s <= limits.again_s:
                    raise
                await asyncio.sleep(busy.retry_after_s)
        return await self._ask(line, callee, back)

    async def _ask(self, line: Channel, callee: str, back: str) -> Calling:
        call = secrets.token_hex(16)
        answer = self._lines.expect(line, call)
        line.send(Call(call=call, callee=callee, port=self.port, back=back))
        try:
            calling = await _within(answer, self._limits.answer_s, line.peer, "the anchor does not answer a call")
        finally:
            self._lines.forget(line, call)
        assert isinstance(calling, Calling)
        return calling

    async def _meet(
        self, line: Channel, anchor: ViaAnchor, calling: Calling, remote: Remote, on_message: OnMessage, join: _Join
    ) -> Channel:
        met = self._lines.expect(line, calling.token)
        sock: socket.socket | None = None
        try:
            sock = await open_half(anchor.at, bytes.fromhex(calling.token), self._me.public)
            here = Here.of(sock)
            meet = await _within(met, self._limits.meet_s, remote.peer, f"it does not come to its anchor {anchor.at}")
            assert isinstance(meet, Meet)
            half, sock = sock, None
            return await join(half, here, meet, remote, on_message)
        finally:
            self._lines.forget(line, calling.token)
            if sock is not None:
                sock.close()

    async def _best(
        self, half: socket.socket, here: Here, meet: Meet, remote: Remote, on_message: OnMessage
    ) -> Channel:
        """Punch, while the handshake on the relayed connection runs as well. Returns the better channel that works."""
        hopeless = self._failures.has(remote.peer, asyncio.get_running_loop().time())
        relayed = asyncio.create_task(self._become(half, "relayed", remote, on_message))
        punching = asyncio.create_task(self._punch(here, meet))
        chosen: Channel | None = None
        sock: socket.socket | None = None

        def drop(late: Channel | socket.socket | None) -> None:
            if late is not None and late not in (chosen, sock):
                late.close()

        try:
            await self._wait_for(punching, relayed, meet.rtt_ms, hopeless=hopeless)
            if punching.done() and (sock := punching.result()) is not None:
                try:
                    chosen = await self._become(sock, "punched", remote, on_message)
                    self._failures.forget(remote.peer)
                    return chosen
                except NetworkError as error:
                    _log.debug("punched, and another peer is there", peer=remote.peer, why=str(error))
            punching.cancel()
            chosen = await relayed
            if not hopeless:
                self._failures.add(remote.peer, asyncio.get_running_loop().time())
            return chosen
        finally:
            try:
                await end((relayed, punching), drop)
            except asyncio.CancelledError:
                if chosen is not None:
                    chosen.close()
                raise

    async def _straight(
        self, half: socket.socket, here: Here, meet: Meet, remote: Remote, on_message: OnMessage
    ) -> Channel:
        """Punch, and use the joined halves for nothing but the routers' mappings."""
        try:
            sock = await self._punch(here, meet)
            if sock is None:
                raise Unreachable(remote.peer, (meet.peer,), self._limits.punch.most_s, "no punch succeeds")
            channel = await self._become(sock, "punched", remote, on_message)
            self._failures.forget(remote.peer)
            return channel
        finally:
            half.close()

    async def _wait_for(
        self,
        punching: "asyncio.Task[socket.socket | None]",
        relayed: "asyncio.Task[Channel]",
        rtt_ms: int,
        *,
        hopeless: bool,
    ) -> None:
        """Wait until the punch is over, or it has had its time and the relayed channel is there.

        hopeless: the punch has no time of its own.
        """
        loop, limits = asyncio.get_running_loop(), self._limits.punch
        began = loop.time()
        await asyncio.wait((punching, relayed), return_when=asyncio.FIRST_COMPLETED)
        if punching.done():
            return
        took_s, fails = loop.time() - began, relayed.exception() is not None
        patience_s = 0.0 if hopeless else max(limits.patience_s(rtt_ms), limits.times * took_s)
        await asyncio.wait((punching,), timeout=None if fails else max(0.0, patience_s - took_s))

    async def _punch(self, here: Here, meet: Meet) -> socket.socket | None:
        peers, locals_ = dialable((meet.peer,)), dialable((meet.local,))
        if not peers:
            return None
        return await punch(here, peers[0], locals_[0] if locals_ else None, self._me.public, self._limits.punch)

    async def _become(self, sock: socket.socket, way: str, remote: Remote, on_message: OnMessage) -> Channel:
        return await dial_on(sock, way, remote, self._me, on_message, self._flow, self._dialer_limits)


class _Back:
    """A token by which a hidden peer comes to this process's listener, for as long as it is awaited."""

    def __init__(self, halves: Halves | None) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._half: asyncio.Future[Half] = asyncio.get_running_loop().create_future()
        self._is_taken = False
        self._halves = halves

    def __enter__(self) -> "_Back":
        if self._halves is not None:
            self._halves.expect(self.token, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._halves is not None:
            self._halves.forget(self.token)
        if not self._half.cancel() and not self._is_taken:
            self._half.result().sock.close()

    async def come(self, timeout_s: float, peer: str, why: str) -> socket.socket:
        """Return the connection that the peer brings, which is the caller's to close. Raises Unreachable."""
        half = await _within(self._half, timeout_s, peer, why)
        self._is_taken = True
        return half.sock

    def _take(self, half: Half) -> None:
        if self._half.done():
            half.sock.close()
        else:
            self._half.set_result(half)


async def _within(future: "asyncio.Future[Result]", timeout_s: float, peer: str, why: str) -> Result:
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(future)
    except TimeoutError:
        raise Unreachable(peer, (), timeout_s, why) from None
