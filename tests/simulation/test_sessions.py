"""What one session meets now and then, played on a virtual clock: nobody in good order is blamed or waited for."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import structlog
import torch

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.session import chunks, live
from swarm.client.session import session as client_session
from swarm.client.session.plan import SessionPlan
from swarm.client.session.session import Session
from swarm.client.session.watch import OVERDUE_S
from swarm.errors import Refused, SessionClosed, StepTimeout
from swarm.protocol import messages as wire
from swarm.protocol.tensors import meta_of
from swarm.server.limits import HandlerLimits, MemoryLimits
from swarm.server.refusals import Declined
from tests.simulation import network
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import HIDDEN_SIZE, HashSpan, embed
from tests.simulation.test_lists import HORIZON_S, PLAN, Village, _finished
from tests.simulation.world import N_BLOCKS, Host


class Going:
    """A session under way in a village, whose every output is compared."""

    def __init__(self, village: Village, session: Session) -> None:
        self.village, self.session = village, session
        self.loop = village.world.loop
        self._local = HashSpan(Blocks(0, N_BLOCKS))
        self._past = self._local.new_cache()

    async def say(self, tokens: int = 1) -> float:
        """Go on by some tokens. Returns how long that took, in seconds."""
        began = self.loop.time()
        hidden = embed([[self._past.length + number for number in range(tokens)]])
        got = await self.session.step(Activations(hidden), want=1)
        assert torch.equal(got, self._local.forward(hidden, cache=self._past)[:, -1:])
        return self.loop.time() - began

    @property
    def hosts(self) -> list[Host]:
        """The servers of the route, in order."""
        return [self.village.host(hop.peer_id) for hop in self.session.route]

    def failures(self) -> list[str]:
        """Processes that are held to have failed."""
        entries = self.village.client.sessions.avoidance._entries.items()
        return [key for key, entry in entries if isinstance(key, str) and entry.failures]


def played(
    scenario: Callable[[Going], Coroutine[Any, Any, None]],
    far_s: float | None = None,
    plan: SessionPlan = PLAN,
    limits: HandlerLimits | None = None,
    memory_limits: MemoryLimits | None = None,
) -> None:
    """Open a session and go through a scenario. far_s: how far from the client all servers are, one way.

    limits, memory_limits: of every server.
    """
    loop = VirtualLoop(HORIZON_S)
    unheard: list[Any] = []
    loop.set_exception_handler(lambda _, context: unheard.append(context))

    async def play() -> None:
        village = Village(loop, "allowed_peers", 3, limits, memory_limits)
        await asyncio.sleep(25.0)  # everybody has announced
        for process in village.world.network.processes.values() if far_s else ():
            village.world.network.link("client", process.name).latency_s = far_s
        session = await village.swarm.open(Blocks(0, N_BLOCKS), plan)
        await scenario(Going(village, session))
        await session.close()
        await village.client.sessions.close()
        await asyncio.sleep(1.0)
        gc.collect()
        assert not unheard  # of exceptions that nobody took

    _finished(loop, play())


def small_chunks(patch: pytest.MonkeyPatch, tokens: int) -> None:
    patch.setattr(chunks, "CHUNK_BYTES", tokens * HIDDEN_SIZE * 4)


def test_a_prompt_that_takes_long_to_upload_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every chunk that is answered another one waits to be sent, behind it the question how the hop is."""
    small_chunks(monkeypatch, 8)
    monkeypatch.setattr(network, "KERNEL_BUFFER_BYTES", 0)

    async def scenario(going: Going) -> None:
        uplink = going.village.world.network.link("client", going.hosts[0].name)
        uplink.bytes_per_s = 400.0  # a chunk takes longer than an answer may
        assert await going.say(200) > 20
        assert going.failures() == []
        assert going.session.repairs == 0

    played(scenario)


