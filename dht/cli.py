"""`swarm-bootstrap`: a DHT node for others to join through. It serves no blocks and needs no accelerator."""

from pathlib import Path

import click

from swarm.access import Access
from swarm.commands import (
    HOST_PORT,
    common_options,
    default_identity,
    ending_at_once,
    hold_identity,
    ready_writer,
    run_click,
    run_until_stopped,
)
from swarm.version import __version__


@click.command("swarm-bootstrap")
@click.version_option(__version__)
@click.option("--listen", type=HOST_PORT, default="0.0.0.0:31337", show_default=True, help="port 0 picks a free one")
@click.option(
    "--announce-address",
    type=HOST_PORT,
    multiple=True,
    help="where others reach --listen, if not directly; may be repeated",
)
@common_options
def command(
    listen: tuple[str, int],
    announce_address: tuple[tuple[str, int], ...],
    initial_peers: tuple[str, ...],
    identity: Path | None,
    network: str,
    network_key: Path | None,
    allow_peers: Path | None,
    lan: bool,
    ready_file: Path | None,
    log_level: str,
) -> None:
    """Run a node of the swarm's DHT for others to join through."""
    path = identity or default_identity("bootstrap")
    with hold_identity(path) as held, ready_writer(ready_file) as ready:
        access = Access.load(network_key, allow_peers, held.peer_id)
        with ending_at_once():
            # hivemind takes two seconds to import: neither --help nor a wrong argument should wait for it
            from swarm.dht.bootstrap import bootstrap  # noqa: PLC0415
            from swarm.dht.node import NodeConfig  # noqa: PLC0415
            from swarm.net.p2p import P2PConfig, multiaddr_of  # noqa: PLC0415

        announced = tuple(multiaddr_of(*address) for address in announce_address)
        config = NodeConfig(network, P2PConfig(path, listen, announced), initial_peers, access)
        run_until_stopped(lambda stop: bootstrap(config, held, ready, stop, lan=lan), log_level)


def main() -> None:
    """Run the command."""
    run_click(command)


if __name__ == "__main__":
    main()
