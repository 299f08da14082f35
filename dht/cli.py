"""`swarm-bootstrap`: a DHT node for others to join through. It serves no blocks and needs no accelerator."""

from pathlib import Path

import click

from swarm.access import Access
from swarm.choices import hold_identity, listen_option
from swarm.commands import ending_at_once, ready_writer, run_click, run_until_stopped
from swarm.options import HOST_PORT, SIZE, common_options
from swarm.version import __version__


@click.command("swarm-bootstrap")
@click.version_option(__version__)
@listen_option("--listen", "[::]:31337", "for the DHT (libp2p)")
@click.option(
    "--announce-address",
    type=HOST_PORT,
    multiple=True,
    help="where others reach --listen, if not directly; may be repeated",
)
@click.option(
    "--anchor-listen",
    type=HOST_PORT,
    default=None,
    help="for peers behind routers, which meet here; by default the port before --listen's, or a free one",
)
@click.option("--no-anchor", is_flag=True, help="help no peers behind routers")
@click.option(
    "--relay-bandwidth",
    type=SIZE,
    default="16MB",
    show_default=True,
    metavar="SIZE",
    help="the most that is relayed each second between peers whose routers keep them apart; 0: nothing",
)
@common_options
def command(
    listen: tuple[str, int | range],
    announce_address: tuple[tuple[str, int], ...],
    anchor_listen: tuple[str, int] | None,
    no_anchor: bool,
    relay_bandwidth: int,
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
    with hold_identity(identity, "bootstrap") as (path, held), ready_writer(ready_file) as ready:
        access = Access.load(network_key, allow_peers, held.peer_id)
        with ending_at_once():
            # hivemind takes two seconds to import: neither --help nor a wrong argument should wait for it
            from swarm.dht.bootstrap import AnchorOptions, bootstrap  # noqa: PLC0415
            from swarm.dht.node import NodeConfig  # noqa: PLC0415
            from swarm.net.anchor import AnchorLimits  # noqa: PLC0415
            from swarm.net.p2p import P2PConfig, multiaddr_of  # noqa: PLC0415
            from swarm.net.relay import RelayLimits  # noqa: PLC0415

        if no_anchor and anchor_listen is not None:
            raise click.UsageError("--no-anchor opens no port for --anchor-listen: pass one of them")
        announced = tuple(multiaddr_of(*address) for address in announce_address)
        config = NodeConfig(network, P2PConfig(path, listen, announced), initial_peers, access, proven=False)
        at = anchor_listen or (listen[0], _before(listen[1]))
        limits = AnchorLimits(relay=RelayLimits(bytes_per_s=float(relay_bandwidth)))
        anchor = (
            None
            if no_anchor
            else AnchorOptions(at, anchor_listen is not None, tuple(host for host, _ in announce_address), limits)
        )
        run_until_stopped(lambda stop: bootstrap(config, held, anchor, ready, stop, lan=lan), log_level)


def _before(port: int | range) -> int | range:
    """Return the port before a port, or before each of several; 0 is any one."""
    if isinstance(port, range):
        return range(port.start - 1, port.stop - 1, port.step)
    return max(0, port - 1)


def main() -> None:
    """Run the command."""
    run_click(command)


if __name__ == "__main__":
    main()
