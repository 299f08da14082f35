"""A channel's move from one carrier to a better one, at one end, sans-IO (docs/reach.md).

Each end's bytes are one stream. Its first bytes travel by the old carrier and the rest by the new one, behind a mark
that says how many came before:

    old carrier    ... bytes until the sender's position
    new carrier    mark: u64 position, HMAC of it; then the bytes behind that position

The end that has dialled moves first. The other one moves once it has read the old carrier to the position of the first
one's mark. So when the first end has read to the second one's position, no byte is on its way by the old carrier, and
it may end.

The mark is sent in the clear, as TCP's own numbers are. Its HMAC has a key that only the two ends of the channel have,
and every byte behind it belongs to a frame whose number the channel's cipher checks.
"""

import hashlib
import hmac
from typing import Literal

from swarm.errors import FrameRejected

Fate = Literal["stays", "goes on", "ends"]
"""Of the channel when a carrier is lost: it stays on the old carrier, goes on by the new one, or ends."""


class MoveSecrets:
    """What only the two ends of a channel can say about its move to the connection of a fresh channel of theirs."""

    def __init__(self, old: bytes, fresh: bytes) -> None:
        """old, fresh: the exporter secrets of the channel that moves, and of the one whose connection it takes."""
        self._old, self._fresh = old, fresh

    @staticmethod
    def name(old: bytes) -> str:
        """Return the name of a channel, 64 hex digits, that nobody else can guess."""
        return hmac.digest(old, b"name", hashlib.sha256).hex()

    def proof(self, *, first: bool) -> str:
        """Return the proof of one end, 64 hex digits. first: of the end that has dialled."""
        return self._say(b"proof", first).hex()

    def mark(self, position: int, *, first: bool) -> bytes:
        """Return the mark of one end: how many of its bytes travel by the old carrier."""
        number = position.to_bytes(8, "big")
        return number + self._say(b"mark" + number, first)

    def position(self, mark: bytes, *, first: bool) -> int | None:
        """Read the mark of one end. None: it is no such mark."""
        position = int.from_bytes(mark[:8], "big")
        return position if hmac.compare_digest(mark, self.mark(position, first=first)) else None

    def _say(self, word: bytes, first: bool) -> bytes:
        return hmac.digest(self._old, word + (b" first " if first else b" second ") + self._fresh, hashlib.sha256)


class Transfer:
    """One end of a move. Its owner carries the bytes, and hands up what `take_old` and `take_new` return."""

    def __init__(self, secrets: MoveSecrets, received: int, *, first: bool, peer: str) -> None:
        """received: bytes of the peer that have come by the old carrier. first: this end has dialled."""
        self.departed = False  # this end's bytes travel by the new carrier
        self._secrets, self._received, self._first, self._peer = secrets, received, first, peer
        self._position: int | None = None  # where the peer's bytes leave the old carrier, once its mark is there
        self._early = b""  # of the new carrier: the mark, or bytes behind the position

    @property
    def arrived(self) -> bool:
        """Whether the peer's bytes come by the new carrier."""
        return self._position == self._received

    @property
    def over(self) -> bool:
        """Whether both directions have moved, as this end sees it."""
        return self.departed and self.arrived

    @property
    def is_free(self) -> bool:
        """Whether this end may end the old carrier: no byte is on its way there."""
        return self._first and self.over

    @property
    def must_depart(self) -> bool:
        """Whether it is this end's turn to move."""
        return not self.departed and (self._first or self.arrived)

    @property
    def wants_new(self) -> bool:
        """Whether the new carrier is read: until its mark has come, and then behind the position."""
        return self._position is None or self.arrived

    def depart(self, sent: int) -> bytes:
        """Move: the owner writes the returned mark to the new carrier, and everything behind it.

        sent: bytes that were written to the old carrier.
        """
        assert self.must_depart
        self.departed = True
        return self._secrets.mark(sent, first=self._first)

    def take_old(self, data: bytes) -> bytes:
        """Take bytes of the old carrier; returns those that follow in the peer's stream. Raises FrameRejected."""
        self._received += len(data)
        self._check()
        return data + self._take_early()

    def take_new(self, data: bytes) -> bytes:
        """Take bytes of the new carrier; returns those that follow in the peer's stream. Raises FrameRejected."""
        self._early += data
        size = 8 + hashlib.sha256().digest_size
        if self._position is None:
            if len(self._early) < size:
                return b""
            self._position = self._secrets.position(self._early[:size], first=not self._first)
            if self._position is None:
                raise FrameRejected(self._peer, "its new connection begins with no mark of this channel")
            self._early = self._early[size:]
            self._check()
        return self._take_early()

    def lost(self, *, old: bool) -> Fate:
        """Return what the loss of one carrier means."""
        if old:
            return "goes on" if self.over else "ends"
        return "ends" if self.departed or self._position is not None else "stays"

    def _take_early(self) -> bytes:
        if not self.arrived:
            return b""
        early, self._early = self._early, b""
        return early

    def _check(self) -> None:
        if self._position is not None and self._received > self._position:
            raise FrameRejected(self._peer, "it has sent more by its old connection than it says")
