"""What `swarm-serve` was asked to do. Light: the command reads its arguments before it imports torch."""

from dataclasses import dataclass
from pathlib import Path

from swarm.access import EVERYBODY, Access

AUTO = "auto"
REBALANCE_EVERY_S = 300.0  # plus or minus a half, so that servers do not all look at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArguments:
    """The command's options by their names; None is the default that only a later look can tell."""

    model: str
    blocks: str  # "A:B" or AUTO
    num_blocks: int | None  # only with AUTO; None: as many as fit
    listen: tuple[str, int]
    p2p_listen: tuple[str, int]
    announce_address: tuple[str, ...]
    p2p_announce_address: tuple[tuple[str, int], ...]
    device: str | None
    dtype: str
    threads: int | None
    cache_tokens: int | None
    cache_memory: int | None  # bytes
    revision: str | None
    root: str | None
    token: str | None
    cache_dir: Path | None
    max_disk_space: int | None  # bytes
    public_name: str
    journal_memory: int  # bytes
    drain_timeout: float  # seconds
    rebalance_every: float  # seconds; 0: never
    initial_peers: tuple[str, ...]
    network: str
    access: Access = EVERYBODY

    @property
    def automatic(self) -> bool:
        """Whether the server chooses its span."""
        return self.blocks == AUTO
