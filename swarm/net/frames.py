"""Sealed frames, sans-IO: a peer's bytes in, plaintexts out; and this side's plaintexts in, bytes out.

    u32 length, ciphertext and tag

A frame is sealed with AES-256-GCM. Its key belongs to one direction of one channel and its nonce is the frame's
number, so a replayed, reordered, dropped or reflected frame fails. Its associated data is the length. Its plaintext is
a whole message, header and tensors, so session, epoch, step and tensor metadata are bound with the bytes that they
describe.
"""

import mmap
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from swarm.errors import FrameRejected
from swarm.protocol.tensors import TENSOR_BYTES_MAX

TAG_BYTES = 16
FRAME_BYTES_MAX = TENSOR_BYTES_MAX + 64 * 1024 + TAG_BYTES  # one message: header, tensors and tag
# Anonymous memory, which Windows has without flags.
LEAD_BYTES = 12  # before a large frame's length in memory, so that its ciphertext lies at a multiple of 16


class Sealer:
    """Seals, or opens, the frames of one direction in their order."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._number = 0

    def seal(self, parts: Sequence[bytes | memoryview]) -> bytes:
        """Return u32 length and ciphertext of the parts put together."""
        plaintext = b"".join(parts)
        size = len(plaintext) + TAG_BYTES
        assert size <= FRAME_BYTES_MAX
        length = size.to_bytes(4, "big")
        self._number += 1
        return length + self._aead.encrypt(self._number.to_bytes(12, "big"), plaintext, length)

    def open(self, length: bytes | memoryview, ciphertext: memoryview) -> bytearray | memoryview:
        """Return the plaintext of one ciphertext. Raises InvalidTag.

        A writable ciphertext is opened in place (OpenSSL's ciphers read where they write): large frames cost no copy.
        """
        size = len(ciphertext) - TAG_BYTES
        plaintext = bytearray(size) if ciphertext.readonly else ciphertext[:size]
        self._number += 1
        self._aead.decrypt_into(self._number.to_bytes(12, "big"), ciphertext, length, plaintext)
        return plaintext


class FrameReader:
    """The bytes of one peer in their order: first the greeting's, in the clear, then frames.

    Feed it, take whole frames until there is none, then let it `hold` the rest.
    """

    __slots__ = ("_data", "_due", "_opener", "_taken", "_unread", "begun", "bytes_max", "peer", "rest")

    def __init__(self, peer: str, bytes_max: int) -> None:
        """peer: named in errors. bytes_max: of a frame; more for a peer that has proven itself (`trust`)."""
        self.peer = peer
        self.bytes_max = bytes_max
        self.rest = 0  # bytes that are not taken
        self.begun: tuple[float, float] | None = None  # since when a frame is incomplete, by the caller's two clocks
        self._opener: Sealer | None = None
        self._data: bytes | memoryview = b""  # that came last,
        self._taken = 0  # and how much of it is taken
        self._unread = Unread()
        self._due = 0  # bytes of the incomplete frame, as far as its length is known

    def feed(self, data: bytes) -> None:
        """Add bytes as they arrive, in any pieces."""
        if self._unread.size:
            self._unread.add(data)
            self.rest = self._unread.size
        else:
            self._data, self._taken, self.rest = data, 0, len(data)

    def clear(self, size: int) -> bytes:
        """Return the next bytes of the greeting, at most `size`, and do not take them."""
        if self._unread.size:
            self._data, self._taken = self._unread.take(), 0
        return bytes(self._data[self._taken : self._taken + size])

    def skip(self, size: int) -> None:
        """Take bytes of the greeting."""
        self._taken += size
        self.rest -= size

    def open_with(self, opener: Sealer) -> None:
        """Read frames from here on."""
        self._opener = opener

    def trust(self, peer: str) -> None:
        """The peer has proven itself: it may send frames of any size."""
        self.peer, self.bytes_max = peer, FRAME_BYTES_MAX

    def next(self) -> bytearray | memoryview | None:
        """Take one frame and return its plaintext; None if no whole one is there. Raises FrameRejected."""
        assert self._opener is not None
        if self._unread.size:
            if self._unread.size < self._due:
                return None
            self._data, self._taken = self._unread.take(), 0
        data, start = self._data, self._taken + 4
        length = data[self._taken : start]
        size = int.from_bytes(length, "big")
        stop = start + size
        if len(length) < 4:
            self._due = 0
            return None
        if not TAG_BYTES < size <= self.bytes_max:
            raise FrameRejected(self.peer, f"it claims {size} bytes")
        if len(data) < stop:
            self._due = 4 + size
            return None
        ciphertext = memoryview(data)[start:stop]
        if start != 4:
            ciphertext = ciphertext.toreadonly()  # it is not aligned as tensors must be
        try:
            plaintext = self._opener.open(length, ciphertext)
        except InvalidTag:
            raise FrameRejected(self.peer, "it fails authentication") from None
        self._taken, self.rest, self._due = stop, len(data) - stop, 0
        if not self.rest:
            self._data, self._taken, self.begun = b"", 0, None
        return plaintext

    def hold(self, now: float, unread_s: float) -> None:
        """Keep the bytes that are not taken, once no more are taken for now. The two times are `begun`'s."""
        fresh = self._taken > 0 or self.begun is None
        if not self._unread.size:
            if rest := self._data[self._taken :]:
                self._unread.begin(self._due)
                self._unread.add(rest)
            self._data, self._taken = b"", 0
        if not self._unread.size:
            self.begun = None
        elif fresh:
            self.begun = now, unread_s

    def drop(self) -> None:
        """Keep nothing."""
        self._unread, self._data, self._taken, self.rest, self.begun = Unread(), b"", 0, 0, None


class Unread:
    """Bytes that wait for the rest of their frame. However many there are, they are copied once."""

    __slots__ = ("_pieces", "_whole", "size")

    def __init__(self) -> None:
        self.size = 0
        self._pieces: list[bytes | bytearray] = []
        self._whole: mmap.mmap | None = None

    def begin(self, n_bytes: int) -> None:
        """Say how long the frame is that comes now, while nothing is kept.

        A large one (512 KiB or more) gets memory of its own, in which it is opened, too. The system gives that page by
        page, as bytes arrive, so a claim costs nothing; and it takes it back as a whole, with no holes left.
        """
        if n_bytes >= 512 * 1024 and self.size == 0:
            behind = 256 * 1024  # the most that a carrier reads at once: the next frames' bytes
            try:
                private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
                self._whole = mmap.mmap(-1, LEAD_BYTES + n_bytes + behind, **private)
            except OSError:  # so much cannot even be claimed here: in pieces, then
                self._whole = None

    def add(self, data: bytes | memoryview) -> None:
        """Keep bytes that have arrived."""
        end = LEAD_BYTES + self.size
        self.size += len(data)
        if self._whole is not None:
            if end + len(data) <= len(self._whole):
                self._whole[end : end + len(data)] = data
                return
            self._pieces, self._whole = [self._whole[LEAD_BYTES:end]], None
        piece = 64 * 1024  # shorter ones are put together: a peer may send a byte at a time
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, bytearray) and len(last) + len(data) <= piece:
            last += data
        else:
            self._pieces.append(bytes(data) if len(data) >= piece else bytearray(data))

    def take(self) -> bytes | memoryview:
        """Return everything, and keep nothing. A memoryview is writable, and the caller's."""
        pieces, whole, size = self._pieces, self._whole, self.size
        self._pieces, self._whole, self.size = [], None, 0
        return memoryview(whole)[LEAD_BYTES : LEAD_BYTES + size] if whole is not None else b"".join(pieces)
