"""The event loop of commands and clients."""

import asyncio
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop, or asyncio's where uvloop is not installed, as on Windows.

    There it is the selector's and not Windows' default, which cannot wait for a socket by `add_reader`.
    """
    try:
        import uvloop  # noqa: PLC0415 - not on Windows
    except ImportError:
        return asyncio.SelectorEventLoop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def handle_signal(
    loop: asyncio.AbstractEventLoop, number: signal.Signals, then: Callable[[signal.Signals], None]
) -> None:
    """Let the loop call `then` at a signal.

    On Windows it does so when it next wakes up, as a web server's loop does ten times a second.
    """
    try:
        loop.add_signal_handler(number, then, number)
    except NotImplementedError:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(then, number))


class Doorbell:
    """Has a loop call what other threads hand it, in order.

    uvloop wakes up for an eventfd in half of the time that `call_soon_threadsafe` takes, which goes around the loop
    twice. Systems without one get that.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """loop: this thread's own, or one that does not run yet."""
        self._loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._ringing = threading.RLock()  # reentrant: finalizers ring anywhere
        self._closed = False
        if sys.platform == "linux":
            self._number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._end = weakref.finalize(self, os.close, self._number)
            loop.add_reader(self._number, self._answer)

    def ring(self, callback: Callable[[], object]) -> None:
        """Have the loop call this. Raises RuntimeError once the loop or the bell is closed."""
        with self._ringing:  # nobody writes to a descriptor that is closed meanwhile
            if self._closed or self._loop.is_closed():
                raise RuntimeError("the loop takes no calls any more")
            if sys.platform == "linux":
                self._calls.append(callback)
                os.eventfd_write(self._number, 1)
            else:
                self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """In the loop's thread: take no more calls."""
        with self._ringing:
            if not self._closed and sys.platform == "linux":
                self._loop.remove_reader(self._number)
                self._end()
            self._closed = True

    def _answer(self) -> None:
        if sys.platform == "linux":
            os.eventfd_read(self._number)
        for _ in range(len(self._calls)):
            callback = self._calls.popleft()
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - as the loop does with its callbacks
                self._loop.call_exception_handler({"message": "a call from another thread failed", "exception": error})
