"""Happy eyeballs: several ways to one end, begun one after the other, and the first that works (RFC 8305)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from swarm.errors import NetworkError

Result = TypeVar("Result")


async def race(
    ways: Sequence[tuple[float, Callable[[], Awaitable[Result]]]], discard: Callable[[Result], None]
) -> Result:
    """Return the result of the first way that works. Raises the NetworkError of the last that failed.

    ways: each with the seconds after which it begins beside the one before; it begins at once when one has failed.
    discard: takes the result of one that was a moment too late.
    """
    running: list[asyncio.Task[Result]] = []  # in the order in which they began
    waiting, won = list(ways), list[Result]()
    try:
        while True:
            if waiting:
                running.append(asyncio.create_task(_run(waiting.pop(0)[1])))
            timeout_s = waiting[0][0] if waiting else None
            await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            done = [task for task in running if task.done()]
            running = [task for task in running if not task.done()]
            works = [task.result() for task in done if task.exception() is None]
            for result in works[1:]:
                discard(result)
            if works:
                won.append(works[0])
                return works[0]
            for task in done:
                error = task.exception()
                if not isinstance(error, NetworkError) or not (running or waiting):
                    raise error  # type: ignore[misc]
    finally:
        try:
            await end(running, discard)
        except asyncio.CancelledError:
            for result in won:
                discard(result)
            raise


async def end(tasks: Sequence[asyncio.Task[Any]], discard: Callable[[Any], None]) -> None:
    """Cancel tasks and wait for their end, which goes on where the caller is cancelled meanwhile.

    discard: takes the result of one that was a moment too late.
    """
    if tasks:
        await asyncio.shield(asyncio.create_task(_end(tasks, discard)))


async def _end(tasks: Sequence[asyncio.Task[Any]], discard: Callable[[Any], None]) -> None:
    for task in tasks:
        task.cancel()
    for late in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(late, BaseException):
            discard(late)


async def _run(way: Callable[[], Awaitable[Result]]) -> Result:
    return await way()
