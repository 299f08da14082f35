"""Sessions over real channels: chunks, leases, refusals, and servers that are started again."""

import copy
import dataclasses
import gc
import socket
import threading
import time

import pytest
import torch
from transformers import DynamicCache

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.session.limits import ChunkLimits, ConnectLimits, SessionLimits
from swarm.dht.records import Span
from swarm.errors import PromptTooLong, UsageError
from swarm.identity import Identity
from tests.support.inprocess import inprocess
from tests.support.logits import same_logits

IDS = torch.randint(3, 120, (2, 50), generator=torch.Generator().manual_seed(3))


def eventually(condition, within_s=5.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)


def leases(swarm):
    return [(len(server.handler.sessions), server.pool.used) for server in swarm.servers]


def chunks_of(positions):
    """Limits of a client that cuts long steps of two rows into messages of so many positions."""
    return SessionLimits(chunks=ChunkLimits(chunk_bytes=2 * positions * 64 * 4))


def test_prefill_in_chunks_equals_the_prefill_in_one(swarm, full):
    with swarm.client(limits=chunks_of(3)) as model, torch.no_grad():
        assert same_logits(model(IDS).logits, full(IDS).logits)  # sums in another order: many small products for one


def test_padded_prefill_in_chunks_continues_token_by_token(swarm, full):
    mask = torch.ones_like(IDS)
    mask[0, :20] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    with swarm.client(limits=chunks_of(7)) as model:
        assert torch.equal(model.generate(IDS, **arguments), full.generate(IDS, **arguments))


@pytest.mark.parametrize("hidden", [0, 5], ids=["all shown", "some hidden"])
def test_a_mask_that_hides_others_of_the_past_is_refused_and_nothing_is_lost(model, full, hidden):
    tail, n = IDS[:, :2], IDS.shape[1]
    mask = torch.ones(2, n + 2, dtype=torch.int64)
    mask[0, :hidden] = 0
    other = mask.clone()
    other[0, 3 : hidden + 4] = 0
    with torch.no_grad():
        past = model(IDS, attention_mask=mask[:, :n]).past_key_values
        for wrong in (other, 1 - mask):
            with pytest.raises(UsageError, match="attention_mask hides other tokens"):
                model(tail, attention_mask=wrong, past_key_values=past)
        past.crop(-3)
        past.reorder_cache(torch.tensor([1, 0]))
        mine = model(tail, attention_mask=mask[[1, 0], : n - 1], past_key_values=past).logits
        same = full(IDS[[1, 0], : n - 3], attention_mask=mask[[1, 0], : n - 3]).past_key_values
        assert same_logits(mine, full(tail, attention_mask=mask[[1, 0], : n - 1], past_key_values=same).logits)


def test_every_lease_is_back_after_a_generation(swarm, model):
    model.generate(IDS, max_new_tokens=4, pad_token_id=0)
    eventually(lambda: leases(swarm) == [(0, 0)] * 3)


def test_collected_cache_frees_its_leases(swarm, model):
    cache = model.new_cache()
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    assert leases(swarm) == [(1, 100)] * 3
    del cache
    eventually(lambda: leases(swarm) == [(0, 0)] * 3)


def test_session_refuses_to_outgrow_what_it_was_opened_for(model):
    cache = model.new_cache(max_length=10)
    with torch.no_grad():
        model(IDS[:, :8], past_key_values=cache)
        with pytest.raises(PromptTooLong, match="10"):
            model(IDS[:, 8:12], past_key_values=cache)
        model(IDS[:, 8:10], past_key_values=cache)  # the refusal cost nothing
    assert cache.length == 10


@pytest.mark.parametrize("rollback_max", [-1, 4097])
def test_rollback_beyond_every_servers_limit_is_refused_at_once(model, rollback_max):
    with pytest.raises(UsageError, match="4096"), model.inference_session(rollback_max=rollback_max):
        pass
    with model.inference_session(rollback_max=4096):
        assert model(IDS[:, :2]).logits.shape[1] == 2


def test_rollback_and_gather_travel_with_the_next_step(model, full):
    remote, local = model.new_cache(), DynamicCache(config=full.config)
    with torch.no_grad():
        for cache, runs in ((remote, model), (local, full)):
            runs(IDS, past_key_values=cache)
            cache.crop(-7)
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 3, 2]))
        got = model(IDS[:1, :4].expand(3, -1), past_key_values=remote).logits
        expected = full(IDS[:1, :4].expand(3, -1), past_key_values=local).logits
    assert same_logits(got, expected)


