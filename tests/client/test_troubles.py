"""What is not a crash: stalls, busy hops, blocked edges, full pools, departures, repairs that fail half-way."""

import asyncio
import threading
import time

import pytest
import torch
from swarm.client.session.live import CONNECT_S

from swarm.activations import Activations
from swarm.client.session import watch as watch_module
from swarm.errors import StepTimeout, Unreachable
from swarm.model.span import Span
from swarm.net.gate import PROGRESS
from swarm.protocol import messages as wire
from tests.client.test_repair import crash, used_twins
from tests.client.test_session import IDS, eventually
from tests.support.inprocess import inprocess
from tests.support.logits import same_logits

ONE = IDS[:1, :12]


@pytest.fixture
def going(checkpoint, full):
    """A swarm of two hops with twins, a client, and a session under way on it."""
    with inprocess(checkpoint, "0:3", "3:6", "0:3", "3:6") as swarm, swarm.client() as model:
        yield Going(swarm, model, full)


class Going:
    """A generation, token by token."""

    def __init__(self, swarm, model, full):
        self.swarm, self.model = swarm, model
        self.cache, self._full, self._said = model.new_cache(), full, ONE
        with torch.no_grad():
            self.model(ONE, past_key_values=self.cache)
        self.route = used_twins(swarm, model)
        self.peers = self.route_now()

    def say(self, tokens=1):
        """Go on by some tokens and compare with the whole model."""
        new = IDS[1:2, :tokens]
        self._said = torch.cat([self._said, new], dim=1)
        with torch.no_grad():
            got = self.model(new, past_key_values=self.cache).logits
            expected = self._full(self._said).logits[:, -tokens:]
        assert (got - expected).abs().max() < 1e-4

    def session(self):
        return self.cache._session._session

    def route_now(self):
        return [hop.peer_id for hop in self.model.route]

    def failures(self):
        """Processes that are held to have failed."""
        entries = self.session()._avoidance._entries.items()
        return [key for key, entry in entries if isinstance(key, str) and entry.failures]


def stall(server):
    """Nothing that comes is looked at any more, as in a process that is stopped; its connections stay."""
    for name in ("_on_step", "_on_inquiry", "_on_open", "_on_reroute", "_on_rebuild", "_on_replay"):
        setattr(server.handler, name, lambda *_: PROGRESS)


def in_loop(swarm, work):
    async def do():
        return work()

    return swarm.loop.run(do())


@pytest.mark.parametrize("index", [0, 1])
def test_a_hop_that_stalls_is_replaced_within_seconds(going, index):
    for _ in range(3):
        going.say()
    stall(going.route[index])
    began = time.monotonic()
    going.say()
    assert time.monotonic() - began < 5
    assert going.route_now()[index] != going.peers[index]
    assert going.route_now()[1 - index] == going.peers[1 - index]
    assert going.failures() == [f"{going.peers[index]}/{going.route[index].me.key.public.hex()}"]


def test_hops_that_stall_together_are_replaced_together(going):
    going.say()
    for server in going.route:
        stall(server)
    going.say()
    assert not set(going.route_now()) & set(going.peers)


def test_a_busy_hop_is_waited_for(going, monkeypatch):
    going.say()
    forward, slow = Span.forward, going.route[1].span

    def slowly(self, *args, **kwargs):
        if self.blocks == slow.blocks:
            time.sleep(4)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Span, "forward", slowly)
    going.say()
    assert going.route_now() == going.peers
    assert going.session().repairs == 0


@pytest.mark.parametrize("index", [0, 1])
def test_a_step_that_takes_too_long_names_the_hop_that_is_at_it(checkpoint, full, monkeypatch, index):
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client(step_timeout_s=4.0) as model:
        going = Going(swarm, model, full)
        going.say()
        forward, slow = Span.forward, going.route[index].span

        def slowly(self, *args, **kwargs):
            if self.blocks == slow.blocks:
                time.sleep(6)
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(Span, "forward", slowly)
        with pytest.raises(StepTimeout, match="step_timeout_s") as late:
            going.say()
        assert late.value.peer == going.peers[index]


def test_a_hop_whose_processor_is_stuck_is_replaced(going, monkeypatch):
    monkeypatch.setattr(watch_module, "WEDGED_S", 1.0)
    going.say()
    done = threading.Event()
    going.route[1]._executor.submit(done.wait, lambda _: None)
    try:
        going.say()
    finally:
        done.set()
    assert going.route_now()[1] != going.peers[1]


