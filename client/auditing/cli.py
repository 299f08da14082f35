"""`swarm-verify`: check a file of evidence against a server, on one's own machine and without the swarm."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm.commands import configure_logging, ending_at_once, run_click
from swarm.errors import SwarmError
from swarm.options import LOG_LEVELS
from swarm.version import __version__

if TYPE_CHECKING:
    from swarm.client.auditing.evidence import Evidence
    from swarm.client.auditing.verify import Finding


class NothingShown(SwarmError):
    """Genuine evidence that does not show its server as wrong."""


@click.command("swarm-verify")
@click.version_option(__version__)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("checkpoint", metavar="[MODEL]", required=False)  # not the setting `model`: it is of other files
@click.option("--revision", default=None, help="branch, tag or commit of a hub repository")
@click.option("--token", default=None, envvar=("SWARM_TOKEN", "HF_TOKEN"), help="for private or gated repositories")
@click.option("--cache-dir", type=click.Path(path_type=Path), default=None, help="where downloads are kept")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="warning", show_default=True)
def command(
    *,
    file: Path,
    checkpoint: str | None,
    revision: str | None,
    token: str | None,
    cache_dir: Path | None,
    log_level: str,
) -> None:
    """Check FILE, which is said to show that a server computed wrongly, and trust nobody for it.

    The file holds the activations that a server was given, those that it returned, and the server's signature under
    both. Without MODEL the signature and the digests are checked: whether the server returned these for those.

    With MODEL, the checkpoint that the server named (a directory or a hub id), its blocks are computed once more here.
    The command exits with 0 if the server was wrong beyond what rounding explains, and with 1 if it was not, if these
    inputs can show nothing, or if the file is damaged, forged or put together from several.

    An auditor writes such files: swarm-health --audit MODEL --audit-evidence FOLDER.
    """
    configure_logging(log_level)
    with ending_at_once():
        from swarm.client.auditing.evidence import Evidence  # noqa: PLC0415 - torch: --help needs none
        from swarm.client.auditing.verify import verify  # noqa: PLC0415 - as above
        from swarm.model.checkpoint import open_checkpoint  # noqa: PLC0415 - as above
    evidence = Evidence.load(file)
    for line in described(evidence):
        click.echo(line)
    if checkpoint is None:
        click.echo("signed by this server. Give its MODEL, too, to see whether the outputs are right")
        return
    said = evidence.receipt.statement
    opened = open_checkpoint(checkpoint, revision=revision, token=token, cache_dir=cache_dir, root=said.root)
    conclude(verify(evidence, opened))


def described(evidence: "Evidence") -> list[str]:
    """Return the words of a receipt."""
    said = evidence.receipt.statement
    when = datetime.fromtimestamp(min(said.issued, 1 << 37), UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [
        f"server   {said.peer_id}",
        f"model    root {said.root}",
        f"blocks   {said.start}:{said.stop} in {said.numeric_class}",
        f"session  {said.session}: {said.rows} x {said.length} positions, {said.told} outputs",
        f"signed   {when}, by the server's clock",
    ]


def conclude(finding: "Finding") -> None:
    """Say what was found. Raises NothingShown where the server is not shown as wrong."""
    told, spread, bounds = finding.told, finding.spread, finding.bounds
    click.echo(f"distance of its outputs from ours: {told.typical:.1e} in the median, {told.worst:.1e} at most")
    click.echo(f"honest ones differ by less than {bounds.typical:.0e} and {bounds.worst:.0e}")
    if not finding.is_steady:
        raise NothingShown(
            f"the file shows nothing: on these inputs rounding alone makes {spread.typical:.1e} and {spread.worst:.1e}"
        )
    if not finding.is_wrong:
        raise NothingShown("the server was right: its outputs are within the bounds")
    click.echo("the server computed wrongly")


def main() -> None:
    """Run the command."""
    run_click(command)


if __name__ == "__main__":
    main()
