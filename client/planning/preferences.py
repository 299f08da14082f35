"""A user's preferences: the peers that may be used, for which blocks, how they compute, and the aim of a plan."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from swarm.blocks import Blocks
from swarm.client.planning.route import Optimize
from swarm.errors import BadConfiguration
from swarm.identity import public_key_of

Trusted = tuple[tuple[Blocks, frozenset[str]], ...]
"""Ranges of blocks, each with the only peers (ids) that may be given any of it."""

Quality = Literal["full", "any"]
"""Which tier of numeric classes a route may be of: the one that is as close to float32 as bfloat16 is, or any one."""


@dataclass(frozen=True, slots=True)
class Preferences:
    """The peers (ids) and numeric classes that all routes and all repairs keep to, and the aim of plans.

    allowed_peers, blocked_peers: only the former unless None, never the latter. trusted_peers: blocks of these ranges
    go to their peers alone. optimize: "latency" takes the route with the least time per token. "throughput" first makes
    the slowest server of the route about as fast as it can be, and takes the least time per token among such routes.
    quality: a route is of one tier (`swarm.activations.tier_of`): "full" takes no other, "any" the one with the better
    route. exact: a route is of one numeric class, and so are all its repairs.
    """

    allowed_peers: frozenset[str] | None = None
    blocked_peers: frozenset[str] = frozenset()
    optimize: Optimize = "latency"
    trusted_peers: Trusted = ()
    quality: Quality = "full"
    exact: bool = False

    @classmethod
    def checked(
        cls,
        allowed_peers: Iterable[str] | None,
        blocked_peers: Iterable[str],
        optimize: str,
        trusted_peers: Mapping[str, Iterable[str]] | None = None,
        quality: str = "full",
        *,
        exact: bool = False,
    ) -> "Preferences":
        """Check a user's arguments. Raises BadConfiguration or BadBlocks."""
        modes: tuple[Optimize, ...] = get_args(Optimize)
        mode = next((mode for mode in modes if mode == optimize), None)
        if mode is None:
            raise BadConfiguration("optimize", f"{optimize!r} is neither {' nor '.join(map(repr, modes))}")
        least = next((known for known in get_args(Quality) if known == quality), None)
        if least is None:
            raise BadConfiguration("quality", f"{quality!r} is neither 'full' nor 'any'")
        allowed = None if allowed_peers is None else _peer_ids("allowed_peers", allowed_peers)
        if allowed is not None and not allowed:
            raise BadConfiguration("allowed_peers", "it is empty: name peers, or pass None to allow all")
        trusted = []
        for text, peers in (trusted_peers or {}).items():
            name = f"trusted_peers[{str(text)!r}]"
            trusted.append((Blocks.parse(str(text)), _peer_ids(name, peers)))
            if not trusted[-1][1]:
                raise BadConfiguration(name, "it is empty: name peers, or leave the range out")
        return cls(allowed, _peer_ids("blocked_peers", blocked_peers), mode, tuple(trusted), least, exact)


def _peer_ids(name: str, given: Iterable[str]) -> frozenset[str]:
    if isinstance(given, str):
        raise BadConfiguration(name, "pass a list of peer ids, not one string")
    peers = list(given)
    for peer in peers:
        try:
            public_key_of(peer)
        except (ValueError, TypeError, AttributeError):
            raise BadConfiguration(name, f"{peer!r} is not the peer id of a server, such as 12D3KooW...") from None
    return frozenset(peers)
