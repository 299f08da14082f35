"""`swarm-serve`: host blocks of a model for the swarm."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from swarm.access import Access
from swarm.blocks import BLOCKS_MAX, Blocks
from swarm.choices import hold_identity, listen_option
from swarm.commands import ending_at_once, ready_writer, run_click, run_until_stopped
from swarm.dht.records import RECORD, check_address, check_printable
from swarm.options import DTYPES, HOST_PORT, SIZE, Number, Root, common_options, was_given
from swarm.server.arguments import AUTO, ServeArguments
from swarm.server.gateways import GatewayAllowance
from swarm.server.lean import leave_out_what_no_server_needs
from swarm.version import __version__


class HostPortText(click.ParamType[str]):
    """An address for others to dial, as HOST:PORT."""

    name = "host:port"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the form."""
        host, port = HOST_PORT.convert(value, param, ctx)
        if port == 0:
            self.fail("others cannot dial port 0", param, ctx)
        try:
            return check_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except ValueError as error:
            self.fail(f"{value!r} cannot be announced: {error}", param, ctx)


class PublicName(click.ParamType[str]):
    """A server's name for people."""

    name = "text"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check that a record can carry it."""
        text = str(value)
        if len(text) > RECORD.public_name_chars:
            self.fail(f"at most {RECORD.public_name_chars} characters", param, ctx)
        try:
            return check_printable(text)
        except ValueError as error:
            self.fail(f"{text!r} is {error}", param, ctx)


class Gateway(click.ParamType[tuple[str, GatewayAllowance]]):
    """A gateway's peer id, and what it may have."""

    name = "peer=sessions,openings,steps"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, GatewayAllowance]:
        """Parse, or fail with the reason."""
        match = re.fullmatch(r"([1-9A-HJ-NP-Za-km-z]{40,60})=(\d{1,4}),(\d{1,4}),(\d{1,6})", str(value))
        if match is None or not all(int(number) for number in match.groups()[1:]):
            self.fail(f"{value!r} should look like 12D3KooW...=256,50,20000", param, ctx)
        return match[1], GatewayAllowance(int(match[2]), float(match[3]), float(match[4]))


