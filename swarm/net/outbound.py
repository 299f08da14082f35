"""What leaves a channel: messages are encoded, sealed and written; those of one turn of the loop may share a frame."""

import asyncio
from collections.abc import Callable

from swarm.activations import Activations
from swarm.net.buffers import SendBuffer
from swarm.net.carrier import Carrier
from swarm.net.frames import Sealer
from swarm.protocol.bundles import Part, bundled, fits
from swarm.protocol.messages import Message, encode


class Outbound(SendBuffer):
    """The messages and bytes of one channel. Each method returns the bytes that have not left the carrier."""

    __slots__ = ("_soon", "bundles", "sealer")

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier)
        self.sealer: Sealer | None = None  # once both handshake messages have passed
        self.bundles = False  # whether the peer takes several steps in one frame
        self._soon: list[Part] = []  # they leave at the end of this turn of the loop

    def send(self, message: Message, activations: Activations | None, now: float) -> int:
        """Send at once, behind what waits."""
        if self._soon:
            self.flush(now)
        assert self.sealer is not None
        return self.write(self.sealer.seal(encode(message, activations)), now)

    def send_soon(self, message: Message, activations: Activations | None, flush: Callable[[], None]) -> bool:
        """Keep a message for the end of this turn, when `flush` is called. Returns False for one that goes at once."""
        if not self.bundles or not fits(message):
            return False
        if not self._soon:
            asyncio.get_running_loop().call_soon(flush)
        self._soon.append((message, activations))
        return True

    def flush(self, now: float) -> int:
        """Send what waits, in as few frames as possible."""
        soon, self._soon = self._soon, []
        unsent = 0
        for part in bundled(soon):
            unsent = self.send(*part, now)
        return unsent
