"""`swarm-gateway`: an HTTP endpoint that programs of OpenAI's API speak to, with the swarm behind it."""

import re
from pathlib import Path
from typing import Any

import click

from swarm.choices import listen_option
from swarm.client.cli import class_options
from swarm.commands import importing, ready_writer, run_click, run_until_stopped
from swarm.config import load_settings
from swarm.gateway.keys_cli import keys as keys_group
from swarm.options import DTYPES, SIZE, Number, Reading, directory_option, reading_options, running_options
from swarm.version import __version__


class Origin(click.ParamType[str]):
    """Where pages come from, as browsers write it: in small letters, without a path."""

    name = "origin"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the form."""
        origin = str(value).lower().removesuffix("/")
        if re.fullmatch(r"\*|https?://[^/\s?#@]{1,300}", origin, re.ASCII) is None:
            self.fail(f"{value!r} should look like https://chat.example, or be *", param, ctx)
        return origin


@click.group("swarm-gateway", invoke_without_command=True)
@click.version_option(__version__)
@listen_option("--listen", "127.0.0.1:8000", "of the interface", step=1)
@click.option(
    "--model",
    multiple=True,
    metavar="MODEL",
    help="hub id or directory of a model; may be repeated; default: all that the swarm serves and this disk has",
)
@click.option(
    "--allow-download",
    multiple=True,
    metavar="MODEL",
    help="hub id of a model to serve, too, as soon as the swarm does; may be repeated",
)
@click.option(
    "--keys", type=click.Path(path_type=Path, dir_okay=False), default=None, help="key file; see `swarm-gateway keys`"
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=48,
    show_default=True,
    help="requests that run at one time; a server gives one peer 60 sessions",
)
@click.option(
    "--prefixes",
    type=click.Choice(("own", "shared", "none")),
    default="own",
    show_default=True,
    help="whose beginnings of prompts servers keep: of each key's name by itself, of all together, of none",
)
@click.option(
    "--draft",
    type=click.Choice(("lookup", "none")),
    default="lookup",
    show_default=True,
    help="what guesses next tokens: earlier text of the same request, or nothing; the answer is the same",
)
@click.option("--no-keys", is_flag=True, help="serve any caller, on any address")
@click.option(
    "--allow-origin",
    type=Origin(),
    multiple=True,
    help="of pages that may call the gateway, as https://chat.example; may be repeated; * for all",
)
@click.option("--ends-memory", type=SIZE, default=None, help="of all embeddings and heads; default: half the memory")
@reading_options("join")
@click.option("--revision", default=None, help="branch, tag or commit of the models")
@click.option("--token", default=None, help="of the hub, for gated models")
@click.option("--cache-dir", type=click.Path(path_type=Path), default=None, help="where downloaded models are kept")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help="of embeddings, head and servers; auto: the checkpoint's, and any of servers",
)
@class_options
@click.option(
    "--keep-conversations",
    type=Number(0, 600),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="how long servers keep what an answer took, for the next turn of its conversation",
)
@click.option(
    "--step-timeout",
    type=Number(1, 86400),
    default=120.0,
    show_default=True,
    help="the longest that one step may take, or one chunk of a prompt, in seconds, repairs included",
)
@click.option(
    "--audit",
    type=Number(0, 1),
    default=0.02,
    show_default=True,
    help="share of sessions that other servers compute once more, to find wrong ones",
)
@click.option("--threads", type=click.IntRange(1), default=None, help="cores for the models' heads; torch's choice")
@directory_option
@running_options
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    reading: Reading,
    ready_file: Path | None,
    log_level: str,
    **options: Any,  # noqa: ANN401 - click passes them by name
) -> None:
    """Serve the swarm's models over HTTP, to any program that speaks OpenAI's API.

    \b
    swarm-gateway --initial-peers /ip4/.../p2p/12D3... --model org/name
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "org/name", "messages": [{"role": "user", "content": "Hello"}]}'

    The gateway holds embeddings and head of a model; the swarm's servers hold the blocks. When one of them dies under a
    request, another takes over and the text goes on.
    """
    if context.invoked_subcommand is not None:
        return
    if not reading.initial_peers and not reading.lan:
        raise click.UsageError("say through which node to join: --initial-peers, or set SWARM_INITIAL_PEERS")
    if options["model"] and options["allow_download"]:
        raise click.UsageError(
            "--allow-download is for a gateway that follows the swarm, without --model: name all models by --model"
        )
    with ready_writer(ready_file) as ready:
        with importing("gateway", "gateway"):
            from swarm.gateway.serve import arguments_of, serve_gateway  # noqa: PLC0415 - torch: --help needs none
        arguments = arguments_of(reading, load_settings().gateway.upstream, **options)
        run_until_stopped(lambda stop: serve_gateway(arguments, ready, stop), log_level)


command.add_command(keys_group)


def main() -> None:
    """Run the command."""
    run_click(command)


if __name__ == "__main__":
    main()
