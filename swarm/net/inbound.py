"""The receiving half of a channel: the peer's bytes, behind the read gate, with a deadline for each frame. Sans-IO."""

from swarm.errors import FrameRejected
from swarm.net.flow import FlowControl
from swarm.net.frames import FrameReader
from swarm.net.gate import ReadGate


class Inbound:
    """The bytes of one peer and the gate that they pass. Its owner reads while the gate is open."""

    __slots__ = ("flow", "frames", "gate", "limits")

    def __init__(self, flow: FlowControl, frames: FrameReader, gate: ReadGate) -> None:
        self.flow, self.frames, self.gate = flow, frames, gate
        self.limits = flow.limits.frames

    def held_since(self, now: float) -> float:
        """Since when bytes wait for the rest of their frame, or to be read; `now` where none do."""
        begun = self.frames.begun
        return now if begun is None else begun[0]

    def hold(self, now: float) -> None:
        """Keep the bytes that are not taken, once no more are taken for now."""
        self.frames.hold(now, self.gate.closed_s(now))

    def end(self) -> None:
        """The channel has ended: keep no bytes, and owe nothing."""
        self.frames.drop()
        self.gate.end()

    def wake_at(self, now: float) -> float | None:
        """When the owner must look again: at the gate, or whether a frame is late."""
        left_s = self._left_s(now) if self.gate.is_open else None
        at = self.gate.wake_at
        if left_s is None:
            return at
        return now + left_s if at is None else min(at, now + left_s)

    def check(self, now: float) -> None:
        """Raise FrameRejected if the rest of a frame has had its time. It counts only while this side reads."""
        left_s = self._left_s(now) if self.gate.is_open else None
        if left_s is not None and left_s <= 1e-3:  # a timer may fire as much too early
            timeout_s = self.limits.timeout_s
            raise FrameRejected(self.frames.peer, f"its rest did not come within {timeout_s:.0f} s")

    def _left_s(self, now: float) -> float | None:
        if self.frames.begun is None:
            return None
        began_at, closed_s = self.frames.begun
        read_s = now - began_at - (self.gate.closed_s(now) - closed_s)
        return self.limits.timeout_s - read_s
