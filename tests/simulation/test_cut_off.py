"""The client's own network fails: that is nobody's fault, and a generation waits for it as long as a step may take."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from swarm.blocks import Blocks
from swarm.client.session.limits import RecoveryLimits
from swarm.errors import HopFailed, NoRoute, StepTimeout
from swarm.protocol.messages import Step
from tests.simulation.going import Crowded, Going, played
from tests.simulation.village import PLAN
from tests.simulation.world import N_BLOCKS, Host
from tests.support.often import rest_is_long

IMPATIENT = replace(PLAN, wait_for_blocks_s=0.0)
BACK_S = 3.0  # what may pass between the network's return and the next token: a pause, a dial, a past


def others(going: Going) -> list[Host]:
    """The servers that are not in the route."""
    return [host for host in going.village.world.hosts if host not in going.hosts]


def make_sole_holders(going: Going) -> None:
    for host in others(going):
        going.village.kill(host.identity.peer_id, comes_back=False)


def make_slow_spares(going: Going) -> None:
    for host in others(going):
        host.block_ms = 80.0
        host.executor.block_s = 0.08


async def go_on(going: Going, for_s: float) -> None:
    until = going.loop.time() + for_s
    while going.loop.time() < until:
        await going.say()
        await asyncio.sleep(0.5)


def drop_network(going: Going, for_s: float) -> None:
    network = going.village.world.network
    network.cut("client", "*")
    going.loop.call_later(for_s, network.mend, "client", "*")


@pytest.mark.parametrize("ends", [False, True], ids=["silent", "ended at once"])
@pytest.mark.parametrize("around", [make_sole_holders, make_slow_spares])
@pytest.mark.parametrize("away_s", rest_is_long([20.0, 60.0], [20.0]))
def test_a_generation_goes_on_when_the_clients_network_is_back(
    away_s: float, around: Callable[[Going], None], ends: bool
) -> None:
    async def scenario(going: Going) -> None:
        around(going)
        await go_on(going, 60.0)
        hosts = going.hosts
        drop_network(going, away_s)
        for channel in list(going.village.client.process.channels) if ends else ():
            channel.cannot_reach()
        await asyncio.sleep(0.01)
        assert await going.say() < away_s + BACK_S
        assert going.hosts == hosts
        assert going.failures() == []

    played(scenario, plan=IMPATIENT)


def test_four_short_outages_leave_no_hop_avoided() -> None:
    async def scenario(going: Going) -> None:
        make_slow_spares(going)
        hosts, avoidance = going.hosts, going.village.client.sessions.avoidance
        for _ in range(4):
            await go_on(going, 30.0)
            drop_network(going, 5.0)
            assert await going.say() < 5.0 + BACK_S
            assert going.hosts == hosts
            assert avoidance.processes == ()
            assert going.failures() == []

    played(scenario, plan=IMPATIENT)


def test_outage_longer_than_a_step_ends_it_at_its_deadline() -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        began = going.loop.time()
        drop_network(going, 2 * PLAN.step_timeout_s)
        with pytest.raises(StepTimeout):
            await going.say()
        assert going.loop.time() - began == pytest.approx(PLAN.step_timeout_s)
        assert going.failures() == []

    played(scenario, plan=IMPATIENT)


def test_step_timeout_during_an_outage_blames_no_hop() -> None:
    async def scenario(going: Going) -> None:
        make_sole_holders(going)
        await going.say()
        crowded = Crowded(going.hosts)
        others = asyncio.create_task(crowded.serve_others())
        drop_network(going, 80.0)
        with pytest.raises(StepTimeout):
            await going.say()
        others.cancel()
        assert going.failures() == []

    played(scenario, plan=IMPATIENT)


# Others that fail


def vanish(going: Going, host: Host) -> None:
    going.village.world.hosts.remove(host)
    going.village.world.network.vanish(host.process)


def crash(going: Going, host: Host) -> None:
    going.village.kill(host.identity.peer_id, comes_back=False)


@pytest.mark.parametrize("die", [vanish, crash])
def test_two_of_three_hops_that_die_are_replaced_at_once(die: Callable[..., None]) -> None:
    async def scenario(going: Going) -> None:
        await go_on(going, 60.0)
        *dead, alive = going.session.route
        assert len(dead) == 2
        for host in going.hosts[:2]:
            die(going, host)
        assert await going.say() < (1.3 if die is crash else 2.0)
        assert going.failures() == [hop.process for hop in dead]
        assert going.session.route[-1].process == alive.process

    played(scenario, plan=IMPATIENT)


@pytest.mark.parametrize("die", [vanish, crash])
def test_a_route_whose_hops_all_die_is_replaced(die: Callable[..., None]) -> None:
    async def scenario(going: Going) -> None:
        await go_on(going, 60.0)
        dead = [hop.process for hop in going.session.route]
        for host in going.hosts:
            die(going, host)
        assert await going.say() < 5.0
        assert sorted(going.failures()) == sorted(dead)

    played(scenario, plan=IMPATIENT)


def test_hops_that_fall_silent_with_every_step_are_left() -> None:
    async def scenario(going: Going) -> None:
        await go_on(going, 60.0)
        hosts, processes = going.hosts, {hop.process for hop in going.session.route}

        def fall_silent(_: Any, message: Any, sent: Any) -> bool:
            if not isinstance(message, Step):
                return False
            for channel in [channel for host in hosts for channel in host.process.channels]:
                if channel.other.process.name == "client":
                    channel.receive = lambda _: None  # type: ignore[method-assign]
            return True

        hosts[0].process.takes = fall_silent
        assert await going.say() < 8.0
        assert set(going.failures()) == processes
        assert not processes & {hop.process for hop in going.session.route}

    played(scenario, plan=IMPATIENT)


def test_new_session_without_recent_contact_fails_soon() -> None:
    async def scenario(going: Going) -> None:
        await going.session.close()
        await asyncio.sleep(120.0)  # no channel is left
        drop_network(going, 60.0)
        began = going.loop.time()
        with pytest.raises((NoRoute, HopFailed)):
            await going.village.swarm.open(Blocks(0, N_BLOCKS), IMPATIENT)
        assert going.loop.time() - began < RecoveryLimits().holders_s + 5.0

    played(scenario, plan=IMPATIENT)