def test_an_output_is_not_taken_before_that_of_a_step_that_was_refused_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step was sent twice: one copy was refused, the other one was applied."""
    small_chunks(monkeypatch, 8)

    async def scenario(going: Going) -> None:
        await going.say()
        session, flights = going.session, going.session._in_flight
        transmit = flights._transmit
        last = session.live.legs[-1]
        names = {"session": session.id, "epoch": session.live.epoch, "step": 2}
        late = [wire.Refused(**names, code="no_room", why="full", retry_after_ms=900)]

        def refused(flight: Any) -> None:
            transmit(flight)
            if flight.message.step == 3 and late:
                session.on_message(last.channel, late.pop(), ())

        with monkeypatch.context() as patch:
            patch.setattr(flights, "_transmit", refused)
            await going.say(16)
        going.village.kill(last.hop.peer_id)
        assert await going.say() < 5
        assert going.failures() == [last.hop.process]

    played(scenario)


def test_a_hop_that_fails_while_a_repair_is_planned_is_not_waited_for() -> None:
    async def scenario(going: Going) -> None:
        session, plan = going.session, going.session._planner

        async def slowly(*arguments: Any) -> Any:
            await asyncio.sleep(3.0)
            return await plan(*arguments)

        session._planner = slowly
        first, *_, last = going.hosts
        first.process.stop()
        going.village.kill(last.identity.peer_id)
        assert await going.say() < live.REPLY_TIMEOUT_S

    played(scenario)


def test_the_log_says_how_long_each_phase_of_a_repair_took(monkeypatch: pytest.MonkeyPatch) -> None:
    log = structlog.testing.LogCapture()
    everything = structlog.make_filtering_bound_logger(0)
    monkeypatch.setattr(client_session, "_log", structlog.wrap_logger(None, [log], everything))

    async def scenario(going: Going) -> None:
        await going.say(3)
        plan = going.session._planner

        async def slowly(*arguments: Any) -> Any:
            await asyncio.sleep(1.5)
            return await plan(*arguments)

        going.session._planner = slowly
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


def test_a_new_hop_that_stops_right_after_it_has_opened_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All has come but its answer to the ping, by which its distance is measured."""
    send = network.VirtualChannel.send

    async def scenario(going: Going) -> None:
        first, listed = going.session.route[0].peer_id, going.village.listed
        starts = [host for host in going.village.world.hosts if host.blocks.start == 0]
        (spare,) = [host for host in starts if host.identity.peer_id in listed - {first}]

        def send_and_stop(channel: Any, message: Any, sent: Any = None) -> None:
            if channel.process is spare.process and isinstance(message, wire.Pong):
                return
            send(channel, message, sent)
            if channel.process is spare.process and isinstance(message, wire.Opened):
                spare.process.stop()

        monkeypatch.setattr(network.VirtualChannel, "send", send_and_stop)
        going.village.kill(first)
        assert await going.say() < live.PING_TIMEOUT_S
        assert spare.process.state == "stopped"

    played(scenario)


def test_a_channel_that_is_there_already_says_nothing_about_how_long_others_take() -> None:
    async def scenario(going: Going) -> None:
        for _ in range(10):
            other = await going.village.swarm.open(Blocks(0, N_BLOCKS), PLAN)
            await other.close()
        last = going.session.route[-1]
        going.village.kill(last.peer_id)
        await going.say()
        assert going.failures() == [last.process]

    played(scenario, far_s=0.15)  # it takes four times as long to connect


def test_that_a_session_ends_when_it_was_idle_is_nobodys_fault() -> None:
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


def test_a_hop_that_blames_the_next_one_although_the_client_relays_is_left() -> None:
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


def silent(kind: type[wire.Message]) -> Callable[..., Any]:
    """Return what sends no messages of this kind."""
    return lambda _, message, sent: [] if isinstance(message, kind) else [(message, sent)]


def spoiling(kind: type[wire.Message], spoilt: Callable[..., Any]) -> Callable[..., Any]:
    """Return what sends `spoilt(message, activations)`, or nothing, instead of messages of this kind."""

    def send(_: Any, message: Any, sent: Any) -> Any:
        instead = spoilt(message, sent) if isinstance(message, kind) else (message, sent)
        return [] if instead is None else [instead]

    return send


def nothing(message: Any, sent: Any) -> None:
    """Do not send it."""


def without_numbers(message: Any, sent: Any) -> Any:
    """Send activations that are none."""
    return message, sent.with_hidden(torch.full_like(sent.hidden, torch.nan))


def of_another_shape(message: Any, sent: Any) -> Any:
    """Send them without a position."""
    fewer = sent.hidden[:, 1:].contiguous()
    return message.model_copy(update={"hidden": meta_of(fewer)}), sent.with_hidden(fewer)


def whole_numbers(message: Any, sent: Any) -> Any:
    """Send them as integers."""
    whole = sent.hidden.to(torch.int64)
    return message.model_copy(update={"hidden": meta_of(whole)}), sent.with_hidden(whole)


@pytest.mark.parametrize("spoilt", [nothing, without_numbers, of_another_shape, whole_numbers])
def test_a_hop_whose_activations_are_not_what_the_client_can_relay_is_left(spoilt: Callable[..., Any]) -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        liar, (process, *others) = going.hosts[0], [hop.process for hop in going.session.route]
        liar.process.sends = spoiling(wire.Step, spoilt)
        going.village.client.sessions.avoidance.block(going.session.live.edge(0))
        going.session.live.stands = False
        assert await going.say(2) < 10
        assert going.failures() == [process]
        assert [hop.process for hop in going.session.route[1:]] == others

    played(scenario)


@pytest.mark.parametrize("spoilt", [without_numbers, whole_numbers])
def test_a_last_hop_whose_output_is_nothing_to_go_on_with_is_left(spoilt: Callable[..., Any]) -> None:
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
def test_a_hop_that_does_not_take_what_the_client_relays_is_left(relays: bool, lies: bool) -> None:
    """It says that it is not finite, or nothing. The first time the edge is held to be at fault, if it carried it."""

    async def scenario(going: Going) -> None:
        await going.say()
        liar, processes = going.hosts[1], [hop.process for hop in going.session.route]

        def ignore(_: Any, step: Any, sent: Any) -> bool:
            if isinstance(step, wire.Step) and lies:
                (hosted,) = liar.handler.sessions.values()
                hosted.owner.send(Declined("bad_activations", "no numbers").answer(step))
            return isinstance(step, wire.Step)

        liar.process.takes = ignore
        if relays:
            going.village.client.sessions.avoidance.block(going.session.live.edge(0))
            going.session.live.stands = False
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


