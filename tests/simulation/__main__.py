"""Run many seeds, and say what did not hold: `python -m tests.simulation --seeds 0:10000 --departures 6,60 --jobs 2`.

Results are appended to a file as they come. Run the same command again and it goes on where it was; when the code has
changed it starts anew, in another file.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from tests.simulation.customer import Customer, wrong_sessions_most
from tests.simulation.guesser import Guesser
from tests.simulation.jobs import Job, simulate_job
from tests.simulation.run import Outcome, User, settle

TREE = Path(__file__).parents[2]
SOURCES = ("swarm", "client", "server", "dht", "tests/simulation")
RESULTS = TREE / "build" / "simulation"


@click.command()
@click.option("--seeds", required=True, help="one seed, or a range: 0:10000")
@click.option("--departures", default="6,60", show_default=True, help="a minute, among a hundred servers")
@click.option("--anchors", is_flag=True, help="some servers are hidden, and the anchors that lead to them die")
@click.option("--guesses", is_flag=True, help="tokens are guessed ahead: steps are in flight that may be wrong")
@click.option("--liars", default=0.0, show_default=True, help="a share of servers boasts and computes wrongly")
@click.option("--jobs", default=1, show_default=True, help="processes")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="where results are kept")
@click.option("--trace", is_flag=True, help="run one seed and print all that happens")
@click.option("--messages", is_flag=True, help="with --trace, every message too")
def main(
    seeds: str,
    departures: str,
    anchors: bool,
    guesses: bool,
    liars: float,
    jobs: int,
    results: Path,
    trace: bool,
    messages: bool,
) -> None:
    """Simulate swarms in which servers come and go, and compare every token with the model run locally."""
    rates = [float(rate) for rate in departures.split(",")]
    user = (Customer if liars else Guesser if guesses else User).__name__
    if trace:
        _print_trace((int(seeds), rates[0], anchors, user, liars), messages)
        return
    first, _, last = seeds.partition(":")
    wanted = [
        (seed, rate, anchors, user, liars) for seed in range(int(first), int(last or int(first) + 1)) for rate in rates
    ]
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{code_version()}.jsonl"
    done = _read(path)
    _run([job for job in wanted if job not in done], path, jobs)
    done = _read(path)
    sys.exit(_report([done[job] for job in wanted]))


def code_version() -> str:
    """Return a digest of all that a result depends on."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((TREE / folder).rglob("*.py")):
            if file.name.startswith("test_"):
                continue
            digest.update(f"{file.relative_to(TREE)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _print_trace(job: Job, messages: bool) -> None:
    lines: list[str] = []
    outcome = simulate_job(job, lines)
    for line in lines:
        if messages or line.split(" ", 2)[1] != "message":
            click.echo(line)
    click.echo(json.dumps(outcome.row(), indent=2))


def _read(path: Path) -> dict[Job, Outcome]:
    """Read results; the last line may be half written."""
    found: dict[Job, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            outcome = Outcome(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[outcome.seed, outcome.departures_per_min, outcome.anchored, outcome.user, outcome.liars] = outcome
    return found


def _run(jobs: Sequence[Job], path: Path, processes: int) -> None:
    with path.open("a") as file, tqdm(total=len(jobs), unit="run", disable=None, mininterval=1.0) as bar:
        bad = 0
        for outcome in _outcomes(jobs, processes):
            file.write(json.dumps(outcome.row()) + "\n")
            file.flush()
            bad += not outcome.good
            bar.set_postfix(bad=bad, refresh=False)
            bar.update()


def _outcomes(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
    if processes == 1:
        settle()
        yield from (simulate_job(job) for job in jobs)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=settle) as pool:
        try:
            yield from (done.result() for done in as_completed([pool.submit(simulate_job, job) for job in jobs]))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _report(outcomes: Sequence[Outcome]) -> int:
    """Print what came out. Returns the exit status: 1 where something did not hold."""
    rates = sorted({outcome.departures_per_min for outcome in outcomes})
    table: list[tuple[str, list[Any]]] = []
    groups = [[outcome for outcome in outcomes if outcome.departures_per_min == rate] for rate in rates]

    def row(name: str, of: Any) -> None:
        table.append((name, [of(group) for group in groups]))

    row("runs", len)
    row("tokens", lambda group: sum(o.tokens for o in group))
    row("wrong tokens", lambda group: sum(o.wrong for o in group))
    row("hangs", lambda group: sum(o.hung for o in group))
    row("exceptions that nobody caught", lambda group: sum(len(o.faults) for o in group))
    row("ended early although all blocks had a holder", lambda group: sum(bool(o.error) and o.covered for o in group))
    row("ended early, some block without a holder", lambda group: sum(bool(o.error) and not o.covered for o in group))
    row("crashes during the runs", lambda group: sum(o.crashes for o in group))
    row("stalls during the runs", lambda group: sum(o.stalls for o in group))
    row("partitions during the runs", lambda group: sum(o.partitions for o in group))
    row("anchors that died during the runs", lambda group: sum(o.anchor_deaths for o in group))
    row("channels relayed", lambda group: sum(o.relayed for o in group))
    row("channels punched", lambda group: sum(o.punched for o in group))
    row("servers refused for their clock", lambda group: sum(o.skewed for o in group))
    if any(o.liars for o in outcomes):
        row("sessions", lambda group: sum(o.sessions for o in group))
        row("wrong sessions", lambda group: sum(o.wrong_sessions for o in group))
        row("wrong sessions by the formula", lambda group: round(wrong_sessions_most(group), 1))
        row("lying servers that sessions met", lambda group: sum(o.met for o in group))
        row("of them found", lambda group: sum(o.found for o in group))
        row("honest servers taken for wrong", lambda group: sum(o.slandered for o in group))
    row("repairs", lambda group: sum(o.repairs for o in group))
    row("virtual seconds a run", lambda group: _mean(o.virtual_s for o in group))
    row("CPU seconds a run", lambda group: _mean(o.cpu_s for o in group))
    click.echo(f"{'departures a minute':<46}" + "".join(f"{rate:>12g}" for rate in rates))
    for name, values in table:
        click.echo(f"{name:<46}" + "".join(f"{value:>12}" for value in values))
    bad = [outcome for outcome in outcomes if not outcome.good]
    for outcome in bad[:20]:
        blamed = f"{outcome.slandered} honest servers taken for wrong" if outcome.slandered else ""
        why = outcome.error or (outcome.faults or [blamed or f"{outcome.wrong} wrong tokens"])[0]
        click.echo(f"\n{why}\n  {replay(outcome)}")
    return 1 if bad else 0


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return round(sum(every) / max(1, len(every)), 3)


def replay(outcome: Outcome) -> str:
    """Return the command that runs this seed again and shows what happens."""
    anchors = " --anchors" * outcome.anchored + " --guesses" * (outcome.user == Guesser.__name__)
    anchors += f" --liars {outcome.liars:g}" if outcome.liars else ""
    rate = f"{outcome.departures_per_min:g}"
    return f"python -m tests.simulation --seeds {outcome.seed} --departures {rate}{anchors} --trace"


if __name__ == "__main__":
    main()
