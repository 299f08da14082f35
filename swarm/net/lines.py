"""The sealed channels of one process to anchors, and the answers that come on them."""

import asyncio
from collections.abc import Callable

from swarm.activations import Activations
from swarm.errors import AnchorBusy, ChannelClosed, Unreachable
from swarm.net.address import Tcp, ViaAnchor
from swarm.net.channel import Channel
from swarm.net.dialer import Dial, Dialer
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.gate import IDLE, PROGRESS, Toll
from swarm.protocol.meeting import LOAD, AnchorLoad, Called, Calling, Meet, Moored, Uncalled
from swarm.protocol.messages import AnyMessage

Answer = AnchorLoad | Calling | Meet | Moored | Uncalled


class Lines:
    """One line to each anchor that this process uses, for its calls and its mooring. Lives in the event loop."""

    def __init__(self, me: Endpoint, dial: Dial | None = None) -> None:
        """dial: by TCP unless given."""
        self.on_called: Callable[[Channel, Called], None] | None = None
        self._dialer = Dialer(me, self._hear, dial)
        self._at: dict[Channel, ViaAnchor] = {}
        self._expected: dict[tuple[Channel, str], asyncio.Future[Answer]] = {}  # by the line, and a call or a token

    async def open(self, anchor: ViaAnchor) -> Channel:
        """Return the line to an anchor, opening it if need be; the caller calls `release` in the end.

        Raises NetworkError.
        """
        line = await self._dialer.connect(Remote(anchor.peer, anchor.channel_key), (anchor.at,))
        if line not in self._at:
            self._at[line] = anchor
            line.ended.add_done_callback(lambda _: self._lost(line))
        return line

    def release(self, line: Channel) -> None:
        """Tell that one user is done with a line."""
        self._dialer.release(line)

    def address_of(self, line: Channel) -> Tcp:
        """Return where a line's anchor is dialled."""
        return self._at[line].at

    def expect(self, line: Channel, name: str = "") -> "asyncio.Future[Answer]":
        """Return the next answer on a line about a call, about a token, LOAD, or "": about the mooring.

        Raises Unreachable if the anchor says no, ChannelClosed if the line ends.
        """
        future = self._expected.get((line, name))
        if future is None:
            future = self._expected[line, name] = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # may go unobserved
            if line.closed:
                self._lost(line)  # which forgets it
        return future

    def forget(self, line: Channel, name: str = "") -> None:
        """Wait for that answer no more."""
        if (future := self._expected.pop((line, name), None)) is not None:
            future.cancel()

    async def close(self) -> None:
        """End all lines."""
        await self._dialer.close()

    def _hear(self, line: Channel, message: AnyMessage, activations: Activations | None) -> Toll:
        del activations
        match message:
            case Called() if self.on_called is not None:
                self.on_called(line, message)
                return IDLE
            case Calling():
                return self._answer(line, message.call, message)
            case Meet():
                return self._answer(line, message.token, message)
            case Moored():
                return self._answer(line, "", message)
            case AnchorLoad():
                return self._answer(line, LOAD, message)
            case Uncalled():
                return self._answer(line, message.call, message)
        return IDLE

    def _answer(self, line: Channel, name: str, answer: Answer) -> Toll:
        future = self._expected.get((line, name))
        if future is None or future.done():
            return IDLE
        if isinstance(answer, Uncalled):
            retry_s = (answer.retry_after_ms or 0) / 1000
            why = answer.why + (f"; again in {retry_s:.1f} s" if retry_s else "")
            said = (line.peer, (str(self._at[line].at),), 0.0, f"as an anchor: {why}")
            future.set_exception(AnchorBusy(*said, retry_s) if answer.cause == "busy" else Unreachable(*said))
        else:
            future.set_result(answer)
        return PROGRESS

    def _lost(self, line: Channel) -> None:
        self._at.pop(line, None)
        for key in [key for key in self._expected if key[0] is line]:
            future = self._expected.pop(key)
            if not future.done():
                future.set_exception(ChannelClosed(line.peer, line.ended.result()))
