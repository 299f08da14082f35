"""Routes of servers with int8 weights: what is computed depends on the weights alone."""

import pytest
import torch

from swarm.client import AutoDistributedModel
from swarm.client.hf import auto
from swarm.errors import BadConfiguration, NoRoute
from swarm.identity import Identity
from swarm.model.integer import is_supported
from tests.client.test_repair import ONE, After, route_of, settings
from tests.support.inprocess import inprocess

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


def test_classes_are_not_mixed(checkpoint):
    with inprocess(checkpoint, "0:3") as swarm:
        swarm.serve("3:6", quantize="int8")
        with swarm.client() as model, pytest.raises(NoRoute):
            model.generate(ONE, **settings())
