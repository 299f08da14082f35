"""What one session holds of the pools, and when it gives that back."""

import pytest

from swarm.protocol.messages import Open
from swarm.server.holdings import Holdings, Memory
from swarm.server.limits import MemoryLimits
from swarm.server.pool import Pool, Prices

NAMES = {"session": "0" * 32, "epoch": 0, "root": "a" * 64, "numeric_class": "x", "start": 0, "stop": 1}
LIMITS = MemoryLimits(input_bytes_max=900, window_bytes_max=900, output_bytes_max=900, window_use_bytes_min=50)


@pytest.fixture
def memory() -> Memory:
    return Memory.of(Pool(900), journal_bytes=900, limits=LIMITS)


def opened(memory: Memory, peer: str = "a", **changes: int) -> Holdings:
    request = Open(**{**NAMES, "positions_max": 1000, "rollback_max": 0, **changes})
    return Holdings(memory, request, peer, 1.0)


def test_a_rollbacks_cache_is_given_back_when_all_tasks_came_back(memory):
    holdings = opened(memory)
    assert holdings.step(1, 100, 10) is None
    assert holdings.step(1, 40, 10) is None
    assert (memory.cache.used, memory.inputs.used) == (100, 20)
    holdings.came_back(10, settled=True)
    assert (memory.cache.used, memory.inputs.used) == (100, 10)
    holdings.came_back(10, settled=True)
    assert (memory.cache.used, memory.inputs.used) == (40, 0)


def test_cache_of_a_past_that_is_not_whole_stays(memory):
    holdings = opened(memory)
    holdings.step(4, 100, 10)
    holdings.step(1, 40, 10)
    for _ in range(2):
        holdings.came_back(10, settled=False)
    assert memory.cache.used == 400


@pytest.mark.parametrize(
    ("rows", "positions", "n_bytes", "code", "comes_back"),
    [(1, 10, 801, "busy", True), (1, 801, 1, "no_room", False), (2, 301, 1, "no_room", True)],
)
def test_a_step_without_room_changes_nothing(memory, rows, positions, n_bytes, code, comes_back):
    other, holdings = opened(memory, "b"), opened(memory)
    other.step(1, 300, 1)
    declined = holdings.step(rows, positions, n_bytes)
    assert (declined.code, declined.retry_after_s is not None) == (code, comes_back)
    assert (memory.cache.used, memory.inputs.used) == (300, 1)


def test_an_ended_session_holds_what_the_compute_thread_has(memory):
    holdings = opened(memory)
    holdings.step(1, 100, 10)
    holdings.past(10, 100)
    assert holdings.answers(10)
    assert holdings.journal(10)
    holdings.end()
    assert (memory.cache.used, memory.inputs.used, memory.used) == (100, 10, 110)
    holdings.came_back(10, settled=True)
    assert memory.used == 0


def test_a_session_expects_what_it_was_opened_for_and_lacks(memory):
    holdings = opened(memory, batch=2, positions_soon=100)
    assert holdings.still_expected == 200
    holdings.step(2, 60, 1)
    assert holdings.still_expected == 80
    holdings.step(2, 200, 1)
    assert holdings.still_expected == 0


def test_a_window_is_kept_while_enough_of_its_past_comes(memory):
    holdings = opened(memory)
    assert holdings.past(30, 500) is None
    assert holdings.past(30, None) is None
    holdings.review_window()
    assert memory.windows.used == 500
    holdings.past(49, None)
    holdings.review_window()
    assert memory.windows.used == 0


def test_a_window_without_room_is_refused_for_a_time(memory):
    assert opened(memory, "b").past(1, 700) is None
    declined = opened(memory).past(1, 700)
    assert (declined.code, declined.retry_after_s) == ("busy", 1.0)


def test_answers_and_journals_have_their_own_pools(memory):
    holdings = opened(memory)
    assert holdings.answers(800)
    assert not holdings.answers(801)
    assert holdings.answers(0)
    assert holdings.journal(800)
    assert not holdings.journal(801)
    assert memory.used == 800


def test_prices_are_paid_in_pages_and_for_rows():
    memory = Memory.of(Pool(900), prices=Prices(slot_tokens=3, page=16))
    holdings = opened(memory)
    holdings.step(2, 17, 1)
    assert memory.cache.used == 2 * (3 + 32)
