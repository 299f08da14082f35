"""`swarm-bootstrap`: a DHT node for others to join through. It serves no blocks and needs no accelerator."""

import os
import time
from pathlib import Path

import click
import structlog

from swarm.commands import (
    HOST_PORT,
    Ready,
    Stop,
    common_options,
    default_identity,
    hold_identity,
    ready_writer,
    run_click,
    run_until_stopped,
)
from swarm.errors import BadConfiguration

_log = structlog.get_logger("swarm.bootstrap")


@click.command("swarm-bootstrap")
@click.option("--listen", type=HOST_PORT, default="0.0.0.0:31337", show_default=True, help="port 0 picks a free one")
@common_options
def command(  # noqa: PLR0917 - click passes them by name
    listen: tuple[str, int],
    initial_peers: tuple[str, ...],
    identity: Path | None,
    network: str,
    ready_file: Path | None,
    log_level: str,
) -> None:
    """Run a node of the swarm's DHT for others to join through."""
    check_network(network)
    path = identity or default_identity("bootstrap")
    with hold_identity(path):
        run_until_stopped(lambda stop: bootstrap(path, listen, network, initial_peers, ready_file, stop), log_level)


async def bootstrap(  # noqa: PLR0917 - the options of the command
    identity: Path,
    listen: tuple[str, int],
    network: str,
    initial_peers: tuple[str, ...],
    ready_path: Path | None,
    stop: Stop,
) -> None:
    """Serve until asked to stop."""
    # hivemind takes two seconds to import: neither --help nor a wrong argument should wait for it
    from swarm.dht.node import NodeConfig, open_node  # noqa: PLC0415
    from swarm.net.p2p import P2PConfig  # noqa: PLC0415

    config = NodeConfig(network, P2PConfig(identity, listen), initial_peers)
    with ready_writer(ready_path) as ready:
        async with open_node(config, clock=time.time) as node:
            ready(Ready(peer_id=node.peer_id, addresses=node.addresses, pid=os.getpid()))
            _log.info("ready", peer_id=node.peer_id, addresses=list(node.addresses), network=network)
            await stop.wait()
            _log.info("stopping")


def check_network(name: str) -> None:
    """Raise BadConfiguration for a network name that no record could carry."""
    if not (0 < len(name) <= 32 and name.replace("-", "a").isalnum() and name.isascii() and name == name.lower()):
        raise BadConfiguration("network", f"{name!r} is not 1 to 32 small letters, digits and dashes")


def main() -> None:
    """Run the command."""
    run_click(command)


if __name__ == "__main__":
    main()
