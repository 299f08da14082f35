"""What the compute thread delivers, and in which order."""

import asyncio
from queue import SimpleQueue

import pytest

from swarm.server.batch import Company
from swarm.server.executor import _Item, _Iterations, _tell


async def test_a_sessions_results_come_in_order_however_they_were_batched():
    """Two iterations are over before the loop gets to either; the session is not the first in the first of them."""
    loop, heard = asyncio.get_running_loop(), list[str]()
    loop.call_soon(_tell, [(heard.append, "other, 1"), (heard.append, "session, 3")])
    loop.call_soon(_tell, [(heard.append, "session, 4")])
    await asyncio.sleep(0)
    assert heard == ["other, 1", "session, 3", "session, 4"]


async def test_a_result_that_is_not_taken_keeps_no_other_from_being_delivered():
    loop, heard, told = asyncio.get_running_loop(), list[str](), list[Exception]()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))

    def breaks(_: object) -> None:
        raise ValueError

    _tell([(breaks, "one"), (heard.append, "another")])
    assert heard == ["another"]
    assert [type(error) for error in told] == [ValueError]


def test_who_comes_while_others_run_is_back_when_it_asked_and_not_when_it_was_seen(monkeypatch: pytest.MonkeyPatch):
    """Else a group that waits for another's iteration seems to be away for so long, and is never waited for."""
    seen: list[float] = []
    monkeypatch.setattr(Company, "arrived", lambda _, __, now: seen.append(now))
    jobs: SimpleQueue[_Item | None] = SimpleQueue()
    jobs.put(_Item(lambda: None, lambda _: None, 12.5))
    assert _Iterations(jobs).wait()
    assert seen == [12.5]
