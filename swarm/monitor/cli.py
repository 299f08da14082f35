"""`swarm-health`: the public health page of a swarm, its API and its metrics."""

import re
from pathlib import Path

import click

from swarm.choices import listen_option
from swarm.commands import importing, ready_writer, run_click, run_until_stopped
from swarm.config import DATA_DIR
from swarm.options import Number, Reading, reading_options, running_options
from swarm.version import __version__


class Multiaddr(click.ParamType[str]):
    """A libp2p address with a peer id."""

    name = "multiaddr"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the form."""
        if re.fullmatch(r"/[!-~]{1,300}/p2p/[1-9A-HJ-NP-Za-km-z]{40,60}", str(value), re.ASCII) is None:
            self.fail(f"{value!r} should look like /ip4/1.2.3.4/tcp/31337/p2p/12D3KooW...", param, ctx)
        return str(value)


class GatewayUrl(click.ParamType[str]):
    """Where a gateway is. It is shown on the page, so it has neither a password nor a query."""

    name = "url"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the form."""
        if re.fullmatch(r"https?://[^\s/?#@]{1,100}(/[^\s?#@]{0,100})?", str(value), re.ASCII) is None:
            self.fail(f"{value!r} should look like https://gateway.example.org", param, ctx)
        return str(value)


@click.command("swarm-health")
@click.version_option(__version__)
@listen_option("--listen", "127.0.0.1:8080", "of the page", step=1)
@reading_options("read the DHT")
@click.option(
    "--database",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DATA_DIR / "health.sqlite",
    show_default=True,
    help="where the history is kept",
)
@click.option(
    "--join-address", type=Multiaddr(), multiple=True, help="shown to people that want to join; may be repeated"
)
@click.option("--probe", multiple=True, metavar="MODEL", help="generate through this model again and again; repeatable")
@click.option("--probe-every", type=Number(1.0), default=300.0, show_default=True, help="seconds")
@click.option(
    "--audit",
    "audits",
    multiple=True,
    metavar="MODEL",
    help="compare what servers of this model compute with what others do, and show it; repeatable (docs/audits.md)",
)
@click.option(
    "--audit-every",
    type=Number(1.0),
    default=300.0,
    show_default=True,
    help="seconds between audits on average, of all models together",
)
@click.option(
    "--audit-share",
    type=Number(0.0, 1.0, min_open=True),
    default=0.02,
    show_default=True,
    help="of the time, in which audits run at most: no server spends more on them",
)
@click.option(
    "--audit-evidence",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="folder for what servers signed that were wrong; swarm-verify checks these files; not kept by default",
)
@click.option(
    "--gateway",
    "gateways",
    type=GatewayUrl(),
    multiple=True,
    metavar="URL",
    help="show whether this swarm-gateway answers, as it tells at /readyz; may be repeated",
)
@running_options
def command(
    *,
    listen: tuple[str, int | range],
    reading: Reading,
    database: Path,
    join_address: tuple[str, ...],
    probe: tuple[str, ...],
    probe_every: float,
    audits: tuple[str, ...],
    audit_every: float,
    audit_share: float,
    audit_evidence: Path | None,
    gateways: tuple[str, ...],
    ready_file: Path | None,
    log_level: str,
) -> None:
    """Serve the health page of a swarm: which models it serves, how well, and which blocks need servers."""
    if not reading.initial_peers and not reading.lan:
        raise click.UsageError("say through which node to read: --initial-peers, or set SWARM_INITIAL_PEERS")
    if audit_evidence is not None and not audits:
        raise click.UsageError("--audit-evidence keeps what --audit finds: name a model for that")
    with ready_writer(ready_file) as ready:
        with importing("health", "page"):
            from swarm.monitor.serve import HealthArguments, serve_health  # noqa: PLC0415 - libp2p: --help needs none
        arguments = HealthArguments(
            listen=listen,
            reading=reading,
            database=database,
            join_addresses=join_address,
            probes=probe,
            probe_every_s=probe_every,
            audits=audits,
            audit_every_s=audit_every,
            audit_share=audit_share,
            audit_evidence=audit_evidence,
            gateways=gateways,
        )
        run_until_stopped(lambda stop: serve_health(arguments, ready, stop), log_level)


def main() -> None:
    """Run the command."""
    run_click(command)


if __name__ == "__main__":
    main()
