"""Whether outputs are of the same computation."""

import pytest
import torch

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.client.auditing.bounds import Bounds, Distance, are_comparable, bounds_of, distance

ONE = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]])


def classes(*names):
    return [NumericClass.parse(name) for name in names]


def test_distances_are_relative_to_what_the_audit_computes():
    told = ONE.clone()
    told[0] *= 1.1
    told[1, 1] += 1.0
    found = distance(told, ONE)
    assert abs(found.typical - 0.1) < 1e-6
    assert found.worst == 0.5


def test_numbers_that_are_none_are_too_far():
    told = ONE.clone()
    told[2, 0] = torch.nan
    assert not Bounds(1.0, 1e9).allow(distance(told, ONE))
    assert not Bounds(1.0, 1e9).allow(distance(ONE / 0, ONE))


def test_one_position_may_be_further_off_than_most():
    bounds = Bounds(0.1, 0.5)
    assert bounds.allow(Distance(0.1, 0.5))
    assert not bounds.allow(Distance(0.2, 0.4))
    assert not bounds.allow(Distance(0.1, 0.6))


def test_a_route_has_the_bounds_of_its_widest_class():
    float32, integers = bounds_of(classes("float32")), bounds_of(classes("float32+int8"))
    assert float32.worst < integers.worst < bounds_of(classes("bfloat16")).worst
    assert bounds_of(classes("float32", "bfloat16+int8")) == bounds_of(classes("bfloat16"))
    assert bounds_of(classes("float32", "float32+int8")).typical > integers.typical
    assert bounds_of(classes("float32", "float32")) == float32
    assert bounds_of(classes("float32+int4")) == integers  # the arithmetic is the same
    assert bounds_of(classes("float32+int4-0123456789ab")) == integers
    assert bounds_of(classes("bfloat16+int4")) == bounds_of(classes("bfloat16"))
    assert bounds_of(classes("float32+q4_0")) == bounds_of(classes("bfloat16"))
    assert bounds_of(classes("float32++int8")).worst > bounds_of(classes("bfloat16")).worst


@pytest.mark.parametrize(
    ("ours", "theirs", "comparable"),
    [
        ("float32+int8", "bfloat16", True),
        ("bfloat16+int4", "float32+int4", True),
        ("float32+int4", "float32+int4-0123456789ab", False),
        ("float32+int4-0123456789ab", "bfloat16+int4-0123456789ab", True),
        ("float32+int4-0123456789ab", "float32+int4-00000000000f", False),
        ("float32+int4", "float32+nf4", False),
    ],
)
def test_weights_of_few_bits_are_compared_if_they_are_rounded_alike(ours, theirs, comparable):
    elsewhere = (Blocks(0, 2), "float32+nf4")
    assert (
        are_comparable([(Blocks(2, 5), ours)], [elsewhere, (Blocks(2, 3), ours), (Blocks(3, 6), theirs)]) is comparable
    )
    assert are_comparable([(Blocks(2, 5), theirs)], [elsewhere, (Blocks(4, 6), ours)]) is comparable
