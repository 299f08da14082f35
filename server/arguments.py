"""The arguments of `swarm-serve`. Light: the command reads its arguments before it imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from swarm.access import EVERYBODY, Access
from swarm.net.ports import Port
from swarm.server.gateways import GatewayAllowance

AUTO = "auto"

Group = TypeVar("Group")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointArguments:
    """Which checkpoint, and how it is fetched."""

    model: str
    revision: str | None
    root: str | None
    token: str | None
    cache_dir: Path | None
    max_disk_space: int | None  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanArguments:
    """Which blocks, and how they compute."""

    blocks: str  # "A:B" or AUTO
    num_blocks: int | None  # only with AUTO; None: as many as fit
    device: str | None
    dtype: str
    quantize: str
    quantize_cache: str | None  # a folder, or "off"; None: the user's
    threads: int | None
    cache_tokens: int | None
    cache_memory: int | None  # bytes

    @property
    def automatic(self) -> bool:
        """Whether the server chooses its span."""
        return self.blocks == AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkArguments:
    """Which swarm, and on which addresses."""

    listen: tuple[str, Port]
    p2p_listen: tuple[str, Port]
    announce_address: tuple[str, ...]
    p2p_announce_address: tuple[tuple[str, int], ...]
    initial_peers: tuple[str, ...]
    network: str
    lan: bool
    map_port: bool
    relay_bandwidth: int  # bytes a second
    access: Access = EVERYBODY


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArguments:
    """The command's options by their names, in groups; None is a default that only a later look can find."""

    checkpoint: CheckpointArguments
    span: SpanArguments
    network: NetworkArguments
    public_name: str
    wire: str | None  # a coding of activations that sessions may have
    journal_memory: int  # bytes
    prefix_share: float  # of the KV pool
    metrics: tuple[str, int] | None
    drain_timeout: float  # seconds
    rebalance_every: float  # seconds; 0: never
    gateway: tuple[tuple[str, GatewayAllowance], ...]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "ServeArguments":
        """Sort the command's options into their groups."""
        groups: dict[str, type[Any]] = {
            "checkpoint": CheckpointArguments,
            "span": SpanArguments,
            "network": NetworkArguments,
        }
        own = {field.name for field in fields(cls)} - set(groups)
        parts = {name: _picked(group, options) for name, group in groups.items()}
        return cls(**parts, **{name: options[name] for name in own})


def _picked(group: type[Group], options: Mapping[str, Any]) -> Group:
    names = {field.name for field in fields(group)}  # type: ignore[arg-type]
    return group(**{name: value for name, value in options.items() if name in names})
