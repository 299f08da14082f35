"""Sessions: chunks, windows, refusals, deadlines and leases, over real channels."""

import asyncio
import copy
import dataclasses
import gc
import socket
import time

import pytest
import torch
from transformers import DynamicCache

from swarm.client.hf.runtime import LoopThread
from swarm.client.session.limits import ChunkLimits, ConnectLimits, RecoveryLimits, SessionLimits
from swarm.dht.directory import Directory
from swarm.dht.records import Span
from swarm.errors import NoRoute, PromptTooLong, UsageError
from swarm.identity import Identity
from tests.client.support import IDS, crash, eventually
from tests.support.inprocess import inprocess
from tests.support.logits import same_logits

WINDOW = 8  # steps in flight, as all hops agree


def leases(swarm):
    return [(len(server.handler.sessions), server.pool.used) for server in swarm.servers]


def chunked(swarm, positions):
    """A client that cuts steps of two rows into messages of so many positions."""
    chunk_bytes = positions * IDS.shape[0] * swarm.checkpoint.traits.hidden_size * 4
    return swarm.client(limits=SessionLimits(chunks=ChunkLimits(chunk_bytes=chunk_bytes)))


def watched(server, see):
    """Call `see(message)` with each new step that comes to a server."""

    def check(_, facts):
        see(facts.message)

    server.handler.gates = server.handler.gates.replaced("account", check)


def test_a_prefill_in_many_chunks_is_the_prefill_in_one(swarm, full):
    with chunked(swarm, 3) as model, torch.no_grad():
        expected = full(IDS).logits
        got = model(IDS).logits
    assert same_logits(got, expected)  # sums in another order: many small products for one


def test_chunks_in_flight_together_fill_at_most_the_window(checkpoint):
    with inprocess(checkpoint, "0:1", "1:4", "4:6") as swarm:
        first, _, last = swarm.servers
        in_flight = []

        def see(step):
            in_flight.append(step.step - last.handler.sessions[step.session].inbox.applied)

        watched(first, see)
        with chunked(swarm, 1) as model, torch.no_grad():
            model(IDS)
    assert len(in_flight) == IDS.shape[1]
    assert 1 < max(in_flight) <= WINDOW


def test_a_padded_prefill_in_chunks_continues_token_by_token(swarm, full):
    mask = torch.ones_like(IDS)
    mask[0, :20] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    with chunked(swarm, 7) as model:
        assert torch.equal(model.generate(IDS, **arguments), full.generate(IDS, **arguments))


def test_every_lease_is_back_after_a_generation(swarm, model):
    model.generate(IDS, max_new_tokens=4, pad_token_id=0)
    eventually(lambda: leases(swarm) == [(0, 0)] * 3)


def test_a_session_grows_no_longer_than_it_was_opened_for(model):
    cache = model.new_cache(max_length=10)
    with torch.no_grad():
        model(IDS[:, :8], past_key_values=cache)
        with pytest.raises(PromptTooLong, match="10"):
            model(IDS[:, 8:12], past_key_values=cache)
        model(IDS[:, 8:10], past_key_values=cache)  # the refusal cost nothing
    assert cache.length == 10


@pytest.mark.parametrize("rollback_max", [-1, 4097])
def test_a_rollback_too_large_is_refused_at_once(model, rollback_max):
    with pytest.raises(UsageError, match="4096"), model.inference_session(rollback_max=rollback_max):
        pass
    with model.inference_session(rollback_max=4096):
        assert model(IDS[:, :2]).logits.shape[1] == 2


def test_a_route_not_found_in_time_blames_no_hop(swarm, monkeypatch):
    async def endless(*_):
        await asyncio.sleep(3600)

    monkeypatch.setattr(Directory, "survey", endless)
    soon = SessionLimits(connect=ConnectLimits(open_s=0.3))
    with swarm.client(step_timeout_s=0.3, limits=soon) as model, torch.no_grad():
        with pytest.raises(NoRoute, match=f"{swarm.checkpoint.public_name}.* 0:6.* in time"):
            model(IDS)
        assert model.backend.membership.sessions.avoidance.failures == {}


def test_a_hop_that_ends_and_is_not_replaced_is_named(checkpoint):
    soon = SessionLimits(recovery=RecoveryLimits(holders_s=0.5))
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client(limits=soon) as model:
        cache = model.new_cache()
        with torch.no_grad():
            model(IDS, past_key_values=cache)
        last = swarm.servers[-1]
        crash(swarm, last)
        began = time.monotonic()
        with torch.no_grad(), pytest.raises(NoRoute, match="3:6") as caught:
            model(IDS[:, :1], past_key_values=cache)
        assert last.me.identity.peer_id in str(caught.value)
        assert time.monotonic() - began < 6


def test_a_collected_cache_frees_its_leases(swarm, model):
    cache = model.new_cache()
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    assert leases(swarm) == [(1, 100)] * 3
    del cache
    eventually(lambda: leases(swarm) == [(0, 0)] * 3)


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


def test_a_model_may_declare_more_positions_than_messages_say(model):
    """Some models declare ten million."""
    model.backend = replaced(model.backend, positions_max=10_485_760)
    cache = model.new_cache()
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
    assert cache.length == 3
    cache.close()


def replaced(backend, **traits):
    """The same backend of a model with other traits."""
    other = copy.copy(backend)
    other.traits = dataclasses.replace(backend.traits, **traits)
    return other


def test_a_hop_that_never_answers_leaves_the_next_route(swarm, full):
    """Its addresses are tried one after the other, for longer than opening may take."""
    soon = SessionLimits(connect=ConnectLimits(connect_s=(0.3, 0.5, 0.5)))
    silent = Identity.generate()
    with socket.create_server(("127.0.0.1", 0)) as listener, swarm.client(limits=soon) as model:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        facts = {"public_key": silent.public_key.hex(), "addresses": (address,) * 2, "decode_tps": 1e6}
        claim = swarm.servers[0].announcement("online").model_copy(update=facts | {"blocks": Span(0, 6)})
        directory = swarm.directory(silent)
        swarm.loop.run(directory.announce(claim))
        try:
            with torch.no_grad():
                assert torch.allclose(model(input_ids=IDS).logits, full(input_ids=IDS).logits, atol=1e-4)
            assert silent.peer_id not in {hop.peer_id for hop in model.route}
            (failed,) = model.backend.membership.sessions.avoidance.failures
            assert failed.startswith(silent.peer_id)
        finally:
            swarm.loop.run(directory.withdraw())


def test_a_server_that_was_started_again_is_found_at_once(checkpoint, full):
    """Though the client has read the directory a moment ago, and knows its former process only."""
    identity = Identity.generate()
    with inprocess(checkpoint, "0:3") as swarm:
        server = swarm.serve("3:6", identity=identity)
        with swarm.client() as model, torch.no_grad():
            expected = full(input_ids=IDS).logits
            assert torch.allclose(model(input_ids=IDS, use_cache=False).logits, expected, atol=1e-4)
            swarm.loop.run(server.stop())
            swarm.serve("3:6", identity=identity)
            assert torch.allclose(model(input_ids=IDS, use_cache=False).logits, expected, atol=1e-4)


def test_an_interrupt_just_after_opening_leaves_no_lease(swarm, model, monkeypatch):
    run = LoopThread.run

    def interrupted(self, work):
        run(self, work)
        monkeypatch.undo()
        raise KeyboardInterrupt  # what the work returned is lost

    monkeypatch.setattr(LoopThread, "run", interrupted)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(IDS)
    gc.collect()
    eventually(lambda: leases(swarm) == [(0, 0)] * 3)
