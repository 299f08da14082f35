"""The key of a span's record, where a model has more servers than one key holds, and how often its name is announced.

A key that is full goes on in two keys below it, by the owner's hash (`Facts.spans`). A server begins at the model's
first key, goes down while most nodes refuse its record, and tries the key above again from time to time. Pure.
"""

import random
from dataclasses import dataclass

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class LevelLimits:
    """When a record goes up, and how often the name is announced."""

    up_share: float = limit(1 / 16, "share", "of the refreshes try the key above: it may have room again")
    names: float = limit(32.0, "servers", "of a model; of more, each announces the name less often")


def depths(depth: int, deepest: int, source: random.Random, limits: LevelLimits = LevelLimits()) -> range:
    """Return the depths at which a refresh is offered until it is taken. depth: that of the last one."""
    up = depth > 0 and source.random() < limits.up_share
    return range(depth - up, deepest + 1)


def announces_name(seen: int, depth: int, source: random.Random, limits: LevelLimits = LevelLimits()) -> bool:
    """Return whether a refresh announces the model's name, too: with so many servers, about `names` do in 20 s.

    seen: servers of the model in the last survey, each with a record that holds. depth: of this server's own record.
    """
    return source.random() * max(seen, 1) * 2.0**depth < limits.names
