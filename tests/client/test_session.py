"""Sessions: chunks, windows, refusals, deadlines and leases, over real channels."""

import asyncio
import copy
import dataclasses
import gc
import socket
import time

import pytest
import torch

from swarm.client.hf.runtime import LoopThread
from swarm.client.session import live as live_module
from swarm.client.session import session as session_module
from swarm.dht.directory import Directory
from swarm.dht.records import Span
from swarm.errors import NoRoute, PromptTooLong, Refused, StepTimeout, UsageError
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


def test_a_prefill_in_many_chunks_is_the_prefill_in_one(swarm, model, full, monkeypatch):
    monkeypatch.setattr("swarm.client.session.chunks.CHUNK_BYTES", 2 * 3 * 64 * 4)  # three positions of two rows
    with torch.no_grad():
        expected = full(IDS).logits
        got = model(IDS).logits
    assert same_logits(got, expected)  # sums in another order: many small products for one


def test_chunks_are_under_way_together_but_never_more_than_the_window(swarm, model, monkeypatch):
    monkeypatch.setattr("swarm.client.session.chunks.CHUNK_BYTES", 1)  # one position a chunk
    most = 0
    transmit = session_module.Session._transmit

    def watched(self, flight):
        nonlocal most
        most = max(most, len(self._in_flight))
        transmit(self, flight)

    monkeypatch.setattr(session_module.Session, "_transmit", watched)
    with torch.no_grad():
        model(IDS)
    assert 1 < most <= 9  # the window of 8, and the one that is just answered


def test_a_padded_prefill_in_chunks_continues_token_by_token(model, full, monkeypatch):
    monkeypatch.setattr("swarm.client.session.chunks.CHUNK_BYTES", 2 * 7 * 64 * 4)
    mask = torch.ones_like(IDS)
    mask[0, :20] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(IDS, **arguments), full.generate(IDS, **arguments))


def test_every_lease_is_back_after_a_generation(swarm, model):
    model.generate(IDS, max_new_tokens=4, pad_token_id=0)
    eventually(lambda: leases(swarm) == [(0, 0)] * 3)


def test_a_session_refuses_to_outgrow_what_it_was_opened_for(model):
    cache = model.new_cache(max_length=10)
    with torch.no_grad():
        model(IDS[:, :8], past_key_values=cache)
        with pytest.raises(PromptTooLong, match="10"):
            model(IDS[:, 8:12], past_key_values=cache)
        model(IDS[:, 8:10], past_key_values=cache)  # the refusal cost nothing
    assert cache.length == 10


@pytest.mark.parametrize("rollback_max", [-1, 4097])
def test_a_rollback_that_no_server_agrees_to_is_refused_where_it_is_asked_for(model, rollback_max):
    with pytest.raises(UsageError, match="4096"), model.inference_session(rollback_max=rollback_max):
        pass
    with model.inference_session(rollback_max=4096):
        assert model(IDS[:, :2]).logits.shape[1] == 2


