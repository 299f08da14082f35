"""Routes of servers with int4 weights: a tier of their own, and the same text wherever they are cut."""

import shutil

import pytest
import torch

from swarm.client.auditing.auditor import AuditLimits
from swarm.client.auditing.ledger import Audits
from swarm.client.planning.preferences import Preferences
from swarm.errors import NoRoute
from swarm.model.checkpoint import open_checkpoint
from swarm.model.importance import IMPORTANCE_NAME, write_importance
from swarm.model.weighing import measured
from tests.client.test_repair import ONE, After, route_of, settings
from tests.support.inprocess import inprocess
from tests.support.swarms import eventually

ANY = Preferences(quality="any")
CUTS = ("0:2", "2:4", "4:6")


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Text and logits of one server that has all blocks."""
    with inprocess(checkpoint) as swarm:
        swarm.serve("0:6", quantize="int4")
        with swarm.client(preferences=ANY) as model, torch.no_grad():
            return model.generate(ONE, **settings()), model(ONE).logits


@pytest.mark.long
def test_wherever_a_route_is_cut_the_text_is_the_same(checkpoint, alone):
    with inprocess(checkpoint) as swarm:
        for blocks in CUTS:
            swarm.serve(blocks, quantize="int4")
        with swarm.client(preferences=ANY) as model, torch.no_grad():
            assert torch.equal(model.generate(ONE, **settings()), alone[0])
            got = model(ONE).logits
            assert {str(server.span.numeric_class) for server in route_of(swarm, model)} == {"float32+int4"}
    assert (got - alone[1]).norm() < 1e-3 * alone[1].norm()


@pytest.mark.long
def test_local_blocks_of_int4_compute_what_a_server_of_them_does(checkpoint, alone):
    with inprocess(checkpoint) as swarm:
        swarm.serve("2:6", quantize="int4")
        with swarm.client(local_blocks=2, quantize="int4", preferences=ANY) as model, torch.no_grad():
            assert torch.equal(model.generate(ONE, **settings()), alone[0])
            got = model(ONE).logits
    assert (got - alone[1]).norm() < 1e-3 * alone[1].norm()


def test_a_route_never_mixes_them_with_other_classes(checkpoint):
    with inprocess(checkpoint, "0:2", "4:6") as swarm:
        swarm.serve("2:4", quantize="int4")
        with swarm.client() as model, pytest.raises(NoRoute) as caught:
            model.generate(ONE, **settings())
        assert caught.value.missing == (2, 3)
        with swarm.client(preferences=ANY) as model, pytest.raises(NoRoute):  # of no tier are all blocks there
            model.generate(ONE, **settings())


def test_a_client_of_full_quality_takes_none_of_them_and_says_how(checkpoint):
    with inprocess(checkpoint) as swarm:
        swarm.serve("0:6", quantize="int4")
        with swarm.client() as model, pytest.raises(NoRoute, match=r"classes, float32\+int4: pass quality="):
            model.generate(ONE, **settings())


def test_hops_may_die_while_tokens_come(checkpoint, alone):
    struck = []

    def strike():
        struck.append(route_of(swarm, model)[1])
        swarm.crash(struck[0])

    with inprocess(checkpoint) as swarm:
        for blocks in (*CUTS, "2:4"):
            swarm.serve(blocks, quantize="int4")
        with swarm.client(preferences=ANY) as model:
            got = model.generate(ONE, **settings(After(3, strike)))
            assert struck
            assert not set(struck) & set(route_of(swarm, model))
    assert torch.equal(got, alone[0])


@pytest.fixture(scope="module")
def weighed(checkpoint, tmp_path_factory):
    """The same checkpoint beside the sizes of its layers' inputs, and the name of weights by them."""
    folder = tmp_path_factory.mktemp("weighed") / "model"
    shutil.copytree(checkpoint, folder)
    opened = open_checkpoint(folder)
    squares = measured(opened, torch.arange(64, dtype=torch.int32).view(2, 32))
    return folder, write_importance(str(folder), folder / IMPORTANCE_NAME, opened.root, squares).named("int4")


def test_servers_that_regard_inputs_sizes_are_a_class_of_that_tier(weighed):
    folder, weights = weighed
    with inprocess(folder) as swarm:
        swarm.serve("0:6", quantize=weights)
        with swarm.client(preferences=ANY) as model:
            expected = model.generate(ONE, **settings())
    struck = []

    def strike():
        struck.append(route_of(swarm, model)[1])
        swarm.crash(struck[0])

    with inprocess(folder) as swarm:
        for blocks in (*CUTS, "2:4"):
            swarm.serve(blocks, quantize=weights)
        with swarm.client(preferences=ANY) as model:
            assert torch.equal(model.generate(ONE, **settings(After(3, strike))), expected)
            assert struck
            assert {str(server.span.numeric_class) for server in route_of(swarm, model)} == {f"float32+{weights}"}


def test_a_route_may_have_servers_with_and_without_that_file(weighed, checkpoint):
    folder, weights = weighed
    with inprocess(folder) as swarm:
        swarm.serve("0:3", quantize=weights)
        swarm.serve("3:6", quantize="int4")
        with swarm.client(preferences=ANY) as model:
            assert model.generate(ONE, **settings()).shape[1] > ONE.shape[1]
            assert model.exactness == "tier"


@pytest.mark.parametrize(("others", "found"), [("int4", "unaudited"), (None, "agreed")])
def test_servers_that_round_otherwise_are_no_witnesses(others, found, weighed):
    folder, weights = weighed
    with inprocess(folder) as swarm:
        for quantize in (weights, others or weights):
            swarm.serve("0:6", quantize=quantize)
        with swarm.client(preferences=ANY, audits=AuditLimits(share=1.0)) as model:
            model.generate(ONE, **settings())
            eventually(lambda: model.audits != Audits(), 60)
            assert model.audits == Audits(**{found: 1})
