"""Hops die in the middle of things, and the text comes out as if nothing had happened."""

import copy
import threading
import time

import pytest
import torch

from swarm.activations import Activations
from swarm.client.session import session as session_module
from swarm.errors import HopFailed, NoRoute
from swarm.identity import Identity
from swarm.net.gate import PROGRESS
from tests.client.test_session import IDS, eventually
from tests.support.inprocess import inprocess
from tests.support.logits import same_logits

ONE = IDS[:1, :12]


class Assassin:
    """A streamer that crashes servers when so many tokens have come."""

    def __init__(self, swarm, victims, after=3):
        self._swarm, self._victims, self._after, self._seen = swarm, victims, after, -1
        self.done = False

    def put(self, value):
        del value
        self._seen += 1
        if self._seen == self._after:
            self.strike()

    def strike(self):
        for victim in self._victims:
            crash(self._swarm, victim)
        self.done = True

    def end(self):
        pass


def crash(swarm, server):
    """What clients and neighbours see of a process that is killed; its record stays until it expires."""

    async def vanish():
        for session in server.handler.sessions.values():
            session.closed = True
        server.handler._tell = lambda *_: None
        await server.listener.close()
        await server.handler.dialer.close()

    swarm.loop.run(vanish())


def settings(**more):
    return {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, "do_sample": False, **more}


def used_twins(swarm, model):
    """The servers that the model's route runs through, in order."""
    by_peer = {server.me.identity.peer_id: server for server in swarm.servers}
    return [by_peer[hop.peer_id] for hop in model.route]


@pytest.mark.parametrize("victims", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]], ids=str)
def test_any_hops_may_die_while_tokens_come(checkpoint, full, victims):
    spans = ["0:2", "2:4", "4:6"]
    with inprocess(checkpoint, *spans, *spans) as swarm, swarm.client() as model:
        model.generate(ONE, **settings(max_new_tokens=1))
        route = used_twins(swarm, model)
        assassin = Assassin(swarm, [route[index] for index in victims])
        # the route is planned anew for every session; with nothing measured it is the same again
        got = model.generate(ONE, streamer=assassin, **settings())
        assert assassin.done
        assert torch.equal(got, full.generate(ONE, **settings()))
        assert not {route[index].me.identity.peer_id for index in victims} & {hop.peer_id for hop in model.route}


@pytest.mark.parametrize(
    "mode",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.8},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_a_hop_may_die_in_every_way_of_generating(checkpoint, full, mode, monkeypatch):
    with inprocess(checkpoint, "0:2", "2:4", "4:6", "2:4") as swarm, swarm.client() as model:
        model.generate(ONE, **settings(max_new_tokens=1))
        assassin = Assassin(swarm, [used_twins(swarm, model)[1]])
        steps = 0
        step = session_module.Session.step

        async def watched(self, *args, **kwargs):
            nonlocal steps
            steps += 1
            if steps == 4:
                for victim in assassin._victims:
                    await die(victim)
                assassin.done = True
            return await step(self, *args, **kwargs)

        async def die(server):
            import asyncio

            def doing():
                asyncio.run_coroutine_threadsafe(vanish(server), swarm.loop._loop).result(5)

            await asyncio.get_running_loop().run_in_executor(None, doing)

        monkeypatch.setattr(session_module.Session, "step", watched)
        torch.manual_seed(5)
        got = model.generate(ONE, **settings(**mode))
        monkeypatch.undo()
        assert assassin.done
        torch.manual_seed(5)
        assert torch.equal(got, full.generate(ONE, **settings(**mode)))


async def vanish(server):
    server.handler._tell = lambda *_: None
    await server.listener.close()
    await server.handler.dialer.close()


