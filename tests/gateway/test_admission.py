"""Admission decides by fair turns, bounded queues and what was computed; slots are held until a stream has ended."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.gateway.admission import Admission, AdmissionLimits, Refusal, Slots, TenantLimits, Ticket
from swarm.gateway.api.problems import Rejected

NONE = TenantLimits()


def admission(**limits):
    return Admission(AdmissionLimits(**limits))


def ask(line, tenant, limits=NONE, now=0.0):
    return line.ask(tenant, limits, now)


def test_requests_run_until_all_slots_are_held():
    line = admission(running_max=2)
    assert [ask(line, "ada").is_running for _ in range(3)] == [True, True, False]
    assert (line.running, line.waiting) == (2, 1)


def test_free_slot_goes_to_the_tenant_that_runs_least():
    line = admission(running_max=2)
    first = [ask(line, "ada") for _ in range(6)]
    bob = ask(line, "bob")
    assert line.end(first[0]) == [bob]
    assert line.end(first[1]) == [first[2]]


def test_turns_alternate_among_equal_tenants():
    line = admission(running_max=1)
    running, order = ask(line, "cyd"), []
    for tenant in ("ada", "ada", "ada", "bob", "bob", "bob"):
        ask(line, tenant)
    for _ in range(6):
        (running,) = line.end(running)
        order.append(running.tenant)
    assert order == ["ada", "bob"] * 3


def test_tenant_at_its_own_limit_lets_others_pass():
    line, one = admission(running_max=4), TenantLimits(running_max=1)
    first, second = ask(line, "ada", one), ask(line, "ada", one)
    assert (first.is_running, second.is_running, ask(line, "bob", one).is_running) == (True, False, True)
    assert line.end(first) == [second]


def test_full_queue_refuses_and_says_when_to_come_back():
    line = admission(running_max=1, waiting_max=2, tenant_waiting_max=1, retry_s=7.0)
    ask(line, "ada"), ask(line, "ada"), ask(line, "bob")
    mine, all_of_us = ask(line, "ada"), ask(line, "cyd")
    assert (mine.cause, mine.retry_after_s) == ("queue", 7.0)
    assert "of this key" in mine.why
    assert "2 requests wait" in all_of_us.why
    problem = all_of_us.problem()
    assert (problem.status, problem.headers) == (429, {"Retry-After": "7"})


def test_full_queue_keeps_no_request_from_a_free_slot():
    line, one = admission(running_max=2, waiting_max=1), TenantLimits(running_max=1)
    ask(line, "ada", one), ask(line, "ada", one)
    assert line.waiting == 1
    assert ask(line, "bob", one).is_running


def test_request_that_gives_up_leaves_the_queue():
    line = admission(running_max=1, tenant_waiting_max=1)
    first, second = ask(line, "ada"), ask(line, "ada")
    assert line.end(second) == []
    assert not isinstance(ask(line, "ada"), Refusal)
    assert len(line.end(first)) == 1


def test_requests_a_minute_are_a_bucket():
    line, limits = admission(running_max=100), TenantLimits(requests_per_minute=6)
    answers = [ask(line, "ada", limits, now=0.0) for _ in range(7)]
    assert [isinstance(each, Refusal) for each in answers] == [False] * 6 + [True]
    assert answers[-1].cause == "requests"
    assert not isinstance(ask(line, "ada", limits, now=10.1), Refusal)
    assert not isinstance(ask(line, "bob", limits, now=0.0), Refusal)


def test_computed_tokens_are_owed_and_paid_by_time():
    line, limits = admission(), TenantLimits(tokens_per_minute=60)
    line.end(ask(line, "ada", limits))
    line.charge("ada", 90, 0.0)
    refused = ask(line, "ada", limits, now=10.0)
    assert (refused.cause, round(refused.retry_after_s)) == ("tokens", 20)
    assert not isinstance(ask(line, "ada", limits, now=30.1), Refusal)


def test_changed_limit_holds_at_once_and_others_keep_their_debt():
    line = admission()
    line.end(ask(line, "ada", TenantLimits(tokens_per_minute=60)))
    line.charge("ada", 600, 0.0)
    assert isinstance(ask(line, "ada", TenantLimits(tokens_per_minute=60), now=1.0), Refusal)
    assert not isinstance(ask(line, "ada", TenantLimits(tokens_per_minute=600), now=1.0), Refusal)


def test_idle_tenants_are_forgotten_once_they_owe_nothing():
    line, limits = admission(), TenantLimits(tokens_per_minute=60)
    for i in range(50):
        line.end(ask(line, f"tenant {i}", limits))
    line.charge("tenant 49", 10, 0.0)
    ask(line, "ada", now=1.0)
    assert set(line._tenants) == {"tenant 49", "ada"}


@given(st.integers(0, 1 << 30), st.integers(1, 5), st.integers(0, 6))
def test_books_balance_whatever_comes_and_goes(seed, running_max, waiting_max):
    rng, line = random.Random(seed), admission(running_max=running_max, waiting_max=waiting_max, tenant_waiting_max=3)
    tickets: list[Ticket] = []
    for _ in range(60):
        if tickets and rng.random() < 0.5:
            line.end(tickets.pop(rng.randrange(len(tickets))))
        else:
            asked = ask(line, rng.choice("abc"), TenantLimits(running_max=rng.choice([1, 2, None])))
            tickets += [asked] if isinstance(asked, Ticket) else []
        assert line.running == sum(ticket.is_running for ticket in tickets) <= running_max
        assert line.waiting == len(tickets) - line.running
    for ticket in tickets:
        line.end(ticket)
    assert (line.running, line.waiting) == (0, 0)


def slots(**limits):
    return Slots(AdmissionLimits(**limits), asyncio.get_running_loop().time)


async def hold(held, tenant, entered, until):
    async with held.held(tenant, NONE):
        entered.append(tenant)
        await until.wait()


@pytest.mark.virtual_clock
async def test_waiting_request_starts_when_a_slot_is_free():
    held, entered, until = slots(running_max=1), [], asyncio.Event()
    async with held.held("ada", NONE):
        task = asyncio.create_task(hold(held, "bob", entered, until))
        await asyncio.sleep(1)
        assert entered == []
    await asyncio.sleep(0.1)
    assert entered == ["bob"]
    until.set()
    await task
    assert held.admission.running == 0


@pytest.mark.virtual_clock
async def test_cancelled_request_frees_its_place():
    held, entered, until = slots(running_max=1), [], asyncio.Event()
    tasks = [asyncio.create_task(hold(held, name, entered, until)) for name in ("ada", "bob", "cyd")]
    await asyncio.sleep(1)
    for task in tasks[:2]:  # one that runs, and one that waits
        task.cancel()
    await asyncio.sleep(1)
    assert entered == ["ada", "cyd"]
    until.set()
    await tasks[2]
    assert (held.admission.running, held.admission.waiting) == (0, 0)


@pytest.mark.virtual_clock
async def test_request_that_waited_too_long_is_refused():
    held = slots(running_max=1, wait_s=30.0)
    async with held.held("ada", NONE):
        with pytest.raises(Rejected) as refused:
            await hold(held, "bob", [], asyncio.Event())
    assert refused.value.problem.status == 429
    assert held.admission.waiting == 0


@pytest.mark.virtual_clock
async def test_refused_request_holds_no_slot_and_says_when_to_return():
    held = slots(running_max=1, waiting_max=0, retry_s=7.0)
    async with held.held("ada", NONE):
        with pytest.raises(Rejected) as refused:
            await hold(held, "bob", [], asyncio.Event())
    assert (refused.value.problem.status, refused.value.problem.retry_after_s) == (429, 7.0)
    assert (held.admission.running, held.admission.waiting) == (0, 0)


@pytest.mark.virtual_clock
async def test_charged_tokens_are_owed_by_the_holders_tenant():
    held, limits = slots(), TenantLimits(tokens_per_minute=60)
    async with held.held("ada", limits):
        held.charge("ada", 90)
    with pytest.raises(Rejected) as refused:
        async with held.held("ada", limits):
            pass
    assert round(refused.value.problem.retry_after_s) == 30
