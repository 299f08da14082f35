"""A route's promise about its tokens, and the repairs that change it. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.dht.records import Announcement

Exactness = Literal["bits", "tokens", "tier"]
"""What stays the same if other servers of the same classes had the route's blocks, or take over some of them.

"bits": all numbers, on processors of one kind, alone or beside other sessions. "tokens": the likeliest next tokens, on
processors of any kind, as far as was measured. "tier": how close the numbers are to float32; where two tokens are
nearly as likely, another server may choose the other one. All of it as servers announce their classes.
"""

Held = tuple[tuple[Blocks, str], ...]
"""The numeric class in which each range of blocks was computed."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Blocks that a repair has brought into another numeric class. position: the first one computed in it."""

    blocks: Blocks
    before: str
    now: str
    position: int

    def __str__(self) -> str:
        return f"blocks {self.blocks} were in {self.before} until position {self.position}, and are in {self.now}"


def exactness_of(hops: Sequence[Announcement], *, is_coded: bool) -> Exactness:
    """Return the promise of a route of these servers, by the measurements in docs/quantisation.md.

    is_coded: whether activations are rounded where hops meet.
    """
    if is_coded:
        return "tier"
    classes = {NumericClass.parse(hop.numeric_class) for hop in hops}
    is_integer = all(each.integers for each in classes)
    if len(classes) == 1 and is_integer and _is_one_kind(hops):
        return "bits"
    is_float32 = all(each.dtype == "float32" and each.weights in {"", "int8"} for each in classes)
    return "tokens" if is_float32 else "tier"


def crossings(held: Held, now: Iterable[tuple[Blocks, str]], position: int) -> tuple[Crossing, ...]:
    """Compare the classes of a route with those that it had before."""
    return tuple(
        Crossing(Blocks(max(before.start, blocks.start), min(before.stop, blocks.stop)), old, new, position)
        for blocks, new in now
        for before, old in held
        if old != new and before.start < blocks.stop and blocks.start < before.stop
    )


def _is_one_kind(hops: Sequence[Announcement]) -> bool:
    """Whether all hops run the same software on a processor of the same name. A type alone, as "cpu", names none."""
    device = hops[0].device
    return device not in {"", "cpu", "mps"} and {(device, hops[0].version)} == {
        (hop.device, hop.version) for hop in hops
    }
