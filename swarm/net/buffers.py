"""Bytes that channels hold for peers that send or read slowly, and the bound on all of them together."""

from typing import Protocol

from swarm.net.carrier import Carrier


class SendBuffer:
    """The bytes that were written to a carrier and have not left it, and since when."""

    __slots__ = ("_mark", "_since", "_written", "carrier")

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self._written = self._mark = 0
        self._since = 0.0

    def write(self, data: bytes, now: float) -> int:
        """Write to the carrier. Returns the bytes that have not left it."""
        self.carrier.write(data)
        self._written += len(data)
        unsent = self.carrier.unsent_bytes()
        if unsent == 0 or self._written - unsent >= self._mark:  # all that was there at the last mark has left
            self._mark, self._since = self._written, now
        return unsent

    @property
    def sent(self) -> int:
        """Bytes that have left it, in all."""
        return self._written - self.carrier.unsent_bytes()

    def since(self, now: float) -> float:
        """Since when some bytes wait, or later; `now` if none do."""
        unsent = self.carrier.unsent_bytes()
        if unsent == 0 or self._written - unsent >= self._mark:
            self._mark, self._since = self._written, now
        return self._since


class Holder(Protocol):
    """A channel, as seen from here."""

    def held(self) -> tuple[int, float]:
        """Return bytes of incomplete frames and those that the peer has not read, and since when, in loop time."""
        ...

    def cut_off(self, why: str) -> None:
        """End it at once, and let go of everything."""
        ...


class Buffers:
    """All channels of one side. When they hold too much together, the one that has held some for longest is cut off.

    Not the one that holds most: an honest peer's large message is soon over.
    """

    def __init__(self, held_bytes_max: int, small_bytes: int) -> None:
        """small_bytes: a channel that holds no more is not counted."""
        self._held_bytes_max, self._small_bytes = held_bytes_max, small_bytes
        self._held: dict[Holder, int] = {}  # of those that hold much, as they were last seen
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes that channels hold, as they were last seen."""
        return self._total

    def note(self, channel: Holder) -> None:
        """Count a channel's held bytes again, and cut off as many channels as must be. Called when it may hold more."""
        size, _ = channel.held()
        if size <= self._small_bytes:
            return
        self._total += size - self._held.get(channel, 0)
        self._held[channel] = size
        if self._total > self._held_bytes_max:
            self._relieve()

    def discard(self, channel: Holder) -> None:
        """Forget a channel: it holds nothing any more."""
        self._total -= self._held.pop(channel, 0)

    def _relieve(self) -> None:
        seen = {channel: channel.held() for channel in self._held}
        self._held = {channel: size for channel, (size, _) in seen.items() if size > self._small_bytes}
        self._total = sum(self._held.values())
        for channel in sorted(self._held, key=lambda channel: seen[channel][1]):
            if self._total <= self._held_bytes_max:
                return
            self.discard(channel)
            channel.cut_off("all channels together hold too much, and this one for the longest time")
