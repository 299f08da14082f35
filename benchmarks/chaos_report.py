"""What a chaos run shows: which fault cost which session how long, and which of the project's promises were kept."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos_faults import KINDS, Died, Fault
from chaos_sessions import Generation, Step
from common import Samples, table, write_json

COMPLETED_MIN = 0.999
MEDIAN_S_MAX, P99_S_MAX = 1.0, 5.0
STALL_S = 0.25  # a step that takes so much longer than usual, without a repair, while a fault is on its route
AFTERMATH_S = 5.0  # a fault may be felt so long after its end: packets on their way, connections to open again
OTHER = "no fault"  # repairs that no fault explains
EVENTS_REPORTED = 60  # of the clients, around one generation that failed


@dataclass(frozen=True, slots=True)
class Run:
    """All that happened.

    hung: generations that never ended. events: the clients' own, oldest first. stolen: the share of processor time in
    which this machine, if it is a virtual one, wanted to run and did not.
    """

    seconds: float
    faults: list[Fault]
    died: list[Died]
    generations: list[Generation]
    hung: int
    events: list[dict[str, Any]]
    stolen: float = 0.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """A step that took longer because of a fault: how much longer than the run's median step, and what it cost."""

    kind: str
    client: int
    ended: float
    extra_s: float
    repairs: int


def recoveries_of(steps: Sequence[Step], faults: Sequence[Fault]) -> list[Recovery]:
    """Find the steps in which a session recovered, each with the kind of the latest fault that explains it. Pure."""
    if not steps:
        return []
    usual_s = statistics.median(step.took_s for step in steps)
    found = []
    for step in steps:
        left = set(step.before) - set(step.after)
        cause = _latest(faults, left or set(step.before), step)
        extra_s = step.took_s - usual_s
        if step.repairs or (cause is not None and extra_s > STALL_S):
            kind = cause.kind if cause is not None else OTHER
            found.append(Recovery(kind, step.client, step.ended, extra_s, step.repairs))
    return found


def _latest(faults: Sequence[Fault], peers: set[str], step: Step) -> Fault | None:
    """Return the latest fault of these peers that can be felt in a step."""
    began = step.ended - step.took_s
    felt = (
        fault
        for fault in faults
        if fault.peer_id in peers
        and fault.began <= step.ended
        and (fault.ended is None or fault.ended + AFTERMATH_S >= began)
    )
    return max(felt, key=lambda fault: fault.began, default=None)


def report(run: Run, path: Path | None, options: dict[str, str]) -> list[str]:
    """Print and write everything. Returns the promises that were not kept."""
    steps = [step for made in run.generations for step in made.steps]
    recoveries = recoveries_of(steps, run.faults)
    _print_faults(run.faults, recoveries)
    summary = _summary(run, steps)
    for name, value in summary.items():
        print(f"{name}: {value}")
    _print_troubles(run)
    broken = broken_promises(run, recoveries)
    for promise in broken:
        print(f"NOT KEPT: {promise}")
    samples = [Samples("step", [1000 * step.took_s for step in steps])]
    samples += [Samples("first token", [1000 * m.first_s for m in run.generations if m.first_s is not None])]
    samples += [_samples(kind, recoveries) for kind in (*KINDS, OTHER)]
    write_json(
        path,
        "chaos",
        int(options["seed"]),
        samples,
        options=options,
        summary=summary,
        broken_promises=broken,
        faults=[asdict(fault) for fault in run.faults],
        died=[asdict(died) for died in run.died],
        recoveries=[asdict(recovery) for recovery in recoveries],
        slow=[_slow(recovery, run) for recovery in recoveries if recovery.extra_s > P99_S_MAX / 2],
        generations=[_in_short(made) for made in run.generations],
        failures=[_failure(made, run) for made in run.generations if not made.completed or made.wrong],
    )
    return broken


