"""Fuzz every parser for long: `make fuzz`, or `python -m tests.fuzz --parser frame --cases 100000`.

Prints a line for each parser, keeps corpora and findings in build/fuzz, and exits 1 after a finding.
"""

import logging
import sys
import time
import traceback
from pathlib import Path

import click
import structlog

from tests.fuzz.parsers import PARSERS
from tests.fuzz.parsers.base import Parser
from tests.fuzz.run import Guided, feed_atheris, feed_hypothesis, has_atheris

RESULTS = Path(__file__).parents[2] / "build" / "fuzz"


@click.command()
@click.option("--parser", "names", multiple=True, type=click.Choice([*PARSERS]), help="may be repeated; default: all")
@click.option("--cases", default=100_000, show_default=True, help="of Hypothesis, per parser; 0: none")
@click.option("--executions", default=10_000_000, show_default=True, help="of atheris, per parser; 0: none")
@click.option("--seconds", default=3600.0, show_default=True, help="of CPU time, after which atheris stops as well")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="where corpora and findings are kept")
def main(names: tuple[str, ...], cases: int, executions: int, seconds: float, results: Path) -> None:
    """Feed the parsers what strangers might send."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    if executions and not has_atheris():
        raise click.UsageError("atheris is not installed (it has no wheel for this platform); pass --executions 0")
    parsers = [PARSERS[name] for name in names or PARSERS]
    found = [parser.name for parser in parsers if cases and not _by_hypothesis(parser, cases, results)]
    if executions:
        found += [done.parser for done in feed_atheris(parsers, results, executions, seconds) if not _is_clean(done)]
    click.echo(f"findings: {', '.join(sorted(set(found))) or 'none'}")
    sys.exit(1 if found else 0)


def _by_hypothesis(parser: Parser, n_cases: int, results: Path) -> bool:
    began = time.process_time()
    try:
        fed = feed_hypothesis(parser, n_cases, results / parser.name / "hypothesis")
    except Exception:  # noqa: BLE001 - that is what is looked for
        click.echo(f"{parser.name:24} Hypothesis: FOUND\n{traceback.format_exc()[-6000:]}")
        return False
    click.echo(f"{parser.name:24} Hypothesis: {fed:>10,} cases in {time.process_time() - began:.0f} s of CPU time")
    return True


def _is_clean(done: Guided) -> bool:
    if done.finding is not None:
        click.echo(f"{done.parser:24} atheris: FOUND\n{done.finding}")
        return False
    click.echo(f"{done.parser:24} atheris: {done.executions:>13,} executions in {done.cpu_s:.0f} s of CPU time")
    return True


if __name__ == "__main__":
    main()