def test_a_padded_batch_survives_with_its_mask_and_positions(checkpoint, full):
    ids, mask = IDS[:, :14], torch.ones(2, 14, dtype=torch.long)
    mask[0, :6] = 0
    with inprocess(checkpoint, "0:3", "3:6", "3:6") as swarm, swarm.client() as model:
        cache = model.new_cache()
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            crash(swarm, used_twins(swarm, model)[1])
            more = torch.cat([mask, torch.ones(2, 2, dtype=torch.long)], dim=1)
            got = model(ids[:, :2], attention_mask=more, past_key_values=cache).logits
            local = full(ids, attention_mask=mask, use_cache=True).past_key_values
            expected = full(ids[:, :2], attention_mask=more, past_key_values=local).logits
        assert (got - expected).abs().max() < 1e-4  # the past was computed in one piece, perhaps in other pieces here


def test_a_hop_may_die_while_a_long_prefill_is_under_way(checkpoint, full, monkeypatch):
    monkeypatch.setattr("swarm.client.session.chunks.CHUNK_BYTES", 2 * 2 * 64 * 4)  # 25 chunks
    with inprocess(checkpoint, "0:2", "2:4", "4:6", "2:4") as swarm, swarm.client() as model:
        model.generate(ONE, **settings(max_new_tokens=1))
        victim = used_twins(swarm, model)[1]
        transmitted = 0
        transmit = session_module.Session._transmit

        def watched(self, flight):
            nonlocal transmitted
            transmitted += 1
            if transmitted == 12:
                import asyncio

                asyncio.run_coroutine_threadsafe(vanish(victim), swarm.loop._loop).result(5)
            transmit(self, flight)

        monkeypatch.setattr(session_module.Session, "_transmit", watched)
        with torch.no_grad():
            got = model(IDS).logits
            expected = full(IDS).logits
        assert transmitted > 25
        assert (got - expected).abs().max() < 1e-4


def test_two_spans_take_over_from_one(checkpoint, full):
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client() as model:
        cache = model.new_cache()
        with torch.no_grad():
            model(ONE, past_key_values=cache)
            first = used_twins(swarm, model)[0]
            swarm.serve("0:1")
            swarm.serve("1:4")
            crash(swarm, first)
            got = model(ONE[:, :1], past_key_values=cache).logits
            local = full(ONE, use_cache=True).past_key_values
            expected = full(ONE[:, :1], past_key_values=local).logits
        assert [str(hop.blocks) for hop in model.route] == ["0:1", "1:3", "3:6"]
        assert torch.equal(got, expected)


def test_a_dropped_journal_only_means_that_more_is_computed_again(checkpoint, full):
    with inprocess(checkpoint, "0:2", "2:4", "4:6", "4:6") as swarm, swarm.client() as model:
        cache = model.new_cache()
        with torch.no_grad():
            model(ONE, past_key_values=cache)
            _, middle, last = used_twins(swarm, model)

            async def drop():
                for session in middle.handler.sessions.values():
                    session.drop_journal()

            swarm.loop.run(drop())
            crash(swarm, last)
            got = model(ONE[:, :1], past_key_values=cache).logits
            local = full(ONE, use_cache=True).past_key_values
            expected = full(ONE[:, :1], past_key_values=local).logits
        assert same_logits(got, expected)


def test_journals_stay_within_their_memory(checkpoint, full):
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client() as model:
        first = swarm.servers[0].handler
        cache = model.new_cache()
        with torch.no_grad():
            model(ONE, past_key_values=cache)
        assert first.journals.used == ONE.numel() * 64 * 4
        first.journals.capacity = first.journals.used
        with torch.no_grad():
            got = model(ONE[:, :1], past_key_values=cache).logits
            local = full(ONE, use_cache=True).past_key_values
            assert same_logits(got, full(ONE[:, :1], past_key_values=local).logits)
        assert first.journals.used == 0
        cache.close()
        eventually(lambda: not first.sessions)
        assert first.journals.used == 0


