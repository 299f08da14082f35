"""The event loop of commands and clients."""

import asyncio
import signal
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
