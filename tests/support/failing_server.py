"""`swarm-serve` whose compute thread dies behind some decode steps: `python -m tests.support.failing_server`."""

import os
from collections.abc import Sequence
from typing import Any

from swarm.compute.scheduler import Scheduler
from swarm.server.cli import main

STEPS = "SWARM_TEST_STEPS"  # as many, and the thread has no more memory

_ran = Scheduler.ran
_left = int(os.environ[STEPS])


def ran(scheduler: Scheduler, batch: Any, *args: Any) -> Sequence[Any]:
    global _left  # noqa: PLW0603 - the process's
    _left -= sum(part.queue.single and part.task.tenure is not None for part in batch.parts)
    if _left < 0:
        raise MemoryError("no memory for the scheduler")
    return _ran(scheduler, batch, *args)


Scheduler.ran = ran

if __name__ == "__main__":
    main()
