"""Hops die in the middle of things, and the text comes out as if nothing had happened."""

import asyncio
import threading

import pytest
import torch

from swarm.client.session.limits import ChunkLimits, RecoveryLimits, SessionLimits
from swarm.identity import Identity
from swarm.protocol.replay import Twice
from tests.client.support import IDS, crash, eventually, used_twins
from tests.support.inprocess import inprocess
from tests.support.logits import same_logits

ONE = IDS[:1, :12]
RETURNS_S = 0.3  # so much later a server is there again
TWINS = ["0:2", "2:4", "4:6"] * 2


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


class Assassin:
    """A streamer that crashes hops of the model's route, by index, when so many tokens have come."""

    def __init__(self, swarm, model, indices, after=3):
        self._swarm, self._model, self._indices = swarm, model, indices
        self._left = after + 1  # the prompt comes first
        self.victims = []

    def put(self, _):
        self._left -= 1
        if self._left == 0:
            route = used_twins(self._swarm, self._model)
            self.victims = [route[index] for index in self._indices]
            for victim in self.victims:
                crash(self._swarm, victim)

    def end(self):
        pass


def crash_at_step(servers, number=1):
    """Let the first of these servers crash that takes so many steps. Returns where it will be found."""
    crashed, tasks = [], []

    def gate(server):
        seen = 0

        def check(*_):
            nonlocal seen
            seen += 1
            if seen == number and not crashed:
                crashed.append(server)
                tasks.append(asyncio.ensure_future(vanish(server)))
            return Twice() if server in crashed else None

        return check

    for server in servers:  # "account" is the first gate that only a new step comes to
        server.handler.gates = server.handler.gates.replaced("account", gate(server))
    return crashed


async def vanish(server):
    await server.listener.close()
    await server.handler.links.dialer.close()


def settings(**more):
    return {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, "do_sample": False, **more}


def gone_on(full, said, new):
    """The logits of new positions, by the stock model."""
    past = full(said, use_cache=True).past_key_values
    return full(new, past_key_values=past).logits


@pytest.mark.parametrize("victims", [[1], [0, 2], [0, 1, 2], long([0]), long([2]), long([0, 1]), long([1, 2])], ids=str)
def test_any_hops_may_die_while_tokens_come(checkpoint, full, victims):
    with inprocess(checkpoint, *TWINS) as swarm, swarm.client() as model:
        assassin = Assassin(swarm, model, victims)
        got = model.generate(ONE, streamer=assassin, **settings())
        assert len(assassin.victims) == len(victims)
        assert torch.equal(got, full.generate(ONE, **settings()))
        assert not set(assassin.victims) & set(used_twins(swarm, model))


@pytest.mark.parametrize(
    "mode",
    [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        long({"num_beams": 2, "num_return_sequences": 2}),
        long({"do_sample": True, "temperature": 0.8}),
    ],
    ids=str,
)
def test_a_hop_may_die_in_every_way_of_generating(checkpoint, full, mode):
    with inprocess(checkpoint, "0:2", "2:4", "4:6", "2:4") as swarm, swarm.client() as model:
        crashed = crash_at_step(swarm.servers[1::2], 4)
        torch.manual_seed(5)
        got = model.generate(ONE, **settings(**mode))
        assert crashed
        torch.manual_seed(5)
        assert torch.equal(got, full.generate(ONE, **settings(**mode)))


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


def test_a_hop_may_die_during_a_long_prefill(checkpoint, full):
    in_pairs = SessionLimits(chunks=ChunkLimits(chunk_bytes=2 * 2 * 64 * 4))  # 25 chunks
    with inprocess(checkpoint, "0:2", "2:4", "4:6", "2:4") as swarm, swarm.client(limits=in_pairs) as model:
        crashed = crash_at_step(swarm.servers[1::2], 12)
        with torch.no_grad():
            got = model(IDS).logits
            expected = full(IDS).logits
        assert crashed
        assert not set(crashed) & set(used_twins(swarm, model))
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
            expected = gone_on(full, ONE, ONE[:, :1])
        assert [str(hop.blocks) for hop in model.route] == ["0:1", "1:3", "3:6"]
        assert torch.equal(got, expected)


