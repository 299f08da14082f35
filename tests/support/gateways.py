"""A gateway in a process of its own, over a swarm of real processes."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.demo.local import LocalProcess, LocalSwarm, Place
from tests.support.swarms import environment


@contextmanager
def gateway(
    swarm: LocalSwarm,
    model: Path,
    home: Path,
    *,
    dtype: str = "float32",
    options: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Run `swarm-gateway` with one model. Yields its ready file: url, models, pid."""
    arguments = ("--listen", "127.0.0.1:0", "--model", str(model), "--dtype", dtype, "--network", swarm.network)
    peers = [part for peer in swarm.initial_peers for part in ("--initial-peers", peer)]
    env = {**os.environ, **environment(home)}
    process = LocalProcess("gateway", "swarm.gateway.cli", (*arguments, *peers, *options), Place(home), env)
    try:
        yield process.wait_ready().ready
    finally:
        process.stop()
