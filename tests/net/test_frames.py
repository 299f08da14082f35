"""Sealed frames, without loop or carrier."""

import random

import psutil
import pytest

from swarm.errors import FrameRejected
from swarm.net.frames import FRAME_BYTES_MAX, TAG_BYTES, FrameReader, Sealer, Unread

KEY = b"k" * 32
LARGE = 512 * 1024  # from here on a frame gets memory of its own
AT_ONCE = 256 * 1024  # that a carrier reads


def reader(peer="a peer", bytes_max=FRAME_BYTES_MAX, key=KEY):
    frames = FrameReader(peer, bytes_max)
    frames.open_with(Sealer(key))
    return frames


def read(frames, *pieces):
    """The plaintexts of the frames that these pieces complete."""
    found = []
    for now, piece in enumerate(pieces):
        frames.feed(piece)
        while frames.rest and (plaintext := frames.next()) is not None:
            found.append(bytes(plaintext))
        frames.hold(float(now), 0.0)
    return found


def pieces(stream, size):
    return [stream[i : i + size] for i in range(0, len(stream), size)]


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_frames_arrive_in_any_pieces(size):
    sealer, texts = Sealer(KEY), [b"x" * n for n in (1, 0, 300, 5000)]
    stream = b"".join(sealer.seal([text[:2], text[2:]]) for text in texts if text)
    assert read(reader(), *pieces(stream, size)) == [text for text in texts if text]


@pytest.mark.parametrize("size", [1000, 1 << 16, 1 << 18])
def test_a_large_frame_is_opened_where_it_was_put_together(size):
    text = random.Random(1).randbytes(LARGE + 12345)
    sealer, frames = Sealer(KEY), reader()
    stream = sealer.seal([text]) + sealer.seal([b"next"])
    for piece in pieces(stream, size):
        frames.feed(piece)
        plaintext = frames.next()
        if plaintext is not None:
            break
        frames.hold(0.0, 0.0)
    assert isinstance(plaintext, memoryview)
    assert plaintext == text
    frames.hold(0.0, 0.0)
    rest = stream[len(stream) - 4 - len(b"next") - TAG_BYTES :]
    missing = rest[frames.rest :]
    assert (read(frames, missing) if missing else [bytes(frames.next())]) == [b"next"]


def test_a_frame_behind_a_large_one_gets_aligned_memory():
    """Its tensors are used where they lie, and only the first one of a buffer is aligned."""
    sealer, frames = Sealer(KEY), reader()
    stream = sealer.seal([bytes(LARGE)]) + sealer.seal([b"next"])
    frames.feed(stream[:1000])
    assert frames.next() is None
    frames.hold(0.0, 0.0)
    frames.feed(stream[1000:])
    assert isinstance(frames.next(), memoryview)
    behind = frames.next()
    assert isinstance(behind, bytearray)
    assert behind == b"next"


def test_a_flipped_bit_of_a_frame_is_rejected():
    frame = Sealer(KEY).seal([b"some text"])
    for position in range(4, len(frame)):
        flipped = bytearray(frame)
        flipped[position] ^= 1 << (position % 8)
        with pytest.raises(FrameRejected, match="authentication"):
            read(reader(), bytes(flipped))


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (1,)])
def test_a_frame_counts_once_and_in_order(order):
    sealer, frames = Sealer(KEY), reader()
    sealed = [sealer.seal([b"0"]), sealer.seal([b"1"])]
    with pytest.raises(FrameRejected):
        read(frames, *(sealed[i] for i in order))


def test_the_key_of_another_channel_opens_nothing():
    with pytest.raises(FrameRejected):
        read(reader(key=b"o" * 32), Sealer(KEY).seal([b"text"]))


@pytest.mark.parametrize("size", [0, TAG_BYTES, 1025, 1 << 31])
def test_a_claim_out_of_range_is_rejected_at_once(size):
    with pytest.raises(FrameRejected, match=f"a peer.*{size} bytes"):
        read(reader(bytes_max=1024), size.to_bytes(4, "big"))


def test_a_trusted_peer_may_send_large_frames():
    frames = reader(bytes_max=64)
    frames.trust("the peer")
    assert read(frames, Sealer(KEY).seal([bytes(1000)])) == [bytes(1000)]
    with pytest.raises(FrameRejected, match=r"the peer.*claims"):
        read(frames, b"\xff" * 4)


def test_since_when_a_frame_is_incomplete_is_known():
    sealer, frames = Sealer(KEY), reader()
    first, second = sealer.seal([bytes(100)]), sealer.seal([bytes(100)])

    def feed(piece, now, closed_s):
        frames.feed(piece)
        while frames.rest and frames.next() is not None:
            pass
        frames.hold(now, closed_s)
        return frames.begun

    assert feed(first[:2], 1.0, 0.0) == (1.0, 0.0)
    assert feed(first[2:50], 2.0, 0.5) == (1.0, 0.0)
    assert feed(first[50:] + second[:1], 3.0, 0.5) == (3.0, 0.5)  # another frame has begun
    assert feed(second[1:], 4.0, 0.5) is None
    assert frames.rest == 0


def test_bytes_that_are_not_taken_are_kept():
    sealer, frames = Sealer(KEY), reader()
    stream = b"".join(sealer.seal([bytes([i])]) for i in range(5))
    frames.feed(stream[:30])
    frames.hold(0.0, 0.0)
    frames.feed(stream[30:])
    frames.hold(1.0, 0.0)
    assert frames.rest == len(stream)
    assert [bytes(frames.next()) for _ in range(2)] == [b"\0", b"\1"]
    frames.hold(2.0, 0.0)
    assert read(frames, b"") == [b"\2", b"\3", b"\4"]


def test_the_greetings_bytes_are_read_in_the_clear():
    frames = FrameReader("a peer", 1024)
    frames.feed(b"abc")
    assert frames.clear(2) == b"ab"
    frames.skip(2)
    frames.hold(0.0, 0.0)
    frames.feed(b"def" + Sealer(KEY).seal([b"text"]))
    assert frames.clear(4) == b"cdef"
    frames.skip(4)
    frames.open_with(Sealer(KEY))
    assert bytes(frames.next()) == b"text"


def test_bytes_that_come_one_by_one_are_put_together():
    unread, size = Unread(), 64 * 1024 + 10
    before = psutil.Process().memory_info().rss
    for _ in range(size):
        unread.add(b"x")
    assert psutil.Process().memory_info().rss - before < 2 << 20  # kept apart they would take 5 MiB
    assert unread.size == size
    assert unread.take() == b"x" * size
    assert unread.size == 0


@pytest.mark.parametrize("behind", [0, 10, AT_ONCE, 3 * AT_ONCE])
def test_a_large_frame_has_memory_of_its_own(behind):
    whole, unread = random.Random(1).randbytes(LARGE + behind), Unread()
    unread.begin(LARGE)
    for piece in pieces(whole, 100_000):
        unread.add(piece)
    assert unread.size == len(whole)
    taken = unread.take()
    assert isinstance(taken, memoryview) == (behind <= AT_ONCE)
    assert taken == whole
    assert unread.size == 0
    unread.add(b"next")
    assert unread.take() == b"next"


def test_a_claim_of_a_large_frame_takes_no_memory():
    before = psutil.Process().memory_info().rss
    claims = [Unread() for _ in range(20)]
    for unread in claims:
        unread.begin(64 << 20)
        unread.add(b"x")
    assert psutil.Process().memory_info().rss - before < 8 << 20
