"""What one session meets now and then, played on a virtual clock: nobody in good order is blamed or waited for."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import structlog

from swarm.client.planning.route import process_of
from swarm.client.session.limits import SessionLimits, WatchLimits
from swarm.errors import Refused, SessionClosed, StepTimeout
from swarm.net.limits import DialerLimits
from swarm.protocol import messages as wire
from swarm.server.refusals import Declined
from tests.simulation.going import (
    LIMITS,
    Crowded,
    Going,
    nothing,
    of_another_shape,
    played,
    small_chunks,
    spoiling,
    whole_numbers,
    without_numbers,
)
from tests.simulation.village import PLAN
from tests.simulation.world import N_BLOCKS, Host


def test_slow_upload_of_a_prompt_fails_no_hop() -> None:
    """With every chunk that is answered another one waits to be sent, behind it the question how the hop is."""

    async def scenario(going: Going) -> None:
        network = going.village.world.network
        network.kernel_buffer_bytes = 0
        uplink = network.link("client", going.hosts[0].name)
        uplink.bytes_per_s = 400.0  # a chunk takes longer than an answer may
        assert await going.say(200) > 15
        assert going.failures() == []
        assert going.session.repairs == 0

    played(scenario, client=small_chunks(8))


def test_output_waits_for_an_earlier_step_that_was_refused_late() -> None:
    """The step was sent twice: one copy was refused, the other one was applied."""

    async def scenario(going: Going) -> None:
        await going.say()
        last, host, came = going.session.route[-1], going.hosts[-1], []

        def refuse(_: Any, message: Any, sent: Any) -> Any:
            if isinstance(message, wire.Output):
                came.append(message.step)
            if isinstance(message, wire.Output) and came == [2]:
                names = {"session": message.session, "epoch": message.epoch, "step": 2}
                yield wire.Refused(**names, code="no_room", why="full", retry_after_ms=900), None
            else:
                yield message, sent

        host.process.sends = refuse
        await going.say(16)
        assert came == [2, 3, 2, 3]
        going.village.kill(last.peer_id)
        assert await going.say() < 5
        assert going.failures() == [last.process]

    played(scenario, client=small_chunks(8))


def test_hop_that_fails_during_planning_costs_no_timeout() -> None:
    async def scenario(going: Going) -> None:
        planning_s = 3.0
        going.village.planning = partial(asyncio.sleep, planning_s)
        first, *_, last = going.hosts
        first.process.stop()
        going.village.kill(last.identity.peer_id)
        assert await going.say() < 3 * planning_s + 2.0  # the first plan, and then two parts of a new one

    played(scenario)


def test_log_says_how_long_each_phase_of_a_repair_took() -> None:
    log = structlog.testing.LogCapture()

    async def scenario(going: Going) -> None:
        structlog.configure(processors=[log], wrapper_class=structlog.make_filtering_bound_logger(0))
        await going.say(3)
        going.village.planning = partial(asyncio.sleep, 1.5)
        for _ in range(2):  # the second one does not count the first
            going.village.kill(going.session.route[-1].peer_id)
            log.entries.clear()
            took_s = await going.say()
            (event,) = [entry for entry in log.entries if entry["event"] == "route stands"]
            phases = [event[phase] for phase in ("planning", "connecting", "rebuilding")]
            assert 1.5 <= event["planning"] < 3.0
            assert min(phases) > 0
            assert sum(phases) <= event["seconds"] + 0.002 <= took_s + 0.004

    played(scenario)


def test_end_of_an_idle_session_blames_no_hop() -> None:
    async def scenario(going: Going) -> None:
        await going.say(3)
        hosts = going.hosts
        owners = [hosted.owner for host in hosts for hosted in host.handler.sessions.values()]
        async with asyncio.TaskGroup() as sweeps:
            tasks = [sweeps.create_task(host.handler.sweep()) for host in hosts]
            limits = hosts[0].handler.limits
            await asyncio.sleep(limits.session.idle_s + 2 * limits.sweep_s)
            for task in tasks:
                task.cancel()
        assert not any(host.handler.sessions for host in hosts)
        for owner in owners:
            owner.close()  # as listeners do when a channel serves no session
        await asyncio.sleep(1.0)
        await going.say()
        assert going.failures() == []
        assert going.village.client.sessions.avoidance.processes == ()

    played(scenario)


def test_a_hop_that_ends_a_session_in_use_is_avoided() -> None:
    async def scenario(going: Going) -> None:
        await going.say(3)
        await asyncio.sleep(60.0)
        first = going.session.route[0]
        host = going.hosts[0]
        (hosted,) = host.handler.sessions.values()
        host.handler.registry.fail(hosted, None, "nothing happened for 900 s")
        await asyncio.sleep(1.0)
        await going.say()
        assert going.failures() == [first.process]

    played(scenario)


def test_hop_that_blames_a_relayed_edge_is_left() -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        liar, (process, *others) = going.hosts[0], [hop.process for hop in going.session.route]
        (hosted,) = liar.handler.sessions.values()

        def lie(_: Any, message: Any, sent: Any) -> Any:
            yield message, sent
            if isinstance(message, wire.Opened | wire.Rerouted):
                names = {"session": message.session, "epoch": message.epoch}
                yield wire.Failed(**names, blame="next", why="it does not answer"), None

        liar.process.sends = lie
        hosted.owner.send(wire.Rerouted(session=hosted.id, epoch=hosted.seat.epoch, journal=True))
        assert await going.say() < 5
        assert going.failures() == [process]
        assert [hop.process for hop in going.session.route[1:]] == others

    played(scenario)


@pytest.mark.parametrize("spoilt", [nothing, without_numbers, of_another_shape, whole_numbers])
def test_hop_whose_activations_cannot_be_relayed_is_left(spoilt: Callable[..., Any]) -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        going = await going.relayed(0)
        liar, (process, *others) = going.hosts[0], [hop.process for hop in going.session.route]
        liar.process.sends = spoiling(wire.Step, spoilt)
        assert await going.say(2) < 10
        assert going.failures() == [process]
        assert [hop.process for hop in going.session.route[1:]] == others

    played(scenario)


@pytest.mark.parametrize("spoilt", [without_numbers, whole_numbers])
def test_last_hop_whose_output_is_unsound_is_left(spoilt: Callable[..., Any]) -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        liar, (*others, process) = going.hosts[-1], [hop.process for hop in going.session.route]
        liar.process.sends = spoiling(wire.Output, spoilt)
        assert await going.say(2) < 5
        assert going.failures() == [process]
        assert [hop.process for hop in going.session.route[:-1]] == others

    played(scenario)


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("lies", [False, True])
def test_hop_that_takes_no_relayed_activations_is_left(relays: bool, lies: bool) -> None:
    """It says that it is not finite, or nothing. The first time the edge is held to be at fault, if it carried it."""

    async def scenario(going: Going) -> None:
        await going.say()
        if relays:
            going = await going.relayed(0)
        liar, processes = going.hosts[1], [hop.process for hop in going.session.route]

        def ignore(_: Any, step: Any, sent: Any) -> bool:
            if isinstance(step, wire.Step) and lies:
                (hosted,) = liar.handler.sessions.values()
                hosted.owner.send(Declined("bad_activations", "no numbers").answer(step))
            return isinstance(step, wire.Step)

        liar.process.takes = ignore
        assert await going.say() < 15
        assert going.failures() == [processes.pop(1)]
        assert set(processes) < {hop.process for hop in going.session.route}

    played(scenario)


def test_a_hop_that_replays_a_past_without_numbers_is_left() -> None:
    async def scenario(going: Going) -> None:
        await going.say(3)
        liar, (process, last) = going.hosts[0], [going.session.route[i].process for i in (0, -1)]
        liar.process.sends = spoiling(wire.Rebuild, without_numbers)
        going.village.kill(going.hosts[1].identity.peer_id)
        assert await going.say() < 15
        assert process in going.failures()
        assert going.session.route[-1].process == last

    played(scenario)


@pytest.mark.parametrize("code", ["bad_request", "draining", "too_late"])
def test_what_one_hop_calls_impossible_another_one_does(code: Any) -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        liar, process = going.hosts[1], going.session.route[1].process
        (hosted,) = liar.handler.sessions.values()

        def decline(_: Any, step: Any, sent: Any) -> bool:
            if isinstance(step, wire.Step):
                hosted.owner.send(Declined(code, "no").answer(step))
            return isinstance(step, wire.Step)

        liar.process.takes = decline
        assert await going.say() < 5
        assert process not in {hop.process for hop in going.session.route}
        assert going.failures() == []

    played(scenario)


def test_what_two_hops_call_impossible_is_believed() -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        asked = []

        def declining(host: Host) -> Callable[..., bool]:
            def decline(channel: Any, step: Any, sent: Any) -> bool:
                if isinstance(step, wire.Step):
                    asked.append(host)
                    channel.send(Declined("bad_request", "no").answer(step))
                return isinstance(step, wire.Step)

            return decline

        for host in going.village.world.hosts:
            host.process.takes = declining(host)
        with pytest.raises(Refused, match="bad_request"):
            await going.say()
        assert len(set(asked)) == len(asked) == 2

    played(scenario)


def test_too_late_is_believed_near_the_steps_deadline() -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        host, (hosted,) = going.hosts[1], going.hosts[1].handler.sessions.values()

        def decline(_: Any, step: Any, sent: Any) -> bool:
            if isinstance(step, wire.Step):
                refused = Declined("too_late", "the step's time is over").answer(step)
                after_s = PLAN.step_timeout_s - LIMITS.recovery.late_s / 2
                going.loop.call_later(after_s, hosted.owner.send, refused)
            return isinstance(step, wire.Step)

        host.process.takes = decline
        with pytest.raises(Refused, match="too_late"):
            await going.say()

    asks_never = (PLAN.step_timeout_s,) * 3  # else the hop would be replaced before
    played(scenario, client=SessionLimits(watch=WatchLimits(patience_s=asks_never)))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_hop_that_only_claims_to_receive_is_left(index: int) -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        liar, its_process = going.hosts[index], going.session.route[index].process

        def lie(_: Any, message: Any, sent: Any) -> Any:
            if isinstance(message, wire.Progress):
                message = message.model_copy(update={"quiet_ms": 0})
            return [(message, sent)]

        liar.process.sends = lie
        liar.process.takes = lambda _, message, sent: isinstance(message, wire.Step)
        assert LIMITS.watch.receives_s < await going.say() < LIMITS.watch.receives_s + 10
        assert going.failures() == [its_process]

    played(scenario)


@pytest.mark.parametrize("rebuilds", [False, True])
def test_hop_that_only_claims_to_compute_is_avoided(rebuilds: bool) -> None:
    """What it says is what a busy hop says; more and more comes to it, and it has computed more each time."""

    async def scenario(going: Going) -> None:
        await going.say()
        first = going.session.route[0]
        starts = [host for host in going.village.world.hosts if host.blocks.start == 0]
        (spare,) = [host for host in starts if host.identity.peer_id in going.village.listed - {first.peer_id}]
        liar = spare if rebuilds else going.hosts[0]
        times = iter(range(1, 10_000))

        def lie(_: Any, message: Any, sent: Any) -> Any:
            if isinstance(message, wire.Progress):
                more = next(times)
                message = message.model_copy(update={"under_way": 1, "length": more, "jobs_done": more})
            return [(message, sent)]

        liar.process.sends = lie
        liar.process.takes = lambda _, message, sent: isinstance(message, wire.Step | wire.Rebuild)
        if rebuilds:
            going.village.kill(first.peer_id)  # the one that takes over is the liar
        with pytest.raises(StepTimeout) as late:
            await going.say()
        assert late.value.peer == liar.identity.peer_id
        process = process_of(liar.announcement("online"))
        assert going.failures() == ([first.process, process] if rebuilds else [process])
        again = await going.village.open(PLAN)
        assert process not in {hop.process for hop in again.route}
        await again.close()

    played(scenario)


@pytest.mark.parametrize("everywhere", [False, True])
def test_hop_busy_with_others_for_long_is_left_if_possible(everywhere: bool) -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        process = going.session.route[1].process
        crowded = Crowded(going.village.world.hosts if everywhere else [going.hosts[1]])
        others = asyncio.create_task(crowded.serve_others())
        overdue_s = LIMITS.watch.overdue_s
        going.loop.call_later(overdue_s + 20.0, crowded.end)
        took_s = await going.say()
        others.cancel()
        assert going.failures() == []
        if everywhere:
            assert took_s > overdue_s + 20
        else:
            assert overdue_s < took_s < overdue_s + 10
            assert process not in {hop.process for hop in going.session.route}

    played(scenario)


def test_hop_too_busy_with_others_for_a_past_is_left() -> None:
    async def scenario(going: Going) -> None:
        await going.say(3)
        last, listed = going.session.route[-1], going.village.listed
        ends = [host for host in going.village.world.hosts if host.blocks.stop == N_BLOCKS]
        crowded = Crowded([host for host in ends if host.identity.peer_id in listed - {last.peer_id}])
        others = asyncio.create_task(crowded.serve_others())
        going.village.kill(last.peer_id)
        assert LIMITS.watch.overdue_s < await going.say() < LIMITS.watch.overdue_s + 15
        others.cancel()
        assert going.failures() == [last.process]

    played(scenario)


@pytest.mark.parametrize("meanwhile", ["planned", "connected"])
def test_session_closed_during_a_repair_leaves_nothing(meanwhile: str) -> None:
    async def scenario(going: Going) -> None:
        client, closings = going.village.client, []

        def close() -> None:
            closings.append(asyncio.ensure_future(going.session.close()))

        async def close_soon() -> None:
            if meanwhile == "planned":
                await going.session.close()
            else:
                going.loop.call_later(0.01, close)  # no dial is over by then

        going.village.planning = close_soon
        going.village.kill(going.hosts[-1].identity.peer_id)
        with pytest.raises(SessionClosed):
            await going.say()
        await asyncio.sleep(1.0)
        assert not any(host.handler.sessions for host in going.village.world.hosts)
        await asyncio.sleep(2 * DialerLimits().idle_s)
        assert not client.process.channels  # nothing counts as their user

    played(scenario)
