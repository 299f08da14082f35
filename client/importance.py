"""`swarm-importance`: measure which inputs of a checkpoint's layers count, so that int4 loses less."""

from pathlib import Path

import click

from swarm.commands import configure_logging, ending_at_once, run_click
from swarm.errors import BadConfiguration
from swarm.options import LOG_LEVELS, Root
from swarm.version import __version__


@click.command("swarm-importance")
@click.version_option(__version__)
@click.argument("model", envvar="SWARM_MODEL", required=False)
@click.option(
    "--texts",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="folder of text files, of all kinds that the model is to read and write; folders in it are read, too",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="folder for the file; by default MODEL, where that is a directory",
)
@click.option("--windows", type=click.IntRange(2, 4096), default=64, show_default=True, help="of text that are read")
@click.option("--positions", type=click.IntRange(16, 4096), default=512, show_default=True, help="tokens of a window")
@click.option("--root", type=Root(), default=None, help="root or pin of the checkpoint: other files are refused")
@click.option("--revision", default=None, help="branch, tag or commit of a hub repository")
@click.option("--token", default=None, envvar=("SWARM_TOKEN", "HF_TOKEN"), help="for private or gated repositories")
@click.option("--cache-dir", type=click.Path(path_type=Path), default=None, help="where downloads are kept")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="warning", show_default=True)
def command(
    model: str | None,
    *,
    texts: Path,
    out: Path | None,
    windows: int,
    positions: int,
    root: str | None,
    revision: str | None,
    token: str | None,
    cache_dir: Path | None,
    log_level: str,
) -> None:
    """Measure how large the inputs of each layer of MODEL are, a hub id or a local directory.

    The result is a small file beside its weights. With it `swarm-serve --quantize int4` keeps those weights most exact
    that meet large inputs. Whoever publishes a checkpoint makes the file once: servers with other files, or none,
    are of another numeric class. The blocks are computed here, a few at a time, without a swarm.

    \b
    swarm-importance ./my-model --texts ~/texts
    swarm-serve ./my-model --quantize int4
    """
    if not model:
        raise click.UsageError("say which MODEL: a hub id or a directory, or set SWARM_MODEL")
    folder = out or Path(model)
    if out is None and not folder.is_dir():
        raise click.UsageError(f"{model!r} is no directory: say with --out where the file is to go")
    configure_logging(log_level)
    with ending_at_once(130):
        from swarm.client.distilling import texts as reading  # noqa: PLC0415 - torch: --help needs none
        from swarm.model.checkpoint import open_checkpoint  # noqa: PLC0415 - as above
        from swarm.model.importance import IMPORTANCE_NAME, write_importance  # noqa: PLC0415 - as above
        from swarm.model.weighing import measured  # noqa: PLC0415 - as above
    path = folder / IMPORTANCE_NAME
    if path.exists():
        raise BadConfiguration("out", f"{str(path)!r} is there already, and servers round by it; delete it first")
    checkpoint = open_checkpoint(model, revision=revision, token=token, cache_dir=cache_dir, root=root)
    most = checkpoint.traits.positions_max
    if most is not None and positions > most:
        raise BadConfiguration("positions", f"{positions}; the model has {most}")
    try:
        found = reading.windows(
            checkpoint.texts().tokenizer(),
            reading.texts_in(texts),
            positions=positions,
            windows_max=windows,
            vocabulary=checkpoint.config.get_text_config(decoder=True).vocab_size,
        )
        squares = measured(checkpoint, found)
        folder.mkdir(parents=True, exist_ok=True)
        importance = write_importance(checkpoint.model, path, checkpoint.root, squares)
    except OSError as error:
        raise BadConfiguration("texts or out", f"{error.filename}: {error.strerror}") from None
    click.echo(f"{path}: of {len(squares)} layers, in {found.numel():,} tokens")
    click.echo(f"weights that are rounded by it are {importance.named('int4')}")


def main() -> None:
    """Run the command."""
    run_click(command)


if __name__ == "__main__":
    main()
