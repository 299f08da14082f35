"""Connections that have not said who they are. Of a full crowd the oldest of the source with most ends.

A full crowd that refused the next one would belong to the host that fills it.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any


class Crowd:
    """Tasks by the source of their connections. Lives in the event loop."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], str] = {}  # the oldest first

    def __len__(self) -> int:
        """How many there are."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        """Go through them, the oldest first."""
        return iter(list(self._tasks))

    def add(self, work: Coroutine[Any, Any, None], source: str, most: int) -> None:
        """Begin work on a connection from this source. most: of all; beyond it, the oldest of a source ends."""
        task = asyncio.create_task(work)
        self._tasks[task] = source
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        if len(self._tasks) > most:
            crowding = Counter(self._tasks.values()).most_common(1)[0][0]
            oldest = next(task for task, other in self._tasks.items() if other == crowding)
            del self._tasks[oldest]
            asyncio.get_running_loop().call_soon(oldest.cancel)  # once it has begun, so that it closes its connection
