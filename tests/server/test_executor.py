"""What the compute thread delivers, and in which order."""

import asyncio

from swarm.server.executor import _tell


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
