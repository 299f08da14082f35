"""A part of `nat.py`: honest meetings at an anchor that fifty hostile peers attack, against the same without."""

import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from common import Samples
from nat_hostile_peers import PEERS, Hostile
from nat_peers import PeerProcess
from nat_result import Line, Part, late

from tests.support.lab import Lab

P95_FACTOR_MAX, MEMORY_MIB_MAX = 2.0, 64.0
ANCHOR_MS, HOME_MS, HOSTILE_MS = 5.0, 10.0, 5.0  # one way
CALLERS = 24  # honest ones, on hosts of their own; each calls once in a while, with a new identity
CALLS_PER_S = 1.5  # of all of them
FAILED_MS = 60_000.0  # of a meeting that fails
TRAP_PORT = 31330


def hostile(quick: bool) -> Part:
    """Let honest callers meet an honest hidden peer, with and without attackers in turn.

    All honest peers are behind port-restricted routers, and new to the anchor.
    """
    rounds, seconds = (1, 4.0) if quick else (3, 15.0)
    calm, attacked = Samples("meeting, no attack"), Samples("meeting, attacked")
    failed, did, ways = Counter[str](), Counter[str](), Counter[str]()
    with Lab() as lab, ExitStack() as ending:
        anchor = ending.enter_context(PeerProcess(lab.public_host(ANCHOR_MS)))
        homes = [lab.site("port_restricted", HOME_MS).host() for _ in range(1 + (8 if quick else CALLERS))]
        hidden, *calling = [ending.enter_context(PeerProcess(home)) for home in homes]
        callers = itertools.cycle(calling)
        trap = lab.public_host(HOSTILE_MS)
        hosts = [lab.public_host(HOSTILE_MS) for _ in range(10 if quick else PEERS)]
        attackers = ending.enter_context(PeerProcess(hosts[0], Hostile))
        ending.enter_context(
            _cores([each.pid for each in (anchor, hidden, *calling)], [attackers.pid], lab.internet_pid)
        )
        at = anchor.ask("anchor", host=anchor.host.address)
        (known,) = hidden.ask("moor", anchors=[at])
        _stretch(callers, at, known, seconds / 2, Samples("warm"), Counter(), Counter())
        paths = [str(host.namespace.path) for host in hosts]
        attackers.ask("prepare", paths=paths, anchor=at, victim=known, trap=f"{trap.address}:{TRAP_PORT}")
        before = anchor.resident_mib()
        anchor.forget_most()
        for _ in range(rounds):
            _stretch(callers, at, known, seconds, calm, failed, ways)
            attackers.send("attack", seconds=seconds)
            _stretch(callers, at, known, seconds, attacked, failed, ways)
            for kind, counts in attackers.answer().items():
                did.update({f"{kind}: {what}": count for what, count in counts.items()})
        grown = anchor.resident_mib("VmHWM") - before
        dialled = lab.sent_to(trap.site)
        load, dropped = anchor.ask("load"), lab.ask({})["dropped"]
    factor = late(attacked.ms) / late(calm.ms)
    lines = [
        Line(f"{PEERS} hostile peers: honest meetings' p95, times that without", factor, "", P95_FACTOR_MAX),
        Line("the same: honest meetings that failed", sum(failed.values()), "", 0),
        Line("the same: anchor's memory more than before, at most", grown, "MiB", MEMORY_MIB_MAX),
        Line("the same: bytes that any peer sent to a third party", dialled, "", 0),
    ]
    facts = {
        "did": dict(did),
        "failed": dict(failed),
        "ways": dict(ways),
        "load": load,
        "before_mib": before,
        "grown_mib": grown,
        "packets_dropped_by_the_lab": dropped,
    }
    return Part([calm, attacked], lines, facts)


def _stretch(
    callers: Iterator[PeerProcess],
    at: list[str],
    known: list[str],
    seconds: float,
    samples: Samples,
    failed: Counter[str],
    ways: Counter[str],
) -> None:
    """Let one caller after the other call."""
    until = time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        caller = next(callers)
        caller.ask("callers", count=1)
        met = caller.ask("call", anchor=at, callee=known)
        samples.ms.append(1000 * met["s"] if met["way"] else FAILED_MS)
        ways[f"{samples.name}: {met['way'] or 'failed'}"] += 1
        if not met["way"]:
            failed[f"{samples.name}: {met['why']}"] += 1
        time.sleep(max(0.0, began + 1 / CALLS_PER_S - time.monotonic()))


@contextmanager
def _cores(honest: list[int], attacking: list[int], internet: int) -> Iterator[None]:
    """Give the attackers a core, which a loop of the lowest priority fills all the time, and the others another.

    As root, nothing else of the machine delays the others, nor the lab's internet, which shares the attackers' core.
    """
    cores = sorted(os.sched_getaffinity(0))
    for pids, core in ((honest, cores[0]), ([*attacking, internet], cores[-1])):
        for pid in pids:
            os.sched_setaffinity(pid, {core})
    if os.geteuid() == 0:
        for pid in (*honest, internet):  # it carries honest packets, too
            os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
    line = ("taskset", "-c", str(cores[-1]), "nice", "-n", "19", sys.executable, "-c", "while True: pass")
    with subprocess.Popen(line) as filling:
        try:
            yield
        finally:
            filling.kill()
