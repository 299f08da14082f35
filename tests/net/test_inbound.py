"""The deadline of a frame, by times that are passed in."""

import pytest

from swarm.errors import FrameRejected
from swarm.net.flow import FlowControl
from swarm.net.frames import FRAME_BYTES_MAX, FrameReader, Sealer
from swarm.net.gate import ReadGate
from swarm.net.inbound import Inbound
from swarm.net.limits import ChannelLimits, FrameLimits

KEY = b"k" * 32
TIMEOUT_S = 30.0
FRAME = Sealer(KEY).seal([bytes(100)])


def inbound():
    flow = FlowControl(ChannelLimits(FrameLimits(timeout_s=TIMEOUT_S)))
    frames = FrameReader("a peer", FRAME_BYTES_MAX)
    frames.open_with(Sealer(KEY))
    return Inbound(flow, frames, ReadGate(flow.limits, lambda: None))


def arrives(mine, data, now):
    mine.frames.feed(data)
    while mine.frames.rest and mine.frames.next() is not None:
        pass
    mine.hold(now)


def test_a_frame_must_be_complete_in_time():
    mine = inbound()
    arrives(mine, FRAME[:40], 1.0)
    assert mine.wake_at(1.0) == 31.0
    arrives(mine, FRAME[40:41], 20.0)  # a byte now and then makes no difference
    assert mine.wake_at(20.0) == 31.0
    mine.check(30.9)
    with pytest.raises(FrameRejected, match=r"a peer.*did not come within 30 s"):
        mine.check(31.0)


def test_a_complete_frame_has_no_deadline():
    mine = inbound()
    arrives(mine, FRAME[:40], 1.0)
    arrives(mine, FRAME[40:], 20.0)
    assert mine.wake_at(20.0) is None
    mine.check(1000.0)


def test_only_time_in_which_this_side_reads_counts():
    """Else a peer that waits for its turn is taken for one that does not send the rest."""
    mine, now = inbound(), 0.0
    arrives(mine, FRAME[:40], now)
    for _ in range(20):
        mine.gate.yield_turn(now)
        assert mine.wake_at(now) == now  # for the gate, and not for the frame
        mine.check(now + 4.0)
        mine.gate.wake(now + 4.0)
        now += 5.0
        mine.check(now)
    assert mine.wake_at(now) == pytest.approx(now + TIMEOUT_S - 20.0)
    mine.gate.yield_turn(now)
    mine.check(now + 100.0)
    mine.gate.wake(now + 100.0)
    with pytest.raises(FrameRejected):
        mine.check(now + 110.0)


def test_since_when_bytes_are_held_is_the_loops_time():
    mine = inbound()
    assert mine.held_since(5.0) == 5.0
    mine.gate.yield_turn(1.0)
    arrives(mine, FRAME[:40], 2.0)
    assert mine.held_since(9.0) == 2.0
    mine.end()
    assert (mine.held_since(9.0), mine.frames.rest) == (9.0, 0)
