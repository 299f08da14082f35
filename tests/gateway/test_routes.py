"""Whether models have a route: answers are kept for a while, and loaded models are asked through their sessions."""

import asyncio
from types import SimpleNamespace

import pytest

from swarm.errors import SwarmError
from swarm.gateway.routes import RouteLimits, Routes


class Planner:
    """A membership that plans as a test says, and counts how often."""

    def __init__(self, error=None, takes_s=0.0):
        self.error, self.takes_s, self.planned = error, takes_s, 0
        self.router = self

    async def plan(self, blocks):
        self.planned += 1
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error


class Joined:
    """A member whose memberships for planning are given, by root."""

    def __init__(self, **planners):
        self.planners, self.made = planners, []

    def of(self, checkpoint):
        self.made.append(checkpoint.root)
        return self.planners[checkpoint.root]


def checkpoints(*names):
    return {name: SimpleNamespace(public_name=name, root=name, n_blocks=4) for name in names}


@pytest.fixture
def times():
    return [0.0]


def routes_of(member, times, **limits):
    return Routes(member.of, RouteLimits(**limits), lambda: times[-1])


async def test_reasons_are_kept_until_they_are_old(times):
    planner = Planner(SwarmError("no server"))
    routes = routes_of(Joined(a=planner), times, fresh_s=2.0)
    assert await routes.reasons(checkpoints("a"), {}) == {"a": "no server"}
    times.append(2.0)
    planner.error = None
    assert await routes.reasons(checkpoints("a"), {}) == {"a": "no server"}
    times.append(2.1)
    assert await routes.reasons(checkpoints("a"), {}) == {"a": ""}


async def test_another_list_of_models_is_planned_at_once(times):
    routes = routes_of(Joined(a=Planner(), b=Planner()), times)
    assert await routes.reasons(checkpoints("a"), {}) == {"a": ""}
    assert await routes.reasons(checkpoints("a", "b"), {}) == {"a": "", "b": ""}


async def test_calls_at_one_time_share_one_round(times):
    planner = Planner()
    routes = routes_of(Joined(a=planner), times)
    await asyncio.gather(*(routes.reasons(checkpoints("a"), {}) for _ in range(5)))
    assert planner.planned == 1


async def test_loaded_model_is_asked_through_its_sessions(times):
    member, used = Joined(a=Planner()), Planner()
    loaded = {"a": SimpleNamespace(resident=SimpleNamespace(engine=SimpleNamespace(swarm=used)))}
    await routes_of(member, times).reasons(checkpoints("a"), loaded)
    assert (used.planned, member.made) == (1, [])


async def test_membership_for_planning_lasts_until_its_model_leaves(times):
    member = Joined(a=Planner())
    routes = routes_of(member, times, fresh_s=-1.0)
    await routes.reasons(checkpoints("a"), {})
    await routes.reasons(checkpoints("a"), {})
    assert member.made == ["a"]
    routes.forget("a")
    await routes.reasons(checkpoints("a"), {})
    assert member.made == ["a", "a"]


@pytest.mark.virtual_clock
async def test_route_that_takes_long_to_plan_is_none(times):
    routes = routes_of(Joined(a=Planner(takes_s=60.0)), times, plan_s=5.0)
    assert await routes.reasons(checkpoints("a"), {}) == {"a": "no route was planned within 5 s"}