def test_a_route_that_is_not_found_in_time_is_no_hop_that_failed(swarm, model, monkeypatch):
    async def endless(*_):
        await asyncio.sleep(3600)

    monkeypatch.setattr(session_module, "OPEN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(Directory, "survey", endless)
    with torch.no_grad(), pytest.raises(NoRoute, match=f"{swarm.checkpoint.public_name}.* 0:6.* in time"):
        model(IDS)


def test_a_server_without_room_is_asked_again_until_there_is_some(checkpoint, full):
    with inprocess(checkpoint, "0:3") as swarm:
        small = swarm.serve("3:6", cache_tokens=120)
        with swarm.client() as one, swarm.client() as two:
            cache = one.new_cache()
            with torch.no_grad():
                one(IDS, past_key_values=cache)  # 100 of the 120 tokens
            timer = swarm.loop._loop.call_later
            swarm.loop._loop.call_soon_threadsafe(timer, 0.5, cache.close)
            with torch.no_grad():
                got = two(IDS[:1]).logits
                assert same_logits(got, full(IDS[:1]).logits)
        eventually(lambda: small.pool.used == 0)


def test_sessions_that_are_opened_faster_than_a_peer_may_wait_their_turn(checkpoint, full, monkeypatch):
    """All hops refuse one opening at once: none of them has failed, and none is connected anew for that."""
    monkeypatch.setattr("swarm.server.accounts.OPENINGS_BURST", 2.0)
    monkeypatch.setattr("swarm.server.accounts.OPENINGS_PER_S", 4.0)
    with inprocess(checkpoint, "0:2", "2:4", "4:6") as swarm, swarm.client() as model:
        with torch.no_grad():
            expected = full(IDS).logits
            for _ in range(8):
                out = model(IDS)
                assert same_logits(out.logits, expected)
            avoided = out.past_key_values._session._session._avoidance._entries.values()
        assert not [entry for entry in avoided if entry.failures]
        peers = [channels for server in swarm.servers for channels in server.listener.admission.proven.values()]
        assert [len(channels) for channels in peers] == [1] * 5, "each hop, from the client and from the hop before it"
        del out


def test_a_server_that_never_has_room_ends_the_step_at_its_deadline(checkpoint):
    with inprocess(checkpoint, "0:3") as swarm:
        swarm.serve("3:6", cache_tokens=10)
        with swarm.client(step_timeout_s=2.0) as model:
            began = time.monotonic()
            with pytest.raises((Refused, StepTimeout), match=r"3:6"):
                model.generate(IDS[:1], max_new_tokens=2)
            assert time.monotonic() - began < 6
        eventually(lambda: leases(swarm) == [(0, 0)] * 2)


def test_a_hop_that_ends_and_that_nobody_replaces_is_named(checkpoint, monkeypatch):
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client() as model:
        cache = model.new_cache()
        with torch.no_grad():
            model(IDS, past_key_values=cache)
        last = swarm.servers[-1]
        monkeypatch.setattr(session_module, "HOLDERS_S", 0.5)

        async def crash():
            await last._listener.close()

        swarm.loop.run(crash())
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
    from transformers import DynamicCache

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


def test_a_model_that_declares_more_positions_than_a_message_can_say_works(model, monkeypatch):
    """Some models declare ten million."""
    monkeypatch.setattr(model, "backend", replaced(model.backend, positions_max=10_485_760))
    cache = model.new_cache()
    model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
    assert cache.length == 3
    cache.close()


def replaced(backend, **traits):
    """The same backend of a model with other traits."""
    other = copy.copy(backend)
    other.traits = dataclasses.replace(backend.traits, **traits)
    return other


def test_a_hop_that_never_answers_is_left_out_of_the_next_route(swarm, model, full, monkeypatch):
    """Its addresses are tried one after the other, for longer than opening may take."""
    monkeypatch.setattr(live_module, "CONNECT_S", (0.3, 0.5, 0.5))
    silent = Identity.generate()
    with socket.create_server(("127.0.0.1", 0)) as listener:
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


def test_a_server_that_was_started_again_is_found_at_once(checkpoint, full, monkeypatch):
    """Though the client has read the directory a moment ago, and knows its former process only."""
    keys = Identity.generate(), Identity.generate()
    with inprocess(checkpoint) as swarm:
        for identity, blocks in zip(keys, ("0:3", "3:6"), strict=True):
            with monkeypatch.context() as patch:
                patch.setattr(Identity, "generate", lambda identity=identity: identity)
                swarm.serve(blocks)
        with swarm.client() as model, torch.no_grad():
            expected = full(input_ids=IDS).logits
            assert torch.allclose(model(input_ids=IDS, use_cache=False).logits, expected, atol=1e-4)
            swarm.loop.run(swarm.servers[1].stop())
            with monkeypatch.context() as patch:
                patch.setattr(Identity, "generate", lambda: keys[1])
                swarm.serve("3:6")
            assert torch.allclose(model(input_ids=IDS, use_cache=False).logits, expected, atol=1e-4)


def test_an_interrupt_right_after_a_session_was_opened_leaves_no_lease(swarm, model, monkeypatch):
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
