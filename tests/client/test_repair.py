"""Hops die in the middle of things, over real sockets, and the text comes out as if nothing had happened.

Stalls, waits, full caches and deaths in worse moments are played on a virtual clock: tests/simulation/test_faults.py.
"""

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from swarm.client.session.limits import RecoveryLimits, SessionLimits
from swarm.errors import NoRoute
from swarm.net.address import parse
from tests.client.test_session import IDS, eventually
from tests.support.inprocess import inprocess
from tests.support.logits import same_logits
from tests.support.proxy import ByteProxy

ONE = IDS[:1, :12]
SPANS = ("0:2", "2:4", "4:6")


class After(StoppingCriteria):
    """Does something once, after so many tokens, and never stops a generation."""

    def __init__(self, tokens, action):
        self.left, self._action = tokens, action

    def __call__(self, ids, scores, **_):
        self.left -= 1
        if self.left == 0:
            self._action()
        return torch.zeros(len(ids), dtype=torch.bool)


def settings(*criteria, **more):
    return {
        "max_new_tokens": 12,
        "pad_token_id": 0,
        "eos_token_id": None,
        "do_sample": False,
        "stopping_criteria": StoppingCriteriaList(criteria),
        **more,
    }


def route_of(swarm, model):
    """The servers that the model's route runs through, in order."""
    by_peer = {server.me.identity.peer_id: server for server in swarm.servers}
    return [by_peer[hop.peer_id] for hop in model.route]


def leases(servers):
    return [(len(server.handler.sessions), server.memory.used) for server in servers]


@pytest.mark.parametrize(
    "victims",
    [pytest.param([1], marks=pytest.mark.long), [0, 2], pytest.param([0, 1, 2], marks=pytest.mark.long)],
    ids=str,
)
def test_any_hops_may_die_while_tokens_come(checkpoint, full, victims):
    struck = []

    def strike():
        struck.extend(route_of(swarm, model)[index] for index in victims)
        for server in struck:
            swarm.crash(server)

    with inprocess(checkpoint, *SPANS, *SPANS) as swarm, swarm.client() as model:
        got = model.generate(ONE, **settings(After(3, strike)))
        assert torch.equal(got, full.generate(ONE, **settings()))
        assert struck
        assert not set(struck) & set(route_of(swarm, model))
        alive = [server for server in swarm.servers if server not in struck]
        eventually(lambda: leases(alive) == [(0, 0)] * len(alive))


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param({"num_beams": 3}, marks=pytest.mark.long),
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.8},
        pytest.param({"prompt_lookup_num_tokens": 3}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_hop_may_die_in_every_way_of_generating(checkpoint, full, mode):
    with inprocess(checkpoint, *SPANS, "2:4") as swarm, swarm.client() as model:
        death = After(3, lambda: swarm.crash(route_of(swarm, model)[1]))
        torch.manual_seed(5)
        got = model.generate(ONE, **settings(death, **mode))
        assert death.left <= 0
        torch.manual_seed(5)
        assert torch.equal(got, full.generate(ONE, **settings(**mode)))


def test_padded_batch_survives_with_its_mask_and_positions(checkpoint, full):
    ids, mask = IDS[:, :14], torch.ones(2, 14, dtype=torch.long)
    mask[0, :6] = 0
    with inprocess(checkpoint, "0:3", "3:6", "3:6") as swarm, swarm.client() as model, torch.no_grad():
        cache = model.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache)
        swarm.crash(route_of(swarm, model)[1])
        more = torch.cat([mask, torch.ones(2, 2, dtype=torch.long)], dim=1)
        got = model(ids[:, :2], attention_mask=more, past_key_values=cache).logits
        local = full(ids, attention_mask=mask, use_cache=True).past_key_values
        expected = full(ids[:, :2], attention_mask=more, past_key_values=local).logits
    assert (got - expected).abs().max() < 1e-4  # the past was computed in one piece, perhaps in other pieces here


def test_two_spans_take_over_from_one(checkpoint, full):
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client() as model, torch.no_grad():
        cache = model.new_cache()
        model(ONE, past_key_values=cache)
        first = route_of(swarm, model)[0]
        swarm.serve("0:1")
        swarm.serve("1:4")
        swarm.crash(first)
        got = model(ONE[:, :1], past_key_values=cache).logits
        local = full(ONE, use_cache=True).past_key_values
        expected = full(ONE[:, :1], past_key_values=local).logits
        assert [str(hop.blocks) for hop in model.route] == ["0:1", "1:3", "3:6"]
    assert torch.equal(got, expected)


def test_replay_contains_rollbacks_and_gathers(checkpoint, full):
    with inprocess(checkpoint, "0:3", "3:6", "3:6") as swarm, swarm.client() as model, torch.no_grad():
        cache = model.new_cache()
        model(IDS[:, :10], past_key_values=cache)
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([1, 0]))
        model(IDS[:, 10:12], past_key_values=cache)
        cache.crop(-1)
        swarm.crash(route_of(swarm, model)[1])
        got = model(IDS[:, 12:13], past_key_values=cache).logits
        swapped = torch.cat([IDS[[1, 0], :7], IDS[:, 10:11], IDS[:, 12:13]], dim=1)
        expected = full(swapped).logits[:, -1:]
    assert (got - expected).abs().max() < 1e-4


def test_replay_is_untouched_by_later_writes_to_the_callers_buffers(checkpoint, full):
    with inprocess(checkpoint, "0:6") as swarm, swarm.client() as model, torch.no_grad():
        cache, embed, parts = model.new_cache(), model.get_input_embeddings(), ONE.split(4, dim=1)
        embeds, positions = torch.empty_like(embed(parts[0])), torch.empty_like(parts[0])
        for index, part in enumerate(parts):
            embeds.copy_(embed(part))
            positions.copy_(torch.arange(4)[None] + 4 * index + 3)  # not those that are counted: they travel
            if index == len(parts) - 1:
                swarm.serve("0:6")
                swarm.crash(swarm.servers[0])
            got = model(inputs_embeds=embeds, position_ids=positions, past_key_values=cache).logits
        assert same_logits(got, full(ONE, position_ids=torch.arange(3, 15)[None]).logits[:, -4:])


@pytest.mark.long
def test_hop_that_died_without_a_replacement_is_named(checkpoint):
    limits = SessionLimits(recovery=RecoveryLimits(holders_s=3.0))
    with inprocess(checkpoint, "0:3", "3:6") as swarm, swarm.client(limits=limits) as model, torch.no_grad():
        cache = model.new_cache()
        model(IDS, past_key_values=cache)
        last = swarm.servers[-1]
        swarm.crash(last)
        with pytest.raises(NoRoute, match="3:6") as caught:
            model(IDS[:, :1], past_key_values=cache)
    assert last.me.identity.peer_id in str(caught.value)


def test_edge_that_cannot_be_opened_goes_through_the_client(checkpoint, full):
    last = []

    def target():
        address = parse(last[0].data_address)
        return address.host, address.port

    with inprocess(checkpoint, "0:2", "2:4") as swarm, ByteProxy(target, links_max=1) as proxy:
        last.append(swarm.serve("4:6", announce=(proxy.address,)))
        with swarm.client() as model:
            got = model.generate(ONE, **settings())
            avoidance = model.backend.membership.sessions.avoidance
            _, before, behind = model.route
            assert avoidance.blocked((before.process, behind.process))
            assert avoidance.failures == {}
    assert torch.equal(got, full.generate(ONE, **settings()))
    assert proxy.refused
