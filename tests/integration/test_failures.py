"""What people see when servers die, leave, fill up or are started twice."""

import asyncio
import json
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarm.client.session.limits import ChunkLimits, RecoveryLimits, SessionLimits
from swarm.demo.local import LocalProcess, LocalSwarm, Place, launch
from swarm.dht.directory import Directory
from swarm.dht.node import NodeConfig, open_node
from swarm.errors import NoRoute, Refused
from swarm.model.checkpoint import open_checkpoint
from swarm.net.p2p import P2PConfig
from tests.support import warm
from tests.support.often import rest_is_long
from tests.support.swarms import NETWORK, World, environment, eventually, prompt, world

TREE = Path(__file__).parents[2]
SAME = {"pad_token_id": 0, "eos_token_id": None}
POOL_TOKENS = 64  # for one alone: the pool is larger by an eighth
RELEASED_AFTER_S = 0.4
SOON_S = 5.0  # after that, what is announced has not been on its way when p2pd was killed
REFRESH_WITHIN_S = 40.0  # an announcement is refreshed every 20 s


@pytest.fixture(scope="module")
def two_hops(checkpoint: Callable[[str], Path], home: Path) -> Iterator[World]:
    """A swarm whose last blocks' servers are to be broken: a test begins with `holders`."""
    with world(checkpoint("llama"), home, spans=("0:3",)) as running:
        yield running


def holders(world: World, count: int) -> list[LocalProcess]:
    """Let there be so many servers of the last blocks; whatever was done to earlier ones."""
    serving = [server for server in world.swarm.servers[1:] if server.process.poll() is None]
    started = [world.swarm.start_server("3:6") for _ in range(count - len(serving))]
    for server in serving[count:]:
        server.stop()
    return [server.wait_ready() for server in (*serving[:count], *started)]


