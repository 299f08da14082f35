"""`swarm-generate`: one generation through the swarm, streamed to the terminal."""

import sys
from typing import Any

import click

from swarm.commands import configure_logging, ending_at_once, run_click
from swarm.options import DTYPES, LOG_LEVELS, Number, Root, model_options, option_group, was_given
from swarm.version import __version__

class_options = option_group(
    click.option(
        "--quality",
        type=click.Choice(("full", "any")),
        default="full",
        show_default=True,
        help="any: servers with weights in 4 bits, too, if they make the better route",
    ),
    click.option("--exact", is_flag=True, help="all hops compute in one numeric class, and so do those that take over"),
)


@click.command("swarm-generate")
@click.version_option(__version__)
@click.argument("model", envvar="SWARM_MODEL", required=False)
@click.option("--prompt", default=None, help="what to continue; without it, standard input is read")
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--temperature", type=Number(0.0), default=0.0, show_default=True, help="0: the likeliest token")
@click.option("--top-p", type=Number(0.0, 1.0), default=1.0, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=None, help="makes sampling repeatable")
@click.option("--chat", is_flag=True, help="put the prompt into the model's chat template")
@click.option(
    "--draft",
    default="lookup",
    show_default=True,
    metavar="lookup|mtp|none|DRAFT|MODEL",
    help="what guesses next tokens: earlier text, the checkpoint's own blocks for it, a folder from swarm-draft, or a "
    "small model; the text is the same, and comes sooner",
)
@click.option(
    "--head",
    type=click.Choice(("exact", "auto", "int8")),
    default="exact",
    show_default=True,
    help="auto: tokens are chosen by a copy of the head in 8 bits, where that proves the exact head's token; int8: "
    "embeddings and head take half of bfloat16's memory, and the text may differ",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help="what the servers compute in; auto: whatever is as close to float32 as bfloat16",
)
@class_options
@click.option(
    "--wire",
    type=click.Choice(("int8",)),
    default=None,
    help="send activations in 8.5 bits a number, for slow connections; the text may differ from a plain run's",
)
@click.option(
    "--root",
    type=Root(),
    default=None,
    help="root or pin, as the health page or the model shows it: other files are refused",
)
@model_options
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="warning", show_default=True)
def command(
    model: str | None,
    *,
    prompt: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    chat: bool,
    log_level: str,
    initial_peers: tuple[str, ...],
    **joining: Any,  # noqa: ANN401 - click passes them by name
) -> None:
    """Continue a prompt with MODEL, a hub id or a local directory, whose blocks the swarm hosts.

    \b
    swarm-generate org/name --prompt "def quicksort(" --initial-peers /ip4/1.2.3.4/tcp/31337/p2p/12D3KooW...
    """
    if not model:
        raise click.UsageError("say which MODEL: a hub id or a directory, or set SWARM_MODEL")
    if not temperature and (was_given("top_p") or was_given("seed")):
        raise click.UsageError("--top-p and --seed are for sampling: set --temperature above 0")
    text = prompt if prompt is not None else _read_prompt()
    if not text:
        raise click.UsageError("the prompt is empty")
    configure_logging(log_level)
    with ending_at_once(130):
        from swarm.client.hf.text import TextOptions, stream_text  # noqa: PLC0415 - torch: it takes seconds, --help none

    options = TextOptions(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, chat=chat)
    stream_text(model, text, options, initial_peers=initial_peers or None, **joining)


def _read_prompt() -> str:
    if sys.stdin.isatty():
        print("type the prompt, then Ctrl-D:", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise click.UsageError("the prompt is not text in UTF-8") from None


def main() -> None:
    """Run the command."""
    run_click(command)


if __name__ == "__main__":
    main()
