"""The event loop of commands and clients."""

import asyncio


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
