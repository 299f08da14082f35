"""Bytes that channels hold for slow peers."""

from swarm.net.buffers import Buffers, SendBuffer

SMALL = 1000


class Held:
    """A channel that holds so much, for so long."""

    def __init__(self, size, since):
        self.size, self.since, self.cut = size, since, False

    def held(self):
        return self.size, self.since

    def cut_off(self, why):
        self.cut, self.size = True, 0


def test_the_oldest_holder_ends_when_too_much_is_held():
    """An honest peer's large frame does not, though it is the largest."""
    buffers = Buffers(10 * SMALL, SMALL)
    hoarders = [Held(2 * SMALL, float(i)) for i in range(4)]
    small = Held(SMALL, -100.0)
    honest = Held(6 * SMALL, 50.0)
    for channel in (small, *hoarders, honest):
        buffers.note(channel)
    assert [channel.cut for channel in hoarders] == [True, True, False, False]
    assert not honest.cut
    assert not small.cut
    assert buffers.total == 10 * SMALL


def test_bytes_that_were_read_meanwhile_count_no_more():
    buffers = Buffers(10 * SMALL, SMALL)
    channels = [Held(4 * SMALL, float(i)) for i in range(20)]
    for channel in channels:
        buffers.note(channel)
        channel.size = 0
    assert not any(channel.cut for channel in channels)


def test_a_channel_that_has_ended_holds_nothing():
    buffers, channel = Buffers(10 * SMALL, SMALL), Held(9 * SMALL, 0.0)
    buffers.note(channel)
    buffers.discard(channel)
    buffers.discard(channel)
    assert buffers.total == 0


class Carrier:
    """Takes bytes, and sends as many as it is told."""

    def __init__(self):
        self.unsent = 0

    def write(self, data):
        self.unsent += len(data)

    def unsent_bytes(self):
        return self.unsent


def test_a_send_buffer_is_as_old_as_its_oldest_bytes():
    carrier = Carrier()
    buffer = SendBuffer(carrier)
    assert buffer.write(bytes(100), 1.0) == 100
    carrier.unsent = 0
    assert buffer.since(5.0) == 5.0
    for now in (6.0, 7.0):
        buffer.write(bytes(100), now)
    assert (buffer.since(9.0), buffer.sent) == (6.0, 100)
    carrier.unsent = 50
    assert buffer.sent == 250
    assert buffer.since(9.0) == 9.0  # the bytes of 6.0 have left, and of the rest we know no better