@click.command("swarm-serve")
@click.version_option(__version__)
@click.argument("model", envvar="SWARM_MODEL", required=False)
@click.option(
    "--blocks",
    default=AUTO,
    show_default=True,
    metavar="A:B",
    help="blocks A, A+1, ..., B-1, such as 20:40; auto: as many as fit, where the swarm needs them most",
)
@click.option(
    "--num-blocks",
    type=click.IntRange(1, BLOCKS_MAX),
    default=None,
    help="so many blocks, where the swarm needs them most",
)
@click.option(
    "--rebalance-every",
    type=Number(0),
    default=300.0,  # plus or minus a half, so that servers do not all look at once
    show_default=True,
    metavar="SECONDS",
    help="how often a server that chose its blocks looks whether others need it more, and moves; 0: never",
)
@listen_option("--listen", "[::]:31330", "for activations")
@listen_option("--p2p-listen", "[::]:31331", "for the DHT (libp2p)")
@click.option(
    "--announce-address",
    type=HostPortText(),
    multiple=True,
    help="where others reach --listen, if not directly; may be repeated",
)
@click.option(
    "--p2p-announce-address",
    type=HOST_PORT,
    multiple=True,
    help="where others reach --p2p-listen, if not directly; may be repeated",
)
@click.option(
    "--map-port/--no-map-port",
    default=True,
    show_default=True,
    help="in a public swarm, ask the home router to forward --listen's port (PCP, NAT-PMP, UPnP)",
)
@click.option(
    "--relay-bandwidth",
    type=SIZE,
    default="4MB",
    show_default=True,
    metavar="SIZE",
    help="the most that is relayed each second between peers whose routers keep them apart; 0: nothing",
)
@click.option("--device", default=None, help="cuda, cuda:1, cpu, ...; the first GPU if there is one")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="auto: the checkpoint's")
@click.option(
    "--quantize",
    type=click.Choice(("auto", "none", "int8", "int4")),
    default="none",
    show_default=True,
    help="int8: weights in half of bfloat16's memory, as exact as it (x86 processors, others with llvmlite); "
    "auto: a checkpoint's own 4 bits, else int8 where that can be; "
    "int4: weights in a quarter, less exact, and half as much so with a file of swarm-importance; "
    "on GPUs auto changes nothing",
)
@click.option(
    "--quantize-cache",
    default=None,
    metavar="DIR|off",
    help="where rounded weights are kept, for a quick start the next time; by default in the user's cache folder",
)
@click.option(
    "--wire",
    type=click.Choice(("int8",)),
    default=None,
    help="also take sessions whose activations travel in 8.5 bits a number, for slow connections",
)
@click.option("--threads", type=click.IntRange(1, 1024), default=None, help="CPU threads of the compute thread")
@click.option(
    "--cache-tokens",
    type=click.IntRange(1),
    default=None,
    help="size of the KV pool in tokens (positions of one row in all hosted blocks)",
)
@click.option(
    "--cache-memory",
    type=SIZE,
    default=None,
    help="size of the KV pool in memory; by default 0.6 of the free memory of the host, or 0.9 of the GPU's",
)
@click.option(
    "--journal-memory",
    type=SIZE,
    default="1GB",
    show_default=True,
    help="host memory for outputs that are replayed when the next server vanishes",
)
@click.option(
    "--prefix-share",
    type=Number(0, 1),
    default=0.25,
    show_default=True,
    help="of the KV pool, lent to beginnings of prompts that their owner may send again; 0: none",
)
@click.option("--metrics", type=HOST_PORT, default=None, help="answer Prometheus here, such as 127.0.0.1:9400")
@click.option(
    "--drain-timeout",
    type=Number(0, 3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="how long sessions may take to move elsewhere when this server is stopped",
)
@click.option("--revision", default=None, help="branch, tag or commit of a hub repository")
@click.option(
    "--root",
    type=Root(),
    default=None,
    help="the checkpoint's root, as the health page shows it, or a pin: other files are refused",
)
@click.option("--token", default=None, envvar=("SWARM_TOKEN", "HF_TOKEN"), help="for private or gated repositories")
@click.option("--cache-dir", type=click.Path(path_type=Path), default=None, help="where downloads are kept")
@click.option("--max-disk-space", type=SIZE, default=None, help="the most that downloads may take, such as 100GB")
@click.option(
    "--gateway",
    type=Gateway(),
    multiple=True,
    metavar="PEER=SESSIONS,OPENINGS,STEPS",
    help="let a gateway have so many sessions, and openings and steps a second; others get 60, 8 and 2000. Repeatable",
)
@click.option("--public-name", type=PublicName(), default="", help="this server's name, for people")
@common_options
def command(
    model: str | None,
    ready_file: Path | None,
    identity: Path | None,
    network_key: Path | None,
    allow_peers: Path | None,
    log_level: str,
    **options: Any,  # noqa: ANN401 - click passes them by name
) -> None:
    """Host blocks of MODEL, a hub id or a local directory, for the swarm.

    \b
    Join a swarm:    swarm-serve org/name --initial-peers /ip4/1.2.3.4/tcp/31337/p2p/12D3KooW...
    Choose yourself: swarm-serve org/name --blocks 20:40 --initial-peers ...
    On one network:  swarm-serve org/name on each machine: they find each other.
    Start your own:  run swarm-bootstrap, and pass the address that it prints.

    MODEL and every option can also come from SWARM_MODEL, SWARM_BLOCKS, ...; swarm.toml has the shared ones.

    Ctrl-C or SIGTERM: takes no new sessions, lets those that it has move to others, and exits. A second one exits at
    once.
    """
    if not model:
        raise click.UsageError("say which MODEL: a hub id or a directory, or set SWARM_MODEL")
    arguments = ServeArguments.of({"model": model, **options})
    if not arguments.span.automatic:
        Blocks.parse(arguments.span.blocks)
        if arguments.span.num_blocks is not None:
            raise click.UsageError("--blocks says which blocks, --num-blocks how many: pass one of them")
        if was_given("rebalance_every"):
            raise click.UsageError("--rebalance-every is for servers that choose their blocks: leave --blocks out")
    if was_given("cache_tokens") and was_given("cache_memory"):
        raise click.UsageError("--cache-tokens and --cache-memory bound the same pool: pass one of them")
    with hold_identity(identity, "server") as (path, held), ready_writer(ready_file) as ready:
        access = Access.load(network_key, allow_peers, held.peer_id)
        arguments = replace(arguments, network=replace(arguments.network, access=access))
        with ending_at_once():
            leave_out_what_no_server_needs()
            from swarm.server.serve import serve  # noqa: PLC0415 - torch: a wrong argument is answered without it

        run_until_stopped(lambda stop: serve(arguments, held, path, ready, stop), log_level)


def main() -> None:
    """Run the command."""
    run_click(command)


if __name__ == "__main__":
    main()