@pytest.mark.parametrize("journal", [True, False])
def test_a_hop_that_kept_no_outputs_has_them_in_its_journal_or_has_its_past_computed_again(checkpoint, full, journal):
    with inprocess(checkpoint, "0:3", "3:6", "3:6") as swarm, swarm.client() as model:
        swarm.servers[0].handler.outputs.capacity = 0
        if not journal:
            swarm.servers[0].handler.journals.capacity = 0
        cache = model.new_cache()
        with torch.no_grad():
            model(ONE, past_key_values=cache)
            first, last = used_twins(swarm, model)
            (session,) = first.handler.sessions.values()
            swallowed = crash_at_next_step(swarm, last)
            got = model(ONE[:, :1], past_key_values=cache).logits
            assert swallowed
            local = full(ONE, use_cache=True).past_key_values
            assert same_logits(got, full(ONE[:, :1], past_key_values=local).logits)
        assert session in first.handler.sessions.values()
        assert session.generation == (0 if journal else 1)


def crash_at_next_step(swarm, server):
    """Let a server crash when a step comes. Returns where the step will be found."""
    handler, swallowed = server.handler, []

    def on_step(_channel, step, _tensors):
        swallowed.append(step)
        handler._on_step = lambda *_: PROGRESS
        handler._tell = lambda *_: None
        swarm.loop._loop.create_task(vanish())
        return PROGRESS

    async def vanish():
        await server.listener.close()
        await handler.dialer.close()

    handler._on_step = on_step
    return swallowed


def test_a_rollback_and_a_gather_before_the_failure_are_in_the_replay(checkpoint, full):
    with inprocess(checkpoint, "0:3", "3:6", "3:6") as swarm, swarm.client() as model:
        cache = model.new_cache()
        with torch.no_grad():
            model(IDS[:, :10], past_key_values=cache)
            cache.crop(-3)
            cache.reorder_cache(torch.tensor([1, 0]))
            model(IDS[:, 10:12], past_key_values=cache)
            cache.crop(-1)
            crash(swarm, used_twins(swarm, model)[1])
            got = model(IDS[:, 12:13], past_key_values=cache).logits
            swapped = torch.cat([IDS[[1, 0], :7], IDS[:, 10:11], IDS[:, 12:13]], dim=1)
            expected = full(swapped).logits[:, -1:]
        assert (got - expected).abs().max() < 1e-4


def test_the_past_is_replayed_as_it_was_though_the_caller_writes_to_its_buffers_again(checkpoint, full):
    with inprocess(checkpoint, "0:6") as swarm, swarm.client() as model, torch.no_grad():
        cache, embed, parts = model.new_cache(), model.get_input_embeddings(), ONE.split(4, dim=1)
        embeds, positions = torch.empty_like(embed(parts[0])), torch.empty_like(parts[0])
        for index, part in enumerate(parts):
            embeds.copy_(embed(part))
            positions.copy_(torch.arange(4)[None] + 4 * index + 3)  # not those that are counted: they travel
            if index == len(parts) - 1:
                swarm.serve("0:6")
                crash(swarm, swarm.servers[0])
            got = model(inputs_embeds=embeds, position_ids=positions, past_key_values=cache).logits
        assert same_logits(got, full(ONE, position_ids=torch.arange(3, 15)[None]).logits[:, -4:])


def test_without_anybody_to_take_over_the_blocks_are_named(checkpoint):
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client() as model:
        cache = model.new_cache()
        with torch.no_grad():
            model(ONE, past_key_values=cache)
            crash(swarm, used_twins(swarm, model)[1])
            began = time.monotonic()
            with pytest.raises((NoRoute, HopFailed), match="3:6"):
                model(ONE[:, :1], past_key_values=cache)
        assert time.monotonic() - began < 20


def test_a_generation_waits_for_somebody_to_come_back(checkpoint, full):
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client(wait_for_blocks_s=20.0) as model:
        cache = model.new_cache()
        with torch.no_grad():
            model(ONE, past_key_values=cache)
            crash(swarm, used_twins(swarm, model)[1])
            timer = threading.Timer(1.5, swarm.serve, ("3:6",))
            timer.start()
            began = time.monotonic()
            got = model(ONE[:, :1], past_key_values=cache).logits
            assert time.monotonic() - began > 1
            timer.join()
            local = full(ONE, use_cache=True).past_key_values
            assert same_logits(got, full(ONE[:, :1], past_key_values=local).logits)


