"""`swarm-draft`: distil a draft head from a model, through the swarm that has its blocks."""

from pathlib import Path
from typing import Any

import click

from swarm.commands import configure_logging, ending_at_once, run_click
from swarm.options import LOG_LEVELS, model_options, option_group
from swarm.version import __version__

sizes = option_group(
    click.option(
        "--width",
        type=click.IntRange(16, 8192),
        default=None,
        help="of the head's layers, a multiple of 16; by default the model's own, and 1,024 at most",
    ),
    click.option("--layers", type=click.IntRange(1, 16), default=3, show_default=True, help="more are slower"),
    click.option(
        "--mlp", type=click.IntRange(16, 32768), default=None, help="of each layer; by default 3 times the width"
    ),
)


@click.command("swarm-draft")
@click.version_option(__version__)
@click.argument("model", envvar="SWARM_MODEL", required=False)
@click.option(
    "--texts",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="folder of text files, such as the model is to write; folders in it are read, too",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="folder for the draft; a rerun goes on with what is half made there",
)
@click.option(
    "--tokens",
    type=click.IntRange(1000, 100_000_000),
    default=1_000_000,
    show_default=True,
    help="of the texts that are used; each takes 2 bytes times the model's hidden size on the disk while it learns",
)
@click.option(
    "--positions", type=click.IntRange(16, 4096), default=256, show_default=True, help="tokens that are read in one go"
)
@click.option("--steps", type=click.IntRange(1, 1_000_000), default=2400, show_default=True, help="of training")
@sizes
@click.option("--device", default="cpu", show_default=True, help="to train on, as torch names it: cuda:0")
@click.option(
    "--autocast/--no-autocast",
    default=False,
    show_default=True,
    help="train in bfloat16: faster where the processor has instructions for it",
)
@click.option("--local", is_flag=True, help="compute the model's blocks on this machine, without a swarm")
@model_options
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="warning", show_default=True)
def command(
    model: str | None,
    *,
    texts: Path,
    out: Path,
    tokens: int,
    positions: int,
    steps: int,
    width: int | None,
    layers: int,
    mlp: int | None,
    device: str,
    autocast: bool,
    local: bool,
    log_level: str,
    initial_peers: tuple[str, ...],
    **joining: Any,  # noqa: ANN401 - click passes them by name
) -> None:
    """Distil a draft head from MODEL, a hub id or a local directory, whose blocks the swarm hosts.

    The head guesses the model's next tokens, and a wide-area route then gives several tokens a trip. The texts go
    through the swarm once, and their final hidden states come back. The rest is computed here: the head learns to
    foresee them. Ctrl-C keeps what was done, and the same command goes on.

    \b
    swarm-draft org/name --texts ~/code --out my-draft
    swarm-generate org/name --draft my-draft --prompt "def quicksort("
    """
    if not model:
        raise click.UsageError("say which MODEL: a hub id or a directory, or set SWARM_MODEL")
    if width is not None and width % 16:
        raise click.UsageError(f"--width {width} is no multiple of 16")
    configure_logging(log_level)
    with ending_at_once(130):
        from swarm.client.distilling.make import Wish, make  # noqa: PLC0415 - torch: it takes seconds, --help none

    wish = Wish(model, texts, out, tokens, positions, steps, width, layers, mlp, autocast, device, is_local=local)
    make(wish, initial_peers=initial_peers or None, **joining)


def main() -> None:
    """Run the command."""
    run_click(command)


if __name__ == "__main__":
    main()
