"""What the directory's tests share."""

import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil

from swarm.dht.member import MemberLimits
from swarm.dht.node import NodeConfig, NodeLimits, SwarmNode, open_node
from swarm.dht.records import Announcement, sign_announcement
from swarm.dht.validator import Clock
from swarm.identity import Identity
from swarm.net.limits import DaemonLimits
from swarm.net.p2p import P2PConfig

NETWORK = "test"
ROOT = "ab" * 32
LOOPBACK = ("127.0.0.1", 0)


def announcement(
    identity: Identity, start: int = 0, stop: int = 4, *, now: float | None = None, **changes: Any
) -> Announcement:
    now = time.time() if now is None else now
    fields = {
        "network": NETWORK,
        "public_key": identity.public_key.hex(),
        "root": ROOT,
        "model": "org/model",
        "n_blocks": 12,
        "blocks": (start, stop),
        "sequence": int(now * 1000),
        "issued": now,
        "expires": now + 60,
        "version": "0.1.0",
        "numeric_class": "float32",
        "addresses": ("127.0.0.1:4000",),
        "channel_key": "cd" * 32,
        "state": "online",
    }
    return Announcement(**fields | changes)


def signed(identity: Identity, start: int = 0, stop: int = 4, *, now: float | None = None, **changes: Any) -> bytes:
    return sign_announcement(announcement(identity, start, stop, now=now, **changes), identity)


def node(
    folder: Path,
    name: str,
    peers: tuple[str, ...] = (),
    *,
    identity: Identity | None = None,
    client: bool = False,
    clock: Clock = time.time,
    limits: DaemonLimits | None = None,
    member: MemberLimits = MemberLimits(),  # noqa: B008 - frozen
    node_limits: NodeLimits = NodeLimits(),  # noqa: B008 - frozen
) -> AbstractAsyncContextManager[SwarmNode]:
    """A node on loopback with its own p2pd."""
    path = None
    if not client:
        path = folder / name
        (identity or Identity.generate()).save(path)
    p2p = P2PConfig(path, None if client else LOOPBACK, limits=limits or DaemonLimits())
    return open_node(NodeConfig(NETWORK, p2p, peers, member_limits=member, limits=node_limits), clock=clock)


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has collected yet does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def soon(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.1f} s"
