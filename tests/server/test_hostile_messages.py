"""What one peer's messages may do to a server, and to the sessions of others."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from swarm.activations import Activations
from swarm.compute.limits import SchedulerLimits
from swarm.compute.scheduler import Part
from swarm.compute.task import Forward, Place, Probe, Tenure
from swarm.compute.thread import run
from swarm.errors import ComputeFailed, InvalidMessage
from swarm.protocol.inbox import InboxLimits
from swarm.protocol.messages import Output
from swarm.protocol.receipts import Tally
from swarm.protocol.seat import Client
from swarm.protocol.tensors import TensorMeta, decode_tensors
from swarm.server.measure import Throughput
from swarm.server.outcomes import pass_on
from swarm.server.parked import Parked, ParkedLimits
from swarm.server.session import Neighbours
from tests.compute.support import Doubling
from tests.server.sites import Site, step, until

NAME = "0" * 32


def test_a_frame_that_is_padded_to_many_times_its_size_is_refused():
    shape = (1, 1 << 20, 1)
    meta = TensorMeta(dtype="bfloat16", shape=shape, coding="int8")
    with pytest.raises(InvalidMessage, match="to decode"):
        decode_tensors([meta], memoryview(bytearray(meta.sent_bytes)))
    small = TensorMeta(dtype="bfloat16", shape=(1, 3, 5), coding="int8")
    (decoded,) = decode_tensors([small], memoryview(bytearray(small.sent_bytes)))
    assert decoded.shape == (1, 3, 5)


def test_no_hop_gets_an_output_that_was_for_the_owner():
    sent = []
    peers = SimpleNamespace(owner=None, next=SimpleNamespace(send=lambda *given: sent.append(given)), early=None)
    session = SimpleNamespace(seat=SimpleNamespace(next=object(), epoch=1), peers=peers)
    assert not isinstance(session.seat.next, Client)
    pass_on(session, SimpleNamespace(message=Output(session=NAME, epoch=1, step=1), activations=None))
    assert not sent


def test_steps_before_a_connection_are_as_many_as_have_answers():
    peers = Neighbours(None, 0.0)
    peers.early.extend(range(10_000))
    assert list(peers.early) == list(range(10_000 - InboxLimits().window_steps, 10_000))


async def test_one_peer_leaves_others_room_for_first_steps():
    refused = []
    one, other = (SimpleNamespace(peer=name, send=lambda message, *_, **__: refused.append(message)) for name in "ab")
    parked, limits = Parked(), ParkedLimits()
    for index in range(limits.steps_max):
        request = SimpleNamespace(session=f"{index:032x}", epoch=1)
        parked.park(one, step(request, 1, torch.zeros(1, 1, 8))[0], Activations(torch.zeros(1, 1, 8)))
    assert len(parked) == limits.steps_max // limits.peer_share
    assert len(refused) == limits.steps_max - len(parked)
    request = SimpleNamespace(session="f" * 32, epoch=1)
    parked.park(other, step(request, 1, torch.zeros(1, 1, 8))[0], Activations(torch.zeros(1, 1, 8)))
    assert len(parked) == limits.steps_max // limits.peer_share + 1
    parked.close()


def test_a_batch_whose_look_has_no_memory_is_not_computed_again(monkeypatch):
    span = Doubling()
    tasks = [Forward(Tenure(name, span, 0), Activations(torch.ones(1, 1, 2)), Place(0)) for name in "abc"]

    def none(_):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr("swarm.compute.task.is_finite", none)
    assert run([Part(task, 1, None, True) for task in tasks]) == {}
    assert [task.tenure.past.cache.length for task in tasks] == [1, 1, 1]
    assert [task.finite for task in tasks] == [False] * 3


def test_a_tally_keeps_a_step_and_not_its_frame():
    frame = torch.zeros(64, 1, 1024)
    tally = Tally(None)
    tally.add(0, Activations(frame[3:4]), torch.zeros(1, 1, 1024))
    ((given, _),) = tally._noted
    assert given.hidden.untyped_storage().nbytes() == 4096


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_broken", [False, True])
async def test_a_server_whose_device_is_broken_ends(first: Site, monkeypatch, is_broken: bool):
    """Not so one to which peers send steps that fail."""
    first.server.throughput = Throughput(1.0, 1.0)
    tried = []

    def forward(hidden, *, cache):
        tried.append(cache)
        if is_broken:
            raise RuntimeError("an illegal memory access was encountered")
        return hidden

    monkeypatch.setattr(first.server.span, "forward", forward)
    watching = asyncio.ensure_future(first.server.watch())
    for _ in range(SchedulerLimits().failures_max):
        first.server.executor.submit(Probe(lambda: 1 / 0), lambda _: None)
    await until(lambda: len(tried) == 1)
    if is_broken:
        with pytest.raises(ComputeFailed, match="illegal memory access"):
            async with asyncio.timeout(10):
                await watching
    else:
        await asyncio.sleep(1.2)  # more than a look
        assert not watching.done()
        watching.cancel()
