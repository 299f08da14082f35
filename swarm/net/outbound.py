"""What leaves a channel: messages are encoded, sealed and written; those of one turn of the loop may share a frame."""

import asyncio
from collections.abc import Callable

from swarm.activations import Activations
from swarm.net.buffers import SendBuffer
from swarm.net.carrier import Carrier
from swarm.net.frames import Sealer
from swarm.protocol.base import Message
from swarm.protocol.bundles import Part, bundled, fits
from swarm.protocol.codec import encode


class Outbound(SendBuffer):
    """The messages and bytes of one channel, on their way to its carrier."""

    __slots__ = ("_loop", "_note", "_small", "_soon", "bundles", "sealer")

    def __init__(self, carrier: Carrier, small: int, note: Callable[[], None]) -> None:
        """For the running loop. note: called after a write that leaves more than `small` bytes unsent."""
        super().__init__(carrier)
        self._loop = asyncio.get_running_loop()
        self._small, self._note = small, note
        self.sealer: Sealer | None = None  # once both handshake messages have passed
        self.bundles = False  # whether the peer takes several steps in one frame
        self._soon: list[Part] = []  # they leave at the end of this turn of the loop

    def send(self, message: Message, activations: Activations | None = None, *, soon: bool = False) -> None:
        """Send a message behind all earlier ones.

        soon: at the end of this turn of the loop, perhaps in one frame with others. So does one behind such a message.
        """
        if (soon or self._soon) and self.bundles and fits(message):
            if not self._soon:
                self._loop.call_soon(self._flush)
            self._soon.append((message, activations))
            return
        if self._soon:
            self._flush()
        self._seal(message, activations)

    def end(self) -> None:
        """The channel has ended: what waits is not sent."""
        self._soon.clear()

    def _flush(self) -> None:
        """Send what waits, in as few frames as possible."""
        soon, self._soon = self._soon, []
        for part in bundled(soon):
            self._seal(*part)

    def _seal(self, message: Message, activations: Activations | None) -> None:
        assert self.sealer is not None
        if self.write(self.sealer.seal(encode(message, activations)), self._loop.time()) > self._small:
            self._note()