def test_two_threads_in_one_session_take_turns(model):
    session = model.backend.open_session(Blocks(0, 6), positions_max=64, rollback_max=8)
    session.step(Activations(torch.randn(1, 12, 64)), keep=0, rows=None, want=1)
    hidden, outputs = torch.randn(1, 3, 64), {}

    def work(name):
        outputs[name] = [session.step(Activations(hidden), keep=12, rows=None, want=3) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.close()
    first = outputs["a"][0]
    assert all(torch.equal(output, first) for name in "ab" for output in outputs[name])


def replaced(backend, **traits):
    """The same backend of a model with other traits."""
    other = copy.copy(backend)
    other.traits = dataclasses.replace(backend.traits, **traits)
    return other


def test_model_that_declares_ten_million_positions_works(model, monkeypatch):
    """A message cannot say so many."""
    monkeypatch.setattr(model, "backend", replaced(model.backend, positions_max=10_485_760))
    cache = model.new_cache()
    model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
    assert cache.length == 3
    cache.close()


class Interrupted:
    """A session of which each step's output is lost: an interrupt hits its owner right behind it."""

    def __init__(self, session):
        self._session, self.close = session, session.close

    def step(self, activations, **arguments):
        self._session.step(activations, **arguments)
        raise KeyboardInterrupt


def test_interrupt_right_after_a_session_opened_leaves_no_lease(swarm, model, monkeypatch):
    backend, open_session = copy.copy(model.backend), model.backend.open_session
    backend.open_session = lambda *bounds, **more: Interrupted(open_session(*bounds, **more))
    monkeypatch.setattr(model, "backend", backend)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(IDS)
    gc.collect()
    eventually(lambda: leases(swarm) == [(0, 0)] * 3)


# Servers


def test_server_without_room_is_asked_until_there_is_some(checkpoint, full):
    with inprocess(checkpoint, "0:3") as swarm, torch.no_grad():
        small = swarm.serve("3:6", cache_tokens=120)
        with swarm.client() as one, swarm.client() as two:
            cache = one.new_cache()
            one(IDS, past_key_values=cache)  # 100 of the 120 tokens
            timer = threading.Timer(0.3, cache.close)
            timer.start()
            assert same_logits(two(IDS[:1]).logits, full(IDS[:1]).logits)
            timer.join()
        eventually(lambda: small.pool.used == 0)


def test_hop_that_never_answers_is_left_out_of_routes(swarm, full):
    """Its addresses are tried one after the other, for longer than opening may take."""
    silent = Identity.generate()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        swarm.client(limits=SessionLimits(connect=ConnectLimits(connect_s=(0.3, 0.5, 0.5)))) as model,
    ):
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        facts = {"public_key": silent.public_key.hex(), "addresses": (address,) * 2, "decode_tps": 1e6}
        claim = swarm.servers[0].announcement("online").model_copy(update=facts | {"blocks": Span(0, 6)})
        directory = swarm.directory(silent)
        swarm.loop.run(directory.announce(claim))
        try:
            with torch.no_grad():
                assert torch.allclose(model(input_ids=IDS).logits, full(input_ids=IDS).logits, atol=1e-4)
            assert silent.peer_id not in {hop.peer_id for hop in model.route}
        finally:
            swarm.loop.run(directory.withdraw())


def test_server_that_was_started_again_is_found_at_once(checkpoint, full):
    """Though the client has read the directory a moment ago, and knows its former process only."""
    first, second = Identity.generate(), Identity.generate()
    with inprocess(checkpoint) as swarm, torch.no_grad():
        swarm.serve("0:3", identity=first)
        swarm.serve("3:6", identity=second)
        with swarm.client() as model:
            expected = full(input_ids=IDS).logits
            assert torch.allclose(model(input_ids=IDS, use_cache=False).logits, expected, atol=1e-4)
            swarm.loop.run(swarm.servers[1].stop())
            swarm.serve("3:6", identity=second)
            assert torch.allclose(model(input_ids=IDS, use_cache=False).logits, expected, atol=1e-4)


def test_a_step_may_want_nothing_back(model):
    session = model.backend.open_session(Blocks(0, 6), positions_max=8, rollback_max=0)
    try:
        assert session.step(Activations(torch.randn(2, 3, 64)), keep=0, rows=None, want=0).shape == (2, 0, 64)
    finally:
        session.close()
