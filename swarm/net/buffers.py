"""What channels hold for peers that send or read slowly: a bound on all of it together."""

from typing import Protocol

HELD_BYTES_MAX = 128 * 2**20  # by all channels of one process
SMALL_BYTES = 256 * 1024  # a channel that holds less is no trouble


class Holder(Protocol):
    """A channel, as seen from here."""

    @property
    def held_bytes(self) -> int:
        """Bytes of a frame that is not complete, and bytes that the peer has not read."""
        ...

    @property
    def held_since(self) -> float:
        """Since when it holds some of them, in the loop's time."""
        ...

    def cut_off(self, why: str) -> None:
        """End it at once, and let go of everything."""
        ...


class Buffers:
    """All channels of one side. When they hold too much together, whoever has made them hold it longest is cut off.

    Not whoever makes them hold most: an honest peer's large message is soon over.
    """

    def __init__(self, held_bytes_max: int = HELD_BYTES_MAX) -> None:
        self._held_bytes_max = held_bytes_max
        self._channels: set[Holder] = set()

    def add(self, channel: Holder) -> None:
        """Count a channel from now on."""
        self._channels.add(channel)

    def discard(self, channel: Holder) -> None:
        """Count it no longer."""
        self._channels.discard(channel)

    def relieve(self) -> None:
        """Cut off as many as must be. To be called when a channel has come to hold more than SMALL_BYTES."""
        held = sum(channel.held_bytes for channel in self._channels)
        if held <= self._held_bytes_max:
            return
        for channel in sorted(self._channels, key=lambda channel: channel.held_since):
            if (size := channel.held_bytes) > SMALL_BYTES:
                channel.cut_off("all channels together hold too much, and this one for the longest time")
                held -= size
                if held <= self._held_bytes_max:
                    return