@pytest.fixture(scope="module")
def small(checkpoint: Callable[[str], Path], home: Path) -> Iterator[World]:
    """One server with little room for keys and values."""
    with world(
        checkpoint("llama"), home, spans=("0:6",), options=("--cache-tokens", str(POOL_TOKENS * 9 // 8))
    ) as running:
        yield running


class After:
    """A streamer that does something after some tokens."""

    def __init__(self, tokens: int, action: Callable[[], object]):
        self.left, self.action = tokens, action

    def put(self, value: Tensor):
        self.left -= 1
        if self.left == 0:
            self.action()

    def end(self):
        pass


@pytest.mark.long
def test_without_anybody_to_take_over_a_killed_server_is_a_named_error_until_the_next_one_comes(two_hops: World):
    (victim,) = holders(two_hops, 1)
    limits = SessionLimits(recovery=RecoveryLimits(holders_s=1.0))  # a dead server stays announced
    model = two_hops.client(limits=limits)
    began = time.monotonic()
    with pytest.raises(NoRoute) as nobody:
        model.generate(prompt(1, 6), max_new_tokens=200, streamer=After(5, victim.kill), **SAME)
    assert nobody.value.missing == (3, 4, 5)
    assert victim.ready["peer_id"] in str(nobody.value)
    assert time.monotonic() - began < 20

    replacement = two_hops.swarm.start_server("3:6").wait_ready()
    got = model.generate(prompt(1, 6), max_new_tokens=8, **SAME)  # the dead one's record is still there for a while
    assert torch.equal(got, two_hops.full.generate(prompt(1, 6), max_new_tokens=8, **SAME))
    assert model.route[1].peer_id == replacement.ready["peer_id"]


@pytest.mark.parametrize("number", rest_is_long([signal.SIGKILL, signal.SIGSTOP], [signal.SIGKILL]))
def test_a_server_that_dies_or_stalls_in_the_middle_is_replaced_and_the_text_is_the_same(
    two_hops: World, number: signal.Signals
):
    holders(two_hops, 2)  # either may be used, and the other takes over
    model = two_hops.client()
    struck = []

    def strike():
        struck.append(used_last(two_hops, model))
        struck[0].process.send_signal(number)

    try:
        began = time.monotonic()
        got = model.generate(prompt(1, 6), max_new_tokens=40, streamer=After(5, strike), **SAME)
        assert torch.equal(got, two_hops.full.generate(prompt(1, 6), max_new_tokens=40, **SAME))
        assert time.monotonic() - began < 20
        assert model.route[1].peer_id != struck[0].ready["peer_id"]
    finally:
        if number == signal.SIGSTOP:
            struck[0].process.send_signal(signal.SIGCONT)


def test_a_server_that_is_asked_to_stop_hands_its_sessions_on_before_it_goes(two_hops: World):
    holders(two_hops, 2)
    model = two_hops.client()
    asked = []

    def stop_in_the_middle():
        asked.append(used_last(two_hops, model))
        asked[0].ask_to_stop()
        eventually(lambda: '"leaving"' in asked[0].log.read_text(), within_s=SOON_S)  # else it might be done before

    got = model.generate(prompt(1, 6), max_new_tokens=40, streamer=After(5, stop_in_the_middle), **SAME)
    assert torch.equal(got, two_hops.full.generate(prompt(1, 6), max_new_tokens=40, **SAME))
    (used,) = asked
    assert model.route[1].peer_id != used.ready["peer_id"]
    assert used.process.wait(timeout=20) == 0
    events = [json.loads(line) for line in used.log.read_text().splitlines() if line.startswith("{")]
    leaving = next(number for number, event in enumerate(events) if event["event"] == "leaving")
    assert events[leaving]["sessions"] == 1
    assert [event["sessions"] for event in events[leaving + 1 :] if event["event"] == "session ended"] == [0]
    assert not any("still has sessions" in event["event"] for event in events)


def used_last(world: World, model: PreTrainedModel) -> LocalProcess:
    """The server that runs the last blocks of the running generation."""
    peer = model.route[1].peer_id
    return next(server for server in world.swarm.servers if server.ready["peer_id"] == peer)


async def test_a_server_that_is_asked_to_stop_withdraws_and_leaves_nothing_behind(two_hops: World):
    (leaving,) = holders(two_hops, 1)
    peer = leaving.ready["peer_id"]
    children = psutil.Process(leaving.process.pid).children(recursive=True)
    assert len(children) == 1  # p2pd
    async with reading(two_hops) as announced:
        assert peer in await announced()
        leaving.ask_to_stop()
        assert await asyncio.to_thread(leaving.process.wait, 20) == 0
        assert not any(running(child) for child in children)
        assert peer not in await announced(), "its record would have lived for 60 s"


@asynccontextmanager
async def reading(world: World) -> AsyncIterator[Callable[[], Awaitable[dict[str, float]]]]:
    """What the DHT says, whenever it is asked: the peer ids of all servers, and when their records were issued."""
    opened = open_checkpoint(world.directory)
    config = NodeConfig(NETWORK, P2PConfig(identity=None, listen=None), world.swarm.initial_peers)
    async with open_node(config, clock=time.time) as node:
        directory = Directory(node, identity=None, network=NETWORK, clock=time.time)

        async def announced() -> dict[str, float]:
            found = [signed.announcement for signed in await directory.servers(opened.root, opened.n_blocks)]
            return {announcement.peer_id: announcement.issued for announcement in found}

        yield announced


@pytest.mark.long
def test_a_step_waits_for_room_and_goes_on_when_there_is_some(small: World):
    holder, waiting = small.client(), small.client()
    held = holder(prompt(1, POOL_TOKENS - 10)).past_key_values
    began = time.monotonic()
    threading.Timer(RELEASED_AFTER_S, held.close).start()
    got = waiting.generate(prompt(1, 20), max_new_tokens=4, **SAME)
    assert RELEASED_AFTER_S < time.monotonic() - began < 15
    assert torch.equal(got, small.full.generate(prompt(1, 20), max_new_tokens=4, **SAME))


@pytest.mark.long
def test_a_prefill_of_which_a_part_finds_no_room_goes_on_when_there_is_some(small: World):
    chunks = ChunkLimits(chunk_bytes=6 * small.full.config.hidden_size * 4)
    holder, waiting = small.client(), small.client(limits=SessionLimits(chunks=chunks))
    held = holder(prompt(1, POOL_TOKENS - 20)).past_key_values  # 12 of the next ones fit: a page; 18 do not
    began = time.monotonic()
    threading.Timer(RELEASED_AFTER_S, held.close).start()
    got = waiting.generate(prompt(1, 40), max_new_tokens=4, **SAME)
    assert time.monotonic() - began > RELEASED_AFTER_S
    assert torch.equal(got, small.full.generate(prompt(1, 40), max_new_tokens=4, **SAME))


@pytest.mark.long
def test_a_step_that_finds_no_room_until_its_deadline_says_so(small: World):
    holder, waiting = small.client(), small.client(step_timeout_s=2.5)
    held = holder(prompt(1, POOL_TOKENS - 10)).past_key_values
    began = time.monotonic()
    with pytest.raises(Refused) as refused:
        waiting.generate(prompt(1, 20), max_new_tokens=4, **SAME)
    assert refused.value.code == "no_room"
    assert refused.value.peer == small.swarm.servers[0].ready["peer_id"]
    assert "160 more tokens are likely not to fit, 7 do" in str(refused.value)
    assert time.monotonic() - began < 20
    held.close()
    got = waiting.generate(prompt(1, 20), max_new_tokens=4, **SAME)
    assert torch.equal(got, small.full.generate(prompt(1, 20), max_new_tokens=4, **SAME))


def test_a_second_process_on_the_same_identity_is_refused(small: World):
    taken = small.swarm.folder / "server-0.identity"
    second = small.swarm.start_server("0:6", "--identity", str(taken))
    assert second.process.wait(timeout=60) == 2
    last = second.log.read_text().strip().splitlines()[-1]
    assert str(taken) in last
    assert "another process uses the identity" in last


@pytest.mark.parametrize("refreshed", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_p2pd_that_is_killed_is_replaced_and_the_server_stays_announced(two_hops: World, refreshed: bool):
    """refreshed: wait, for up to twenty seconds, until the server announces itself anew, through the new p2pd."""
    (server,) = holders(two_hops, 1)
    process = psutil.Process(server.process.pid)
    (before,) = process.children(recursive=True)
    killed_at = time.time()
    before.send_signal(signal.SIGKILL)

    def replacement() -> list[psutil.Process]:
        return [child for child in process.children(recursive=True) if child != before and running(child)]

    eventually(replacement, within_s=15)
    with two_hops.client() as model:
        got = model.generate(prompt(1, 6), max_new_tokens=3, **SAME)
    assert torch.equal(got, two_hops.full.generate(prompt(1, 6), max_new_tokens=3, **SAME))
    async with reading(two_hops) as announced:
        issued = (await announced())[server.ready["peer_id"]]
        while refreshed and issued <= killed_at + SOON_S:  # a refresh has reached the DHT through the new p2pd
            assert time.time() - killed_at < REFRESH_WITHIN_S
            await asyncio.sleep(0.2)
            issued = (await announced())[server.ready["peer_id"]]


@pytest.mark.long
async def test_a_server_that_cannot_compute_any_more_withdraws_and_ends_with_an_error(
    checkpoint: Callable[[str], Path], home: Path
):
    def failing(place: Place, module: str, arguments: Sequence[str], *rest: Any) -> subprocess.Popen[bytes]:
        return launch(place, "tests.support.failing_server" if "3:6" in arguments else module, arguments, *rest)

    limits = SessionLimits(recovery=RecoveryLimits(holders_s=1.0))
    env = {"PYTHONPATH": str(TREE), "SWARM_TEST_STEPS": "5"}
    with world(checkpoint("llama"), home, ("0:3", "3:6"), env=env, launch=failing) as swarm:
        failing_one = swarm.swarm.servers[1]
        with pytest.raises(NoRoute) as nobody:
            await asyncio.to_thread(swarm.client(limits=limits).generate, prompt(1, 6), max_new_tokens=20, **SAME)
        assert nobody.value.missing == (3, 4, 5)
        assert await asyncio.to_thread(failing_one.process.wait, 10) == 1
        assert "the compute thread has ended: MemoryError('no memory for the scheduler')" in failing_one.last_lines()
        async with reading(swarm) as announced:
            assert failing_one.ready["peer_id"] not in await announced(), "its record would have lived for 60 s"


@pytest.mark.parametrize("command", rest_is_long(["swarm-serve", "swarm-bootstrap"], ["swarm-serve"]))
def test_a_command_killed_with_9_leaves_no_child(command: str, checkpoint: Callable[[str], Path], home: Path):
    with LocalSwarm(checkpoint("llama"), env=environment(home), launch=warm.launch) as swarm:
        victim = swarm.start_server("0:1").wait_ready() if command == "swarm-serve" else swarm.bootstrap
        children = psutil.Process(victim.process.pid).children(recursive=True)
        assert children
        for child in children:
            child.suspend()  # so that it cannot notice by itself
        victim.kill()
        eventually(lambda: not any(running(child) for child in children), within_s=5)


def running(process: psutil.Process) -> bool:
    """Whether a process lives; one that has ended and was not waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
