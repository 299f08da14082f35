"""What servers show to a probe: real sessions, addresses at which nobody is, servers that only shake hands."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from random import Random

import pytest
import torch

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.dht.records import Announcement
from swarm.identity import Identity
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Endpoint
from swarm.net.gate import PROGRESS
from swarm.net.limits import DialerLimits
from swarm.net.listener import Listener
from swarm.net.noise import ChannelKey
from swarm.protocol.messages import Open, Opened, Output, Refused, Step
from swarm.protocol.naming import new_name
from swarm.protocol.tensors import meta_of
from swarm.server.probes import ProbeLimits, Prober, steps_of
from swarm.server.proofs import ProofLimits, Proofs, Shown, callees
from tests.model.rings import save_family
from tests.support.inprocess import NETWORK, inprocess

PATIENT = ProbeLimits(open_s=60.0, answer_s=60.0)  # a slow machine computes a step in seconds


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    with inprocess(save_family("llama", tmp_path_factory.mktemp("swarm") / "tiny"), "0:3", "3:6") as swarm:
        yield swarm


@asynccontextmanager
async def prober(swarm, limits: ProbeLimits = PATIENT):
    me = Endpoint(Identity.generate(), ChannelKey(), NETWORK)
    size = swarm.checkpoint.traits.hidden_size
    dialer = partial(Dialer, me, limits=DialerLimits(timeout_s=60.0))
    prober = Prober(dialer, partial(new_name, me.identity.peer_id), size, limits)
    try:
        yield prober
    finally:
        await prober.close()


def looked(swarm, *looks: list[Announcement], limits: ProofLimits | None = None, probes: ProbeLimits = PATIENT):
    """What one server knows after each look."""

    async def look():
        async with prober(swarm, probes) as probing:
            proofs = Proofs(probing, Random(1), limits or ProofLimits(look_s=120.0))
            return [dict(await proofs.look(servers)) for servers in looks]

    return swarm.loop.run(look())


def records(swarm):
    """The announcements of both servers, of one whose address nobody has, and of one that lies about its address."""
    first, second = (server.announcement("online") for server in swarm.servers)
    nobody = {"public_key": Identity.generate().public_key.hex(), "addresses": ("127.0.0.1:9",)}
    borrowed = {"public_key": Identity.generate().public_key.hex()}  # of the first server's address
    return first, second, first.model_copy(update=nobody), first.model_copy(update=borrowed)


class Peer:
    """A server that shakes hands, and does with what it is sent what a test says. seen: all messages, by kind."""

    def __init__(self, swarm, answer) -> None:
        self.identity, self.key, self.seen = Identity.generate(), ChannelKey(), []
        self._swarm, self._answer = swarm, answer

    def __enter__(self):
        self._swarm.loop.run(self._start())
        template = self._swarm.servers[0].announcement("online")
        address = f"127.0.0.1:{self._listener.address.port}"
        keys = {"public_key": self.identity.public_key.hex(), "channel_key": self.key.public.hex()}
        self.record = template.model_copy(update={**keys, "addresses": (address,), "anchors": ()})
        return self

    def __exit__(self, *_):
        self._swarm.loop.run(self._listener.close())

    async def _start(self):
        me = Endpoint(self.identity, self.key, NETWORK)
        self._listener = Listener(me, "127.0.0.1", 0)
        await self._listener.start(self._take)

    def _take(self, channel, message, activations):
        self.seen.append(message.kind)
        for reply, with_tensors in self._answer(message, activations) or ():
            channel.send(reply, with_tensors)
        return PROGRESS


def opened(message, window: int = 32):
    return Opened(session=message.session, epoch=0, window=window), None


def refuses_to_open(message, activations):
    if isinstance(message, Open):
        yield Refused(session=message.session, epoch=0, code="no_room", why="full"), None


def never_answers(message, activations):
    if isinstance(message, Open):
        yield opened(message)


def refuses_steps(message, activations):
    if isinstance(message, Open):
        yield opened(message)
    elif isinstance(message, Step):
        yield Refused(session=message.session, epoch=0, step=message.step, code="busy", why="busy"), None


def answering(make):
    def answer(message, activations):
        if isinstance(message, Open):
            yield opened(message)
        elif isinstance(message, Step):
            hidden = make(activations.hidden)
            meta = None if hidden is None else meta_of(hidden)
            output = Output(session=message.session, epoch=0, step=message.step, hidden=meta)
            yield output, None if hidden is None else Activations(hidden)

    return answer


LIARS = {
    "refuses to open": refuses_to_open,
    "never answers steps": never_answers,
    "refuses steps": refuses_steps,
    "answers nothing": answering(lambda _: None),
    "answers another shape": answering(lambda hidden: hidden[..., :-1]),
    "answers what is no number": answering(lambda hidden: torch.full_like(hidden, torch.nan)),
}


def test_servers_prove_by_steps_that_they_compute_and_others_are_silent(swarm):
    servers = records(swarm)
    (known,) = looked(swarm, servers)
    assert [known[server.public_key] > 0 for server in servers] == [True, True, False, False]


@pytest.mark.parametrize("liar", LIARS)
def test_a_server_that_shakes_hands_and_serves_nothing_is_silent(swarm, liar):
    quick = ProbeLimits(open_s=60.0, answer_s=0.5)
    with Peer(swarm, LIARS[liar]) as peer:
        (known,) = looked(swarm, [peer.record], probes=quick)
    assert known == {peer.record.public_key: 0.0}
    assert "open" in peer.seen


def test_a_server_shows_the_speed_of_its_slowest_answer(swarm):
    """It answers one step of four at once, and the others never."""

    def answer(message, activations):
        if isinstance(message, Open) or (message.kind == "step" and message.step == 1):
            yield from answering(lambda hidden: hidden)(message, activations)

    with Peer(swarm, answer) as peer:
        record = peer.record.model_copy(update={"decode_tps": None})
        (known,) = looked(swarm, [record], probes=ProbeLimits(open_s=60.0, answer_s=2.0))
    assert 0 < known[record.public_key] <= len(record.span) / 2.0


def test_a_probe_is_one_short_session_that_is_closed(swarm):
    with Peer(swarm, answering(lambda hidden: hidden)) as peer:
        record = peer.record.model_copy(update={"decode_tps": 1e6})
        looked(swarm, [record])
        for _ in range(100):
            if "close" in peer.seen:
                break
            swarm.loop.run(asyncio.sleep(0.1))
    assert peer.seen == ["open", *["step"] * ProbeLimits().steps_max, "close"]


def test_no_more_steps_are_in_flight_than_the_server_takes(swarm):
    def answer(message, activations):
        if isinstance(message, Open):
            yield opened(message, window=2)
        else:
            yield from answering(lambda hidden: hidden)(message, activations)

    with Peer(swarm, answer) as peer:
        looked(swarm, [peer.record])
    assert peer.seen.count("step") == 2


def test_a_look_that_is_cancelled_ends_its_calls(swarm):
    """As when the server stops: no task stays behind, and the probed server hears of it."""

    async def cancelled():
        async with prober(swarm) as probing:
            before = asyncio.all_tasks()
            looking = asyncio.create_task(Proofs(probing, Random(1)).look([peer.record]))
            while "step" not in peer.seen:
                await asyncio.sleep(0.01)
            looking.cancel()
            await asyncio.wait({looking})
            assert not [task for task in asyncio.all_tasks() - before if "Proofs" in repr(task.get_coro())]
            while "close" not in peer.seen:
                await asyncio.sleep(0.01)

    with Peer(swarm, never_answers) as peer:
        swarm.loop.run(asyncio.wait_for(cancelled(), 60.0))


def test_a_probe_costs_a_server_a_quarter_of_a_second_of_its_claimed_time():
    assert [steps_of(tps) for tps in (None, 0.1, 8.0, 40.0, 100.0, 1e9)] == [4, 4, 4, 10, 25, 32]


def test_nobody_is_called_again_while_the_answer_counts(swarm):
    first, _, nobody, _ = records(swarm)
    away = first.model_copy(update={"addresses": ("127.0.0.1:9",)})
    there = nobody.model_copy(update={"public_key": nobody.public_key, "addresses": first.addresses})
    before, after = looked(swarm, [first, nobody], [away, there])
    assert before == after
    assert before[first.public_key] > 0 == before[nobody.public_key]


def test_a_silent_server_is_called_again_after_a_while(swarm):
    first, *_ = records(swarm)
    away = first.model_copy(update={"addresses": ("127.0.0.1:9",)})
    before, after = looked(swarm, [away], [first], limits=ProofLimits(silent_s=0.0, look_s=120.0))
    assert before == {first.public_key: 0.0}
    assert after[first.public_key] > 0


def test_a_server_that_has_moved_is_probed_again(swarm):
    with Peer(swarm, answering(lambda hidden: hidden)) as peer:
        moved = peer.record.model_copy(update={"blocks": (1, 3)})
        *_, known = looked(swarm, [peer.record], [peer.record], [moved], [moved])
    assert peer.seen.count("open") == 2
    assert known[peer.record.public_key] > 0


def test_those_that_move_leave_half_of_the_probes_to_others():
    limits = ProofLimits(probes_max=4)
    spans = {f"{i}": Blocks(0, 2) for i in range(40)}
    moved = {f"{i}": Shown(9.0, Blocks(2, 4), 9.0) for i in range(20)}
    called = callees(spans, moved | {"39": Shown(0.0, Blocks(2, 4), 9.0)}, Random(1), limits)
    assert moved.keys() > set(called[:2])
    assert set(called) == spans.keys() - {"39"}
    assert moved.keys() - set(called[2:]) == set(called[:2])
    thirds = {callees(spans, moved, Random(seed), limits)[2] in moved for seed in range(20)}
    assert thirds == {True, False}  # either kind comes behind those two


@pytest.mark.parametrize(("bound", "known"), [({"calls_max": 2}, 2), ({"probes_max": 1}, 1)])
def test_a_look_is_bounded(swarm, bound, known):
    first, second, *_ = records(swarm)
    with Peer(swarm, answering(lambda hidden: hidden)) as peer:
        limits = ProofLimits(look_s=120.0, at_once_max=1, **bound)
        (shown,) = looked(swarm, [first, second, peer.record], limits=limits)
    assert len(shown) == known


def test_who_joins_for_ever_is_silent(swarm):
    joining = records(swarm)[0].model_copy(update={"state": "joining", "addresses": ()})
    assert looked(swarm, [joining]) == [{}]
    assert looked(swarm, [joining], [joining], limits=ProofLimits(joining_s=-1.0))[-1] == {joining.public_key: 0.0}