def test_a_dropped_journal_only_costs_more_computing(checkpoint, full):
    with inprocess(checkpoint, "0:2", "2:4", "4:6", "4:6") as swarm, swarm.client() as model:
        cache = model.new_cache()
        with torch.no_grad():
            model(ONE, past_key_values=cache)
            _, middle, last = used_twins(swarm, model)
            (session,) = middle.handler.sessions.values()
            tenure = session.tenure

            async def drop():
                session.drop_journal()

            swarm.loop.run(drop())
            crash(swarm, last)
            got = model(ONE[:, :1], past_key_values=cache).logits
            assert same_logits(got, gone_on(full, ONE, ONE[:, :1]))
        assert session.tenure is not tenure  # it computes its past again, and so the next one's


def test_journals_stay_within_their_memory(checkpoint, full):
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client() as model:
        first = swarm.servers[0]
        journals, cache = first.memory.journals, model.new_cache()
        with torch.no_grad():
            model(ONE, past_key_values=cache)
        assert journals.used == ONE.numel() * 64 * 4
        journals.capacity = journals.used
        with torch.no_grad():
            got = model(ONE[:, :1], past_key_values=cache).logits
            assert same_logits(got, gone_on(full, ONE, ONE[:, :1]))
        assert journals.used == 0
        cache.close()
        eventually(lambda: not first.handler.sessions)
        assert journals.used == 0


@pytest.mark.parametrize("journal", [True, False])
def test_an_answer_not_kept_is_journalled_or_computed_again(checkpoint, full, journal):
    with inprocess(checkpoint, "0:3", "3:6", "3:6") as swarm, swarm.client() as model:
        memory = swarm.servers[0].memory
        memory.outputs.capacity = 0
        if not journal:
            memory.journals.capacity = 0
        cache = model.new_cache()
        with torch.no_grad():
            model(ONE, past_key_values=cache)
            first, last = used_twins(swarm, model)
            (session,) = first.handler.sessions.values()
            tenure = session.tenure
            crashed = crash_at_step([last])
            got = model(ONE[:, :1], past_key_values=cache).logits
            assert crashed
            assert same_logits(got, gone_on(full, ONE, ONE[:, :1]))
        assert list(first.handler.sessions.values()) == [session]
        assert (session.tenure is tenure) == journal


def test_a_rollback_and_a_gather_are_in_the_replay(checkpoint, full):
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


def test_a_caller_may_write_to_its_buffers_again(checkpoint, full):
    """The past is replayed as it was."""
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


def test_a_generation_waits_until_a_server_comes_back(checkpoint, full):
    with inprocess(checkpoint, "0:3", "3:6") as swarm, waiting_client(swarm) as model:
        cache = model.new_cache()
        with torch.no_grad():
            model(ONE, past_key_values=cache)
            crash(swarm, used_twins(swarm, model)[1])
            timer = soon(swarm, "3:6")
            got = model(ONE[:, :1], past_key_values=cache).logits
            timer.join()
            assert same_logits(got, gone_on(full, ONE, ONE[:, :1]))


def waiting_client(swarm):
    """A client that waits for blocks far longer than for a failed holder of them."""
    recovery = RecoveryLimits(holders_s=0.0, wait_first_s=0.05, wait_most_s=0.05)
    return swarm.client(wait_for_blocks_s=20.0, limits=SessionLimits(recovery=recovery))


def soon(swarm, blocks):
    """Start a server when the client has looked for one a few times."""
    timer = threading.Timer(RETURNS_S, swarm.serve, (blocks,))
    timer.start()
    return timer


@pytest.mark.parametrize("began", [False, True])
def test_other_weights_of_this_name_end_no_wait(checkpoint, full, began):
    with inprocess(checkpoint, "0:6") as swarm, waiting_client(swarm) as model, torch.no_grad():
        cache, (holder,) = model.new_cache(), swarm.servers
        said = ONE if began else ONE[:, :0]
        if began:
            model(said, past_key_values=cache)
        withdraw_and_claim_its_name(swarm, holder)
        crash(swarm, holder)
        timer = soon(swarm, "0:6")
        got = model(IDS[1:2], past_key_values=cache).logits
        timer.join()
        expected = full(torch.cat([said, IDS[1:2]], dim=1)).logits[:, said.shape[1] :]
        assert same_logits(got, expected)


def withdraw_and_claim_its_name(swarm, server):
    """Take back the server's record, and announce other weights under the same name."""
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
        assassin = Assassin(swarm, model, [1])
        model.generate(ONE, streamer=assassin, **settings())
        alive = [server for server in swarm.servers if server not in assassin.victims]
        assert len(alive) == 2
        eventually(lambda: all((len(s.handler.sessions), s.memory.used) == (0, 0) for s in alive))