def block_edge(server):
    """It connects to nobody any more, and what it has sent to others does not arrive."""

    async def connect(remote, addresses):
        raise Unreachable(remote.peer, tuple(addresses), 0.0, "blocked")

    server.handler.dialer.connect = connect
    for session in server.handler.sessions.values():
        if session.next is not None:
            session.next.send = lambda *_: None


def relayed(going):
    return [index for index in range(len(going.route)) if going.session().live.is_relayed(index)]


def test_an_edge_that_swallows_what_is_sent_goes_through_the_client_and_nobody_is_blamed(going):
    going.say()
    block_edge(going.route[0])
    for tokens in (1, 1, 5, 1):
        going.say(tokens)
    assert going.route_now() == going.peers
    assert relayed(going) == [0]
    assert going.failures() == []


def test_an_edge_that_cannot_be_opened_goes_through_the_client_from_the_start(checkpoint, full):
    with inprocess(checkpoint, "0:2", "2:4", "4:6") as swarm, swarm.client() as model:
        block_edge(swarm.servers[1])
        going = Going(swarm, model, full)
        for tokens in (1, 5, 1):
            going.say(tokens)
        assert relayed(going) == [1]
        assert going.failures() == []


def test_the_past_is_replayed_through_the_client_where_the_edge_is_blocked(checkpoint, full):
    with inprocess(checkpoint, "0:2", "2:4", "4:6", "2:4") as swarm, swarm.client() as model:
        going = Going(swarm, model, full)
        going.say(4)
        in_loop(swarm, lambda: block_edge(going.route[0]))
        crash(swarm, going.route[1])
        for tokens in (1, 3):
            going.say(tokens)
        assert relayed(going) == [0]


def test_an_edge_that_breaks_once_is_connected_again(going):
    going.say()
    hosted = next(iter(going.route[0].handler.sessions.values()))
    in_loop(going.swarm, lambda: hosted.next.close())  # noqa: PLW0108 - another one by then
    going.say()
    assert going.route_now() == going.peers
    assert relayed(going) == []
    assert going.failures() == []


def test_a_server_that_leaves_is_left_between_two_steps(going):
    going.say()
    leaver = going.route[1]
    left = going.swarm.loop.run(drained(leaver))
    assert left
    assert going.route_now()[1] != going.peers[1]
    going.say()
    assert going.failures() == []


async def drained(server):
    await server.handler.drain(10.0)
    return not server.handler.sessions


def test_a_server_that_leaves_serves_on_while_nobody_can_take_over(checkpoint, full):
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client() as model:
        going = Going(swarm, model, full)
        swarm.loop.start(going.route[1].handler.drain(10.0))
        for _ in range(3):
            going.say()
        assert going.route_now() == going.peers


@pytest.mark.parametrize("retry_after_s", [1.0, 20.0])
def test_a_session_moves_to_where_there_is_room(going, monkeypatch, retry_after_s):
    monkeypatch.setattr("swarm.server.session.RETRY_AFTER_S", retry_after_s)
    going.say()
    full_up = going.route[1]
    full_up.pool.capacity = full_up.pool.used
    began = time.monotonic()
    going.say()
    assert time.monotonic() - began < 5
    assert going.route_now()[1] != going.peers[1]
    assert going.failures() == []


@pytest.mark.parametrize("index", [0, 1])
def test_a_hop_may_die_while_a_step_waits_for_room(going, index):
    going.say()
    servers = [going.route[1], next(s for s in going.swarm.servers[1::2] if s is not going.route[1])]
    room = [server.pool.capacity for server in servers]
    for server in servers:
        server.pool.capacity = server.pool.used

    def turn():
        crash(going.swarm, going.route[index])
        for server, tokens in zip(servers, room, strict=True):
            server.pool.capacity = tokens

    timer = threading.Timer(0.5, turn)  # who has no room says: a second
    timer.start()
    began = time.monotonic()
    going.say()
    assert time.monotonic() - began < 10
    assert going.route_now()[index] != going.peers[index]


