"""A swarm on this machine whose peers are far apart: a proxy in front of each server makes every byte late."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from swarm.demo.delay_proxy import delay_proxies
from swarm.demo.local import LocalSwarm


@contextmanager
def far_apart(
    swarm: LocalSwarm,
    spans: Sequence[str],
    delay_ms: float,
    report: Path,
    options: Sequence[str] = (),
    mbit_s: float = 0.0,
) -> Iterator[LocalSwarm]:
    """Start servers of these block ranges that announce a proxy each, and wait until they are ready.

    swarm: has begun, and has no servers. delay_ms: one way, on every edge of a route. report: where the proxies write
    how late they were beyond that, when the block has ended. options: more arguments of each server. mbit_s: megabits a
    second on every edge; 0 for no limit.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2 * len(spans))]
    pairs = list(zip(addresses[: len(spans)], addresses[len(spans) :], strict=True))
    with delay_proxies(pairs, delay_ms, report, mbit_s):
        for span, (announced, listen) in zip(spans, pairs, strict=True):
            swarm.start_server(span, "--listen", listen, "--announce-address", announced, *options)
        for server in swarm.servers:
            server.wait_ready()
        yield swarm


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