@pytest.mark.parametrize("began", [False, True])
def test_blocks_are_waited_for_though_others_serve_a_model_of_this_name(checkpoint, full, began):
    with inprocess(checkpoint, "0:6") as swarm, swarm.client(wait_for_blocks_s=20.0) as model, torch.no_grad():
        cache, (holder,) = model.new_cache(), swarm.servers
        said = ONE if began else ONE[:, :0]
        if began:
            model(said, past_key_values=cache)
        withdraw_and_claim_its_name(swarm, holder)
        crash(swarm, holder)
        timer = threading.Timer(1.5, swarm.serve, ("0:6",))
        timer.start()
        got = model(IDS[1:2], past_key_values=cache).logits
        timer.join()
        expected = full(torch.cat([said, IDS[1:2]], dim=1)).logits[:, said.shape[1] :]
        assert same_logits(got, expected)


def withdraw_and_claim_its_name(swarm, server):
    """The server's record goes; somebody announces other weights under the same name."""
    claim, stranger = server.announcement("online"), Identity.generate()
    facts = {"public_key": stranger.public_key.hex(), "root": "11" * 32}

    async def announce():
        directory = swarm.directory(server.me.identity)
        await directory.announce(claim)
        await directory.withdraw()
        await swarm.directory(stranger).announce(claim.model_copy(update=facts))

    swarm.loop.run(announce())


def test_leases_are_back_after_a_repaired_generation(checkpoint):
    with inprocess(checkpoint, "0:3", "3:6", "3:6") as swarm, swarm.client() as model:
        model.generate(ONE, **settings(max_new_tokens=1))
        victim = used_twins(swarm, model)[1]
        model.generate(ONE, streamer=Assassin(swarm, [victim]), **settings())
        alive = [server for server in swarm.servers if server is not victim]
        eventually(lambda: all((len(s.handler.sessions), s.pool.used) == (0, 0) for s in alive))


def test_a_journal_folds_and_still_tells_the_past():
    from swarm.protocol.journal import Entry, Journal, JournalLimits, Past

    generator = torch.Generator().manual_seed(1)
    journal, expected, step = Journal(), torch.zeros(2, 0, 3), 0
    for step in range(1, 3 * JournalLimits().steps_unfolded_max):
        keep, rows = expected.shape[1], None
        if step % 7 == 0:
            keep = max(0, keep - 2)
        if step % 11 == 0:
            rows = tuple(torch.randint(0, 2, (2,), generator=generator).tolist())
        hidden = torch.randn(2, 1 + step % 2, 3, generator=generator)
        journal.add(Entry(step, rows, Past(keep, Activations(hidden))))
        kept = expected[:, :keep]
        expected = torch.cat([kept[list(rows)] if rows else kept, hidden], dim=1)
        before_last = copy.copy(expected)
    pieces = journal.past_after(step)
    assert torch.equal(torch.cat([piece.in_order().activations.hidden for piece in pieces], dim=1), before_last)
    assert len(journal._entries) <= JournalLimits().steps_unfolded_max


def test_a_wait_may_be_as_long_as_it_likes(checkpoint, full, monkeypatch):
    monkeypatch.setattr(session_module, "WAIT_POLL_S", 0.001)  # the server that comes needs the interpreter, too
    looks = 0
    wait = session_module.Session._wait_for_somebody

    async def counted(self, mending, nobody):
        nonlocal looks
        looks += 1
        if looks == 1200:
            swarm.serve_later("0:6")
        await wait(self, mending, nobody)

    monkeypatch.setattr(session_module.Session, "_wait_for_somebody", counted)
    with inprocess(checkpoint) as swarm, swarm.client(wait_for_blocks_s=60.0, step_timeout_s=60.0) as model:
        swarm.serve_later = lambda blocks: threading.Thread(target=swarm.serve, args=(blocks,)).start()
        with torch.no_grad():
            assert same_logits(model(ONE).logits, full(ONE).logits)
    assert looks >= 1200
