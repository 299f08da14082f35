"""What channels hold for peers that send or read slowly: a bound on all of it together."""

from collections.abc import Callable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Protocol

HELD_BYTES_MAX = 80 * 2**20  # by all channels of one process
SMALL_BYTES = 256 * 1024  # a channel that holds less is no trouble
PIECE_BYTES = 64 * 1024  # what arrives in smaller ones is put together
LARGE_BYTES = 512 * 1024  # a frame from here on is put together where it will be whole
READ_BYTES = 256 * 1024  # the most that comes at once: a frame's end, and what is behind it
LEAD_BYTES = 12  # before a frame's length, so that what follows that lies at a multiple of 16


class Unread:
    """Bytes that wait for the rest of their frame. However much that is, it is copied once."""

    __slots__ = ("_pieces", "_size", "_whole")

    def __init__(self) -> None:
        self._pieces: list[bytes | bytearray] = []
        self._size = 0
        self._whole: mmap | None = None

    def __len__(self) -> int:
        return self._size

    def begin(self, n_bytes: int) -> None:
        """Say how long the frame is that comes now, while there is nothing yet.

        A large one gets memory of its own, in which it is opened, too. The system gives that page by page, as bytes
        arrive, so a claim costs nothing; and it takes it back as a whole, with no holes left among other things.
        """
        if n_bytes >= LARGE_BYTES and self._size == 0:
            try:
                self._whole = mmap(-1, LEAD_BYTES + n_bytes + READ_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS)
            except OSError:  # so much cannot even be claimed here: in pieces, then
                self._whole = None

    def add(self, data: bytes | memoryview) -> None:
        """Keep what has arrived."""
        end = LEAD_BYTES + self._size
        self._size += len(data)
        if self._whole is not None:
            if end + len(data) <= len(self._whole):
                self._whole[end : end + len(data)] = data
                return
            self._pieces, self._whole = [self._whole[LEAD_BYTES:end]], None
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, bytearray) and len(last) + len(data) <= PIECE_BYTES:
            last += data
        else:
            self._pieces.append(bytes(data) if len(data) >= PIECE_BYTES else bytearray(data))

    def take(self) -> bytes | memoryview:
        """Return everything, and keep nothing. What may be written to is the caller's."""
        pieces, whole, size = self._pieces, self._whole, self._size
        self._pieces, self._whole, self._size = [], None, 0
        return memoryview(whole)[LEAD_BYTES : LEAD_BYTES + size] if whole is not None else b"".join(pieces)


class Backlog:
    """What was written to a carrier and has not left it: since when, and whether it gets any shorter."""

    __slots__ = ("_mark", "_since", "_taken", "_unsent", "_written")

    def __init__(self, unsent: Callable[[], int]) -> None:
        """unsent: bytes that the carrier still has."""
        self._unsent = unsent
        self._written = self._mark = self._taken = 0
        self._since = 0.0

    def wrote(self, n_bytes: int, now: float) -> None:
        """Note what was written just now."""
        self._written += n_bytes
        self.since(now)

    @property
    def sent(self) -> int:
        """Bytes that have left it, in all."""
        return self._written - self._unsent()

    def since(self, now: float) -> float:
        """Since when some of it waits, or later; `now` if nothing does."""
        unsent = self._unsent()
        if unsent == 0 or self._written - unsent >= self._mark:  # all that was there at the last mark has left
            self._mark, self._since = self._written, now
        return self._since

    def moves(self) -> bool:
        """Whether some of it has left since this was last asked, or nothing had to."""
        unsent, before = self._unsent(), self._taken
        self._taken = self._written - unsent
        return unsent == 0 or self._taken > before


class Holder(Protocol):
    """A channel, as seen from here."""

    @property
    def held_bytes(self) -> int:
        """Bytes of frames that are not read, and bytes that the peer has not read."""
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
        self._held: dict[Holder, int] = {}  # of those that hold much, as they were last seen
        self._total = 0

    def note(self, channel: Holder) -> None:
        """See what a channel holds, and cut off as many as must be. To be called when it may be more than before."""
        size = channel.held_bytes
        if size <= SMALL_BYTES:
            return
        self._total += size - self._held.get(channel, 0)
        self._held[channel] = size
        if self._total > self._held_bytes_max:
            self._relieve()

    def discard(self, channel: Holder) -> None:
        """Forget a channel: it holds nothing any more."""
        self._total -= self._held.pop(channel, 0)

    def _relieve(self) -> None:
        self._held = {channel: size for channel in self._held if (size := channel.held_bytes) > SMALL_BYTES}
        self._total = sum(self._held.values())
        for channel in sorted(self._held, key=lambda channel: channel.held_since):
            if self._total <= self._held_bytes_max:
                return
            self.discard(channel)
            channel.cut_off("all channels together hold too much, and this one for the longest time")