def _print_faults(faults: Sequence[Fault], recoveries: Sequence[Recovery]) -> None:
    rows = []
    for kind in (*KINDS, OTHER):
        done = [fault for fault in faults if fault.kind == kind]
        samples = _samples(kind, recoveries)
        if not done and not samples.ms:
            continue
        figures = [""] * 4
        if samples.ms:
            over = sum(ms > 1000 * P99_S_MAX for ms in samples.ms)
            figures = [*(f"{ms:.0f}" for ms in (samples.median, samples.percentile(0.99), max(samples.ms))), str(over)]
        rows.append([kind, str(len(done)), str(sum(f.on_route > 0 for f in done)), str(len(samples.ms)), *figures])
    columns = ("", "faults", "on a route", "recoveries", "median", "p99", "max", f"over {P99_S_MAX:.0f} s")
    table("by kind of fault, recovery in milliseconds beyond the run's median step", columns, rows)
    print("on a route: a session used the server at that moment; recoveries: steps in which a session was repaired,")
    print(f"or took {STALL_S:g} s longer than usual while the fault lasted\n")


def _samples(kind: str, recoveries: Sequence[Recovery]) -> Samples:
    return Samples(kind, [1000 * max(0.0, each.extra_s) for each in recoveries if each.kind == kind])


def _summary(run: Run, steps: Sequence[Step]) -> dict[str, str]:
    made = run.generations
    first = Samples("first token", [1000 * each.first_s for each in made if each.first_s is not None])
    took = Samples("step", [1000 * step.took_s for step in steps])
    completed = sum(each.completed for each in made)
    return {
        "seconds": f"{run.seconds:.0f}",
        "faults": str(len(run.faults)),
        "generations": f"{len(made)}, {completed} completed ({_share(run):.2%}), {run.hung} never ended",
        "wrong tokens": str(sum(each.wrong for each in made)),
        "tokens": str(len(steps) + len(first.ms)),
        "step": _distribution(took),
        "first token": _distribution(first),
        "servers that ended by themselves": str(len(run.died)),
        "processor time that other machines took": f"{run.stolen:.0%}",
    }


def _distribution(samples: Samples) -> str:
    if not samples.ms:
        return "none"
    p99 = samples.percentile(0.99)
    return f"median {samples.median:.1f} ms, p99 {p99:.0f}, max {max(samples.ms):.0f}"


def _share(run: Run) -> float:
    """Of all generations, those that completed."""
    begun = len(run.generations) + run.hung
    return sum(each.completed for each in run.generations) / begun if begun else 0.0


def _print_troubles(run: Run) -> None:
    reasons = Counter(made.error for made in run.generations if made.error is not None)
    for reason, count in reasons.most_common():
        print(f"failed, {count} times: {reason}")
    for died in run.died:
        print(f"server {died.server} ended by itself with code {died.code}: {died.said[-300:]}")
    for fault in run.faults:
        if fault.note:
            print(f"{fault.kind} of server {fault.server}: {fault.note}")


def broken_promises(run: Run, recoveries: Sequence[Recovery]) -> list[str]:
    broken = []
    wrong = sum(made.wrong for made in run.generations)
    if wrong:
        broken.append(f"no wrong token: {wrong} were")
    if _share(run) < COMPLETED_MIN:
        broken.append(f"{COMPLETED_MIN:.1%} of generations complete: {_share(run):.2%} did")
    for name, kinds in (("all", (*KINDS, OTHER)), ("stop", ("stop",))):
        samples = Samples(name, [1000 * each.extra_s for each in recoveries if each.kind in kinds])
        if not samples.ms:
            continue
        median_s, p99_s = samples.median / 1000, samples.percentile(0.99) / 1000
        if median_s > MEDIAN_S_MAX or p99_s > P99_S_MAX:
            promise = f"recovery ({name}) at most {MEDIAN_S_MAX:g} s in the median and {P99_S_MAX:g} s at p99"
            broken.append(f"{promise}: {median_s:.2f} and {p99_s:.2f}")
    return broken


def _in_short(made: Generation) -> dict[str, Any]:
    content = asdict(made)
    content["steps"] = len(made.steps)
    return content


def _failure(made: Generation, run: Run) -> dict[str, Any]:
    """What the clients saw around one generation that failed or was wrong."""
    return {**_in_short(made), "events": _events(run, made.began - 1, made.ended + 1)}


def _slow(recovery: Recovery, run: Run) -> dict[str, Any]:
    """What the clients saw while one of their sessions took long to recover."""
    return {**asdict(recovery), "events": _events(run, recovery.ended - recovery.extra_s - 1, recovery.ended)}


def _events(run: Run, begin: float, end: float) -> list[dict[str, str]]:
    around = [event for event in run.events if begin <= event["at"] <= end]
    return [{key: str(value) for key, value in event.items()} for event in around[-EVENTS_REPORTED:]]
