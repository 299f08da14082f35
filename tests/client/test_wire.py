"""Sessions whose activations travel coded, over real sockets: what is computed depends on the codes alone."""

import pytest
import torch

from swarm.client.planning.router import RouterLimits
from swarm.client.session.limits import RecoveryLimits, SessionLimits
from swarm.errors import NoRoute
from swarm.net.address import parse
from swarm.protocol.int8 import decode_int8, encode_int8
from tests.client.test_repair import After, route_of, settings
from tests.client.test_session import IDS
from tests.support.inprocess import inprocess
from tests.support.proxy import ByteProxy

ONE = IDS[:1, :12]
CUTS = ("0:2", "2:4", "4:6")


def coded(swarm, *spans):
    return [swarm.serve(blocks, coding="int8") for blocks in spans]


def rounded(hidden):
    return decode_int8(memoryview(bytearray(encode_int8(hidden))), hidden.dtype, tuple(hidden.shape))


@pytest.fixture
def local(full):
    """The stock model, with the coding where the hops of CUTS meet."""

    def hook(_, args, kwargs):
        if args:
            return (rounded(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": rounded(kwargs["hidden_states"])}

    places = [full.model.layers[0], full.model.layers[2], full.model.layers[4], full.model.norm]
    handles = [place.register_forward_pre_hook(hook, with_kwargs=True) for place in places]
    yield full
    for handle in handles:
        handle.remove()


def test_text_is_that_of_the_model_with_the_coding_where_hops_meet(checkpoint, local):
    with inprocess(checkpoint) as swarm:
        coded(swarm, *CUTS)
        with swarm.client(coding="int8") as model, torch.no_grad():
            assert torch.equal(model.generate(ONE, **settings()), local.generate(ONE, **settings()))
            got = model(ONE).logits
            assert torch.equal(got, local(ONE).logits)


def test_coding_rounds(checkpoint, full):
    with inprocess(checkpoint) as swarm:
        coded(swarm, *CUTS)
        with swarm.client(coding="int8") as model, torch.no_grad():
            got, exact = model(ONE).logits, full(ONE).logits
    assert not torch.equal(got, exact)
    assert (got - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    "victims",
    [pytest.param([1], marks=pytest.mark.long), [0, 2], pytest.param([0, 1, 2], marks=pytest.mark.long)],
    ids=str,
)
def test_hops_may_die_while_coded_tokens_come(checkpoint, local, victims):
    struck = []

    def strike():
        struck.extend(route_of(swarm, model)[index] for index in victims)
        for server in struck:
            swarm.crash(server)

    with inprocess(checkpoint) as swarm:
        coded(swarm, *CUTS, *CUTS)
        with swarm.client(coding="int8") as model:
            got = model.generate(ONE, **settings(After(3, strike)))
            assert struck
            assert not set(struck) & set(route_of(swarm, model))
    assert torch.equal(got, local.generate(ONE, **settings()))


def test_neighbours_that_die_are_replaced_where_they_met(checkpoint, local):
    """One server of both their parts would make a shorter route, and round at one place less."""

    def strike():
        swarm.serve("2:6", coding="int8")
        for server in route_of(swarm, model)[1:]:
            swarm.crash(server)

    with inprocess(checkpoint) as swarm:
        coded(swarm, *CUTS, *CUTS[1:], *CUTS[1:])  # more than it takes: a slow machine makes hops look dead
        with swarm.client(coding="int8") as model:
            model.backend.membership.router.limits = RouterLimits(survey_fresh_s=0.0, survey_age_s=0.0)
            got = model.generate(ONE, **settings(After(3, strike)))
            assert [str(hop.blocks) for hop in model.route] == list(CUTS)
    assert torch.equal(got, local.generate(ONE, **settings()))


@pytest.mark.long
def test_rollbacks_beams_and_batches_survive_a_death_coded(checkpoint, local):
    with inprocess(checkpoint) as swarm:
        coded(swarm, *CUTS, "2:4")
        with swarm.client(coding="int8") as model:
            death = After(3, lambda: swarm.crash(route_of(swarm, model)[1]))
            got = model.generate(ONE, **settings(death, num_beams=3))
            assert death.left <= 0
    assert torch.equal(got, local.generate(ONE, **settings(num_beams=3)))


@pytest.mark.long
def test_an_edge_through_the_client_is_coded_as_a_direct_one(checkpoint, local):
    last = []

    def target():
        address = parse(last[0].data_address)
        return address.host, address.port

    with inprocess(checkpoint) as swarm, ByteProxy(target, links_max=1) as proxy:
        coded(swarm, "0:2", "2:4")
        last.append(swarm.serve("4:6", announce=(proxy.address,), coding="int8"))
        with swarm.client(coding="int8") as model:
            got = model.generate(ONE, **settings())
            _, before, behind = model.route
            assert model.backend.membership.sessions.avoidance.blocked((before.process, behind.process))
    assert torch.equal(got, local.generate(ONE, **settings()))


def test_servers_without_the_coding_are_not_chosen(checkpoint):
    with inprocess(checkpoint) as swarm:
        chosen = coded(swarm, "0:3", "3:6")
        plain = swarm.serve("0:6")  # the shortest route
        with swarm.client(coding="int8") as model, torch.no_grad():
            model(ONE)
            assert route_of(swarm, model) == chosen
            said = model.route.explain()
    assert "activations travel as int8 on all edges" in said
    (row,) = [line for line in said.splitlines() if plain.me.identity.peer_id in line]
    assert "no coding" in row
    assert "without --wire" in row


def test_the_error_says_that_servers_lack_the_coding(checkpoint):
    limits = SessionLimits(recovery=RecoveryLimits(holders_s=1.0))
    with (
        inprocess(checkpoint, "0:6") as swarm,
        swarm.client(coding="int8", limits=limits) as model,
        pytest.raises(NoRoute, match="--wire int8"),
    ):
        model(ONE)


def test_servers_with_the_coding_serve_plain_sessions(checkpoint, full):
    with inprocess(checkpoint, "2:4") as swarm:
        coded(swarm, "0:2", "4:6")
        with swarm.client() as model:
            assert torch.equal(model.generate(ONE, **settings()), full.generate(ONE, **settings()))
            assert "int8" not in model.route.explain()
