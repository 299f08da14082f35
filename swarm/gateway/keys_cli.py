"""`swarm-gateway keys`: makes, lists and removes keys."""

from pathlib import Path
from typing import Any

import click

from swarm.errors import BadConfiguration, UsageError
from swarm.options import Command


def _file_option(function: Command) -> Command:
    return click.option(
        "--keys",
        "path",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="SWARM_KEYS",
        required=True,
        help="the key file; `add` makes it",
    )(function)


@click.group("keys")
def keys() -> None:
    """Make, list and remove the keys of a key file. A running gateway reads a changed file again."""


@keys.command("add")
@click.argument("name")
@_file_option
@click.option("--concurrency", type=click.IntRange(1), help="requests that run at one time")
@click.option("--requests-per-minute", type=click.IntRange(1))
@click.option("--tokens-per-minute", type=click.IntRange(1), help="computed ones: new prompt tokens and output")
@click.option("--model", "models", multiple=True, help="that its requests may name; may be repeated; default: all")
def add(
    *,
    name: str,
    path: Path,
    concurrency: int | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    models: tuple[str, ...],
) -> None:
    """Make a key for NAME, and print it. It is shown this one time: the file keeps its hash."""
    from swarm.gateway import keys as files  # noqa: PLC0415 - pydantic's models: --help needs none

    given = {
        "concurrency": concurrency,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "models": models or None,
    }
    entries = files.read(path).root if path.exists() else {}
    key = files.new_key()
    before = entries[name].model_dump() if name in entries else {"sha256": ()}
    limits = {option: value for option, value in given.items() if value is not None}
    merged: dict[str, Any] = {**before, **limits, "sha256": (*before["sha256"], files.digest_of(key))}
    dumped: dict[str, Any] = {each: entry.model_dump() for each, entry in entries.items()}
    try:
        file = files.KeyFile.model_validate({**dumped, name: merged})
    except ValueError:
        raise UsageError(
            f"{name!r} cannot be added: a name has up to 64 letters, digits and . _ @ -, and up to 16 keys"
        ) from None
    files.write(path, file)
    click.echo(key)


@keys.command("list")
@_file_option
def list_keys(*, path: Path) -> None:
    """List names with their limits, and the first digits of their keys' hashes."""
    from swarm.gateway import keys as files  # noqa: PLC0415 - as above

    for name, entry in files.read(path).root.items():
        limits = entry.model_dump(exclude={"sha256"}, exclude_none=True)
        shown = [f"{limit}={','.join(value) if limit == 'models' else value}" for limit, value in limits.items()]
        click.echo("  ".join([name, *(digest[:8] for digest in entry.sha256), *shown]))


@keys.command("remove")
@click.argument("name")
@click.option("--sha256", "first", help="first digits of one key's hash, as `list` shows it; default: all of NAME's")
@_file_option
def remove(*, name: str, first: str | None, path: Path) -> None:
    """Remove the keys of NAME. A running gateway ends their requests within a second."""
    from swarm.gateway import keys as files  # noqa: PLC0415 - as above

    entries = dict(files.read(path).root)
    if name not in entries:
        raise BadConfiguration(f"keys {path}", f"it has no {name!r}")
    digests = entries[name].sha256
    left = () if first is None else tuple(digest for digest in digests if not digest.startswith(first))
    if len(left) == len(digests):
        raise BadConfiguration(f"keys {path}", f"{name!r} has no key whose hash begins with {first!r}")
    if left:
        entries[name] = entries[name].model_copy(update={"sha256": left})
    else:
        del entries[name]
    files.write(path, files.KeyFile(entries))
