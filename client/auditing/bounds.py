"""How far two honest servers' outputs may be apart. Pure.

A server computes a step with one position; an audit computes most positions at once, on other machines, with other
kernels. Their sums are rounded in another order. benchmarks/audits.py measures the distances of honest servers and of
wrong ones, and docs/audits.md has them; the bounds lie between.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.activations import NumericClass, Tier, tier_of
from swarm.client.planning.promise import Held
from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class Distance:
    """How far outputs are from what an audit computes, relative to their norm: the median position's, and the most."""

    typical: float
    worst: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that honest outputs are apart. typical: the median position. worst: a single one."""

    typical: float
    worst: float

    def allow(self, distance: Distance) -> bool:
        """Whether honest servers may be so far apart. Numbers that are none are too far."""
        return distance.typical <= self.typical and distance.worst <= self.worst


def distance(claimed: Tensor, computed: Tensor) -> Distance:
    """Compare outputs of the same positions, both [positions, hidden_size]."""
    told, ours = claimed.double(), computed.double()
    relative = (told - ours).norm(dim=-1) / ours.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    relative = relative.nan_to_num(nan=torch.inf)
    return Distance(float(relative.median()), float(relative.max()))


@dataclass(frozen=True, slots=True)
class BoundLimits:
    """How far outputs may be apart by the servers' numeric class: the median position, and any single one."""

    float32: tuple[float, float] = limit((1e-4, 1e-3), "", "distance of outputs in float32")
    integers: tuple[float, float] = limit((2e-3, 1e-2), "", "the same with int8, int4 or own4 weights")
    halves: tuple[float, float] = limit((3e-2, 1e-1), "", "the same in all other classes, as bfloat16")
    mixed: tuple[float, float] = limit((3e-2, 1e-1), "", "the same where servers of several classes are compared")
    coded: tuple[float, float] = limit((5e-2, 2e-1), "", "the same where activations travel in int8")

    def of(self, numeric_class: NumericClass) -> Bounds:
        """Return the bounds of servers of one class."""
        if numeric_class.wire:
            return Bounds(*self.coded)
        if numeric_class.dtype != "float32" or (numeric_class.weights and not numeric_class.integers):
            return Bounds(*self.halves)
        return Bounds(*(self.integers if numeric_class.weights else self.float32))


def are_comparable(ours: Held, theirs: Held) -> bool:
    """Whether servers of these classes have weights near enough, in the blocks that both have, to be compared at all.

    Weights of fewer than 8 bits that are rounded otherwise are further apart than a lie need be.
    """
    return all(
        tier_of(our) == Tier.FULL or NumericClass.parse(our).weights == NumericClass.parse(their).weights
        for blocks, our in ours
        for others, their in theirs
        if blocks.start < others.stop and others.start < blocks.stop
    )


def bounds_of(classes: Collection[NumericClass], limits: BoundLimits = BoundLimits()) -> Bounds:
    """Return the bounds of routes of servers of these classes. Weights that are rounded otherwise are other weights."""
    bounds = [limits.of(each) for each in classes]
    if len(set(classes)) > 1:
        bounds.append(Bounds(*limits.mixed))
    return Bounds(max(each.typical for each in bounds), max(each.worst for each in bounds))