def test_that_a_step_is_too_late_is_believed_when_its_time_is_about_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        host, (hosted,) = going.hosts[1], going.hosts[1].handler.sessions.values()

        def decline(_: Any, step: Any, sent: Any) -> bool:
            if isinstance(step, wire.Step):
                refused = Declined("too_late", "the step's time is over").answer(step)
                after_s = PLAN.step_timeout_s - client_session.LATE_S / 2
                going.loop.call_later(after_s, hosted.owner.send, refused)
            return isinstance(step, wire.Step)

        host.process.takes = decline
        monkeypatch.setattr(going.session._watcher, "_judge", lambda *_: None)  # it would not wait for so long
        with pytest.raises(Refused, match="too_late"):
            await going.say()

    played(scenario)


@pytest.mark.parametrize("rebuilds", [False, True])
def test_a_hop_that_always_has_work_but_computes_nothing_is_left_out_of_the_next_route(rebuilds: bool) -> None:
    """What it says is what a busy hop says; more and more comes to it, and it has computed more each time."""

    async def scenario(going: Going) -> None:
        await going.say()
        session, first = going.session, going.session.route[0]
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
        process = session.live.process_of(late.value.peer)
        assert going.failures() == ([first.process, process] if rebuilds else [process])
        again = await going.village.swarm.open(Blocks(0, N_BLOCKS), PLAN)
        assert process not in {hop.process for hop in again.route}
        await again.close()

    played(scenario)


class Crowded:
    """Hosts that compute for others alone: what comes is kept until it is its turn."""

    def __init__(self, hosts: list[Host]) -> None:
        self._hosts = hosts
        for host in hosts:
            host.executor.hold()

    async def serve_others(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for host in self._hosts:
                host.handler.jobs_done += 1

    def end(self) -> None:
        for host in self._hosts:
            host.executor.release()


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_hop_that_is_busy_with_others_for_very_long_is_left_if_there_is_another_one(everywhere: bool) -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        process = going.session.route[1].process
        crowded = Crowded(going.village.world.hosts if everywhere else [going.hosts[1]])
        others = asyncio.create_task(crowded.serve_others())
        going.loop.call_later(OVERDUE_S + 20.0, crowded.end)
        took_s = await going.say()
        others.cancel()
        assert going.failures() == []
        if everywhere:
            assert took_s > OVERDUE_S + 20
        else:
            assert OVERDUE_S < took_s < OVERDUE_S + 10
            assert process not in {hop.process for hop in going.session.route}

    played(scenario)


def test_a_hop_that_is_busy_with_others_when_it_is_given_a_past_is_left() -> None:
    async def scenario(going: Going) -> None:
        await going.say(3)
        last, listed = going.session.route[-1], going.village.listed
        ends = [host for host in going.village.world.hosts if host.blocks.stop == N_BLOCKS]
        crowded = Crowded([host for host in ends if host.identity.peer_id in listed - {last.peer_id}])
        others = asyncio.create_task(crowded.serve_others())
        going.village.kill(last.peer_id)
        assert OVERDUE_S < await going.say() < OVERDUE_S + 15
        others.cancel()
        assert going.failures() == [last.process]

    played(scenario)


@pytest.mark.parametrize("meanwhile", ["planned", "connected"])
def test_a_session_that_is_closed_while_it_is_repaired_leaves_nothing(meanwhile: str) -> None:
    async def scenario(going: Going) -> None:
        session, dialer = going.session, going.village.client.sessions.dialer
        plan, connect = session._planner, dialer.connect

        async def plan_and_close(*arguments: Any) -> Any:
            await session.close()
            return await plan(*arguments)

        async def close_and_connect(*arguments: Any) -> Any:
            await session.close()
            return await connect(*arguments)

        if meanwhile == "planned":
            session._planner = plan_and_close
        else:
            dialer.connect = close_and_connect
        going.village.kill(going.hosts[-1].identity.peer_id)
        with pytest.raises(SessionClosed):
            await going.say()
        await asyncio.sleep(1.0)
        assert not any(host.handler.sessions for host in going.village.world.hosts)
        assert set(dialer._users.values()) == {0}

    played(scenario)


def test_what_follows_a_refused_part_of_the_past_is_nobodys_fault() -> None:
    """The parts behind it that were on their way are refused, too: they begin where none is due."""

    async def scenario(going: Going) -> None:
        await going.say()
        session = going.session
        channel = session.live.legs[1].channel
        session.live.stands = False
        for code, troubles in (("bad_request", 0), ("no_room", 1)):
            refused = wire.Refused(session=session.id, epoch=session.live.epoch, code=code, why="", retry_after_ms=100)
            session.on_message(channel, refused, ())
            assert len(session._troubles) == troubles
        await going.say()
        assert going.failures() == []

    played(scenario)
