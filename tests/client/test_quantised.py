"""Routes of servers with int8 weights: what is computed depends on the weights alone."""

from contextlib import contextmanager

import pytest
import torch
from structlog.testing import capture_logs

from swarm.blocks import Blocks
from swarm.client import AutoDistributedModel
from swarm.client.hf import auto
from swarm.client.planning.preferences import Preferences
from swarm.client.session.limits import RecoveryLimits, SessionLimits
from swarm.errors import BadConfiguration, NoRoute
from swarm.identity import Identity
from swarm.model.checkpoint import open_checkpoint
from swarm.model.eightbits import is_supported
from swarm.model.loading import load_ends, load_span
from tests.client.test_repair import ONE, After, route_of, settings
from tests.support.inprocess import inprocess
from tests.support.logits import same_logits

pytestmark = pytest.mark.skipif(not is_supported(), reason="torch has no integer kernels for this processor")

NOWHERE = ["/ip4/127.0.0.1/tcp/1/p2p/" + Identity.generate().peer_id]
CUTS = ("0:2", "2:4", "4:6")


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Text and logits of one server that has all blocks."""
    with inprocess(checkpoint) as swarm:
        swarm.serve("0:6", quantize="int8")
        with swarm.client() as model, torch.no_grad():
            return model.generate(ONE, **settings()), model(ONE).logits


def test_wherever_a_route_is_cut_the_text_is_the_same(checkpoint, alone):
    with inprocess(checkpoint) as swarm:
        for blocks in CUTS:
            swarm.serve(blocks, quantize="int8")
        with swarm.client() as model, torch.no_grad():
            assert torch.equal(model.generate(ONE, **settings()), alone[0])
            got = model(ONE).logits
            assert {str(server.span.numeric_class) for server in route_of(swarm, model)} == {"float32+int8"}
    assert (got - alone[1]).norm() < 1e-3 * alone[1].norm()


def test_local_blocks_of_int8_compute_what_a_server_of_them_does(checkpoint, alone):
    with inprocess(checkpoint) as swarm:
        swarm.serve("2:6", quantize="int8")
        with swarm.client(local_blocks=2, quantize="int8") as model, torch.no_grad():
            assert torch.equal(model.generate(ONE, **settings()), alone[0])
            got = model(ONE).logits
        with swarm.client(local_blocks=2) as model, torch.no_grad():
            plain = model(ONE).logits
    assert (got - alone[1]).norm() < 1e-3 * alone[1].norm()
    assert (plain - alone[1]).norm() > 2 * (got - alone[1]).norm()


@pytest.mark.parametrize(("quantize", "weights"), [("none", None), ("int8", "int8"), ("auto", "int8")])
def test_a_client_says_what_its_local_blocks_become(quantize, weights, checkpoint, monkeypatch):
    asked = []

    def load_span(_checkpoint, blocks, **options):
        asked.append((str(blocks), options["quantize"]))
        raise InterruptedError

    monkeypatch.setattr(auto, "load_span", load_span)
    with pytest.raises(InterruptedError):
        AutoDistributedModel.from_pretrained(checkpoint, initial_peers=NOWHERE, local_blocks=2, quantize=quantize)
    assert asked == [("0:2", weights)]


@pytest.mark.parametrize(("quantize", "local_blocks"), [("int8", 0), ("int3", 2)])
def test_weights_that_cannot_be_are_refused_at_once(quantize, local_blocks, checkpoint):
    options = {"initial_peers": NOWHERE, "quantize": quantize, "local_blocks": local_blocks}
    with pytest.raises(BadConfiguration, match="quantize"):
        AutoDistributedModel.from_pretrained(checkpoint, **options)


def test_hops_may_die_while_tokens_come(checkpoint, alone):
    struck = []

    def strike():
        struck.extend(route_of(swarm, model)[:2])
        for server in struck:
            swarm.crash(server)

    with inprocess(checkpoint) as swarm:
        for blocks in CUTS * 2:
            swarm.serve(blocks, quantize="int8")
        with swarm.client() as model:
            got = model.generate(ONE, **settings(After(3, strike)))
            assert struck
            assert not set(struck) & set(route_of(swarm, model))
    assert torch.equal(got, alone[0])


@contextmanager
def mixed(checkpoint):
    """Run servers of float32, int8 and bfloat16 in one route."""
    with inprocess(checkpoint, "0:2") as swarm:
        swarm.serve("2:4", quantize="int8")
        swarm.serve("4:6", dtype=torch.bfloat16)
        yield swarm


def by_hand(checkpoint, *spans):
    """Logits of ONE through spans of these blocks, dtypes and weights, one after the other."""
    opened, ends = open_checkpoint(checkpoint), load_ends(open_checkpoint(checkpoint), dtype=torch.float32)
    hidden = ends.get_input_embeddings()(ONE)
    for blocks, dtype, quantize in spans:
        span = load_span(opened, Blocks.parse(blocks), dtype=dtype, quantize=quantize)
        hidden = span.forward(hidden.to(dtype), cache=None)
    return ends.get_output_embeddings()(ends.model.norm(hidden.float()))


def test_a_route_mixes_classes_of_one_tier(checkpoint):
    parts = ("0:2", torch.float32, None), ("2:4", torch.float32, "int8"), ("4:6", torch.bfloat16, None)
    with mixed(checkpoint) as swarm, swarm.client() as model, torch.no_grad():
        assert model.generate(ONE, **settings()).shape == (1, ONE.shape[1] + 12)
        assert [hop.numeric_class for hop in model.route] == ["float32", "float32+int8", "bfloat16"]
        assert model.exactness == "tier"
        printed = repr(model.route)
        assert printed.startswith("3 hops in float32, float32+int8, bfloat16")
        assert "exactness 'tier': " in printed
        got = model(ONE).logits
        assert got.dtype == torch.float32
        assert same_logits(got, by_hand(checkpoint, *parts))


@pytest.mark.long
def test_a_client_in_bfloat16_uses_servers_in_float32(checkpoint):
    with mixed(checkpoint) as swarm, swarm.client(dtype=torch.bfloat16) as model, torch.no_grad():
        assert model.generate(ONE, **settings()).shape == (1, ONE.shape[1] + 12)
        assert model(ONE).logits.dtype == torch.bfloat16


@pytest.mark.long
def test_a_repair_takes_the_same_class_although_another_is_quicker(checkpoint):
    def strike():
        struck = route_of(swarm, model)[1]
        swarm.serve("2:6")
        swarm.serve("2:4", quantize="int8")
        swarm.crash(struck)

    with mixed(checkpoint) as swarm, swarm.client() as model:
        death = After(3, strike)
        model.generate(ONE, **settings(death))
        assert death.left <= 0
        assert [hop.numeric_class for hop in model.route] == ["float32", "float32+int8", "bfloat16"]
        assert model.exactness == "tier"
        assert "another class" not in model.route.explain()


@pytest.mark.long
def test_a_repair_in_another_class_is_told(checkpoint):
    with inprocess(checkpoint, "0:2", "4:6") as swarm:
        rounded = swarm.serve("2:4", quantize="int8")
        with swarm.client() as model:

            def strike():
                assert model.exactness == "tokens"
                swarm.serve("2:4")
                swarm.crash(rounded)

            with capture_logs() as logs:
                death = After(3, strike)
                got = model.generate(ONE, **settings(death))
            assert death.left <= 0
            assert got.shape == (1, ONE.shape[1] + 12)
            assert [hop.numeric_class for hop in model.route] == ["float32"] * 3
            assert model.exactness == "tier"
            (told,) = [log["why"] for log in logs if log["event"] == "repaired in another numeric class"]
            assert told == f"blocks 2:4 were in float32+int8 until position {ONE.shape[1] + 2}, and are in float32"
            assert f"repaired in another class: {told}" in model.route.explain()
            model.generate(ONE, **settings())  # another session, of one class
            assert model.exactness == "tokens"


def test_an_exact_route_refuses_to_mix(checkpoint):
    with (
        mixed(checkpoint) as swarm,
        swarm.client(preferences=Preferences(exact=True)) as model,
        pytest.raises(NoRoute, match=r"exact mixes none \(bfloat16, float32, float32\+int8\)"),
    ):
        model.generate(ONE, **settings())


def test_an_exact_repair_refuses_to_cross_classes(checkpoint):
    exact, limits = Preferences(exact=True), SessionLimits(recovery=RecoveryLimits(holders_s=5.0))

    def strike():
        swarm.serve("2:4")
        swarm.crash(route_of(swarm, model)[1])

    with inprocess(checkpoint) as swarm:
        for blocks in CUTS:
            swarm.serve(blocks, quantize="int8")
        with swarm.client(preferences=exact, limits=limits) as model:
            death = After(3, strike)
            with pytest.raises(NoRoute, match=r"nobody serves them in float32\+int8, but in float32"):
                model.generate(ONE, **settings(death))
            assert death.left <= 0
