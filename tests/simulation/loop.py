"""An event loop whose time is virtual: when nothing is ready, it jumps to the next timer. No sockets, no threads."""

import asyncio
import selectors


class NothingLeft(Exception):
    """Everything waits and nothing will ever happen: in the real world this would be a hang."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order in which they are due. The same callbacks run in the same order every time."""

    def __init__(self, horizon_s: float) -> None:
        """horizon_s: virtual seconds after which `Overdue` is raised out of the loop."""
        super().__init__()
        self.now_s = 0.0
        self.horizon_s = horizon_s
        self._selector = self
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self.now_s

    # What BaseEventLoop asks of a selector, and of its platform

    def select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait, which takes no time at all."""
        if timeout is None:
            raise NothingLeft(f"nothing is left to happen at {self.now_s:.3f} s")
        if timeout > 0:
            self.now_s += timeout
            if self.now_s > self.horizon_s:
                raise Overdue(f"still running after {self.horizon_s:.0f} s")
        return []

    def _process_events(self, event_list: list[tuple[selectors.SelectorKey, int]]) -> None:
        del event_list

    def _write_to_self(self) -> None:
        raise AssertionError("there are no threads here")


class Overdue(Exception):
    """The virtual clock has passed the horizon: a hang."""