def test_a_hop_whose_past_came_but_half_gets_it_anew(checkpoint, full, monkeypatch):
    """The source of the past dies while a replacement further on is rebuilding from it."""
    monkeypatch.setattr("swarm.protocol.journal.CHUNK_BYTES", 4 * 64 * 4)  # many pieces
    with inprocess(checkpoint, "0:2", "2:4", "4:6", "2:4", "4:6") as swarm, swarm.client() as model:
        going = Going(swarm, model, full)
        going.say(9)
        middle, last = going.route[1], going.route[2]
        pieces = []
        handler = middle.handler
        replay_on = handler._replay_on

        def half(session, replay):
            result = list(replay)
            pieces.append(len(result))
            session.replay = iter(result[: len(result) // 2])
            replay_on(session, session.replay)
            session.closed = True
            handler._tell = lambda *_: None
            handler.dialer.close = handler.dialer.close
            for channel in list(middle.listener.admission.channels):
                channel.close()

        handler._replay_on = half
        crash(swarm, last)
        going.say()
        assert pieces[0] > 2
        assert not {middle.me.identity.peer_id, last.me.identity.peer_id} & set(going.route_now())
        going.say(3)


def test_a_step_that_arrives_twice_or_out_of_order_changes_nothing(going, monkeypatch):
    session = going.session()
    monkeypatch.setattr("swarm.client.session.chunks.CHUNK_BYTES", 64 * 4)  # one position a chunk
    send, held, seen = session.live.send, [], set()

    def shuffled(index, message, sent=None):
        if isinstance(message, wire.Step) and message.step % 3 == 0 and message.step not in seen:
            seen.add(message.step)
            held.append((index, message, sent))
            return
        send(index, message, sent)
        send(index, message, sent)
        for late in held:
            send(*late)
        held.clear()

    monkeypatch.setattr(session.live, "send", shuffled)
    going.say(8)
    monkeypatch.undo()
    going.say()
    assert going.route_now() == going.peers


def test_two_threads_in_one_session_take_turns(going):
    session = going.cache._session
    hidden = torch.randn(1, 3, 64)
    keep = going.cache.length
    outputs = {}

    def work(name):
        arguments = {"keep": keep, "rows": None, "want": 3}
        outputs[name] = [session.step(Activations(hidden), **arguments) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = outputs["a"][0]
    assert all(torch.equal(output, first) for name in "ab" for output in outputs[name])


def test_a_server_that_connects_slowly_gets_a_second_chance(checkpoint, full):
    with inprocess(checkpoint, "0:6") as swarm, swarm.client() as model:
        dialer = model.backend.membership.sessions.dialer
        connect, times = dialer.connect, []

        async def slow(*arguments):
            times.append(time.monotonic())
            await asyncio.sleep((CONNECT_S[1] + CONNECT_S[2]) / 2)  # too long for the first time
            return await connect(*arguments)

        dialer.connect = slow
        with torch.no_grad():
            assert same_logits(model(ONE).logits, full(ONE).logits)
        assert len(times) == 2


def test_hops_that_cannot_be_connected_are_found_out_together(checkpoint, full):
    with inprocess(checkpoint, "0:3", "3:6", "0:3", "3:6") as swarm, swarm.client() as model:
        dialer = model.backend.membership.sessions.dialer
        connect, asked = dialer.connect, []
        dead = set()

        async def some(remote, addresses):
            asked.append(remote.peer)
            if len(dead) < 2 or remote.peer in dead:
                dead.add(remote.peer)
                await asyncio.sleep(60)
            return await connect(remote, addresses)

        dialer.connect = some
        with torch.no_grad():
            assert same_logits(model(ONE).logits, full(ONE).logits)
        assert len(set(asked)) == len(asked) == 4, "nobody is asked twice"


@pytest.mark.parametrize("index", [0, 1])
def test_the_only_holder_is_connected_anew_when_its_connection_has_died(checkpoint, full, index):
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client() as model:
        going = Going(swarm, model, full)
        going.say()
        channel = going.session().live.legs[index].channel
        channel.send = channel.receive = lambda *_: None  # as on a path that drops every packet
        going.say()
        assert going.route_now() == going.peers
        assert going.session().live.legs[index].channel is not channel


def test_what_one_session_learns_the_next_one_knows(going):
    going.say()
    stall(going.route[0])
    going.say()
    other = going.model.new_cache()
    began = time.monotonic()
    with torch.no_grad():
        going.model(ONE, past_key_values=other)
    assert time.monotonic() - began < 2
    assert going.route_now()[0] != going.peers[0]
    other.close()
    going.cache.close()
    alive = [server for server in going.swarm.servers if server is not going.route[0]]
    eventually(lambda: all(not server.handler.sessions for server in alive))
