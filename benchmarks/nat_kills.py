"""A part of `nat.py`: anchors that die, or stop, while a client generates through servers behind routers."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common import Samples
from nat_result import Line, Part, late, middle

from swarm.demo.local import LocalProcess
from tests.support.lab import Host, Lab
from tests.support.lab.lab import Site
from tests.support.lab.swarm import Generation, LabSwarm, local_tokens
from tests.support.swarms import DEMO_SPANS, eventually

HOME_MS, ANCHOR_MS = 5.0, 2.0  # one way
ANCHORS = 5  # a server is moored at three of them
TOKENS = 32  # of a round, in which an anchor dies at most once
BOUNDS_S = {"killed, all edges relayed": 1.5, "stopped, all edges relayed": 6.0, "killed, all edges punched": 0.5}
STARTED_S = 60.0
ROUNDS_MAX = 100_000  # the client ends when it is told
LOOK_S = 0.3  # over which an anchor's traffic is counted
RECOVER_S = 3.0  # before the next one dies, so that the servers are moored at three again


def kills(quick: bool, deaths: int = 100, before: Part | None = None) -> Part:
    """Kill and stop the anchor that relays, again and again; and one that relays nothing, a fifth as often.

    before: the result of runs whose deaths count, too.
    """
    few, many = (1, 3) if quick else (max(1, deaths // 5), deaths)
    plans = [
        ("killed, all edges relayed", "symmetric", signal.SIGKILL, many),
        ("stopped, all edges relayed", "symmetric", signal.SIGSTOP, few),
        ("killed, all edges punched", "port_restricted", signal.SIGKILL, few),
    ]
    part = before or Part()
    ms = {sample.name: sample.ms for sample in part.samples}
    wrong = {name: int(str(part.facts.get(name, 0))) for name, *_ in plans}  # generations
    for name, kind, how, count in plans:
        gaps, calm, failed = _deaths(kind, how, count)
        wrong[name] += failed
        for what, more in ((_gap(name), gaps), (_gap(f"{name}: undisturbed rounds"), calm)):
            ms.setdefault(what, []).extend(more)
    lines = [line for name, *_ in plans for line in _lines(name, wrong[name], ms)]
    return Part([Samples(name, each) for name, each in ms.items()], lines, dict(wrong))


def _gap(name: str) -> str:
    return f"longest gap, {name}"


def _lines(name: str, wrong: int, ms: dict[str, list[float]]) -> list[Line]:
    gaps, calm = ms[_gap(name)], ms[_gap(f"{name}: undisturbed rounds")]
    of_all, what = (max(gaps), "longest") if name.startswith("stopped") else (middle(gaps), "median")
    return [
        Line(f"anchor {name}, {len(gaps)} times: wrong generations", wrong, "", 0),
        Line(f"the same: {what} gap", of_all / 1000, "s", BOUNDS_S[name]),
        Line("the same: p95 gap", late(gaps) / 1000, "s"),
        Line("the same: median of the longest gap of undisturbed rounds", middle(calm) / 1000, "s"),
    ]


def _deaths(kind: str, how: signal.Signals, count: int) -> tuple[list[float], list[float], int]:
    """Let anchors die. Returns the longest gap, in ms, of each disturbed and each calm round; and the wrong rounds."""
    with Lab() as lab, tempfile.TemporaryDirectory() as folder, _swarm(lab, Path(folder), kind) as place:
        for _ in range(count):
            place.wait_tokens(8)
            place.disturb(how)
        place.wait_rounds(2)
        rounds = list(place.generated.finished())
        wrong = sum(one.tokens != local_tokens(TOKENS) for one in rounds)
        gaps = [1000 * max(one.gaps_s) for one in rounds]
        calm = [gap for number, gap in enumerate(gaps) if number not in place.disturbed and number > 0]
        return [gaps[number] for number in place.disturbed], calm, wrong


@dataclass
class _Place:
    """A swarm in which a client generates round after round."""

    lab: Lab
    swarm: LabSwarm
    client: Site
    anchors: dict[Host, LocalProcess]
    generated: Generation
    disturbed: list[int] = field(default_factory=list)  # rounds

    def wait_tokens(self, count: int) -> None:
        """Wait for a round that has just begun, and has so many tokens."""
        self._eventually(lambda: 0 < len(list(self.generated.finished())) not in self.disturbed)
        begun = len(list(self.generated.finished()))
        self._eventually(lambda: self.generated.tokens() >= begun * TOKENS + count)

    def wait_rounds(self, count: int) -> None:
        """Wait until the disturbed rounds and so many more are over."""
        done = (self.disturbed or [0])[-1] + 1 + count
        self._eventually(lambda: len(list(self.generated.finished())) >= done)

    def disturb(self, how: signal.Signals) -> None:
        """Let the anchor with the most traffic die in this round, and be there again later."""
        host = self._busiest()
        number = self.generated.tokens() // TOKENS
        os.kill(self.anchors[host].ready["pid"], how)
        self.disturbed.append(number)
        self._eventually(lambda: len(list(self.generated.finished())) > number)
        if how is signal.SIGSTOP:
            os.kill(self.anchors[host].ready["pid"], signal.SIGCONT)
        else:
            self.anchors[host].kill()
            self.anchors[host] = self.swarm.bootstrap(host)
        time.sleep(RECOVER_S)

    def _busiest(self) -> Host:
        """Return the anchor to which the client sends most."""
        sent = {host: self._sent(host) for host in self.anchors}
        time.sleep(LOOK_S)
        return max(self.anchors, key=lambda host: self._sent(host) - sent[host])

    def _sent(self, host: Host) -> int:
        assert host.site is not None
        return self.lab.traffic(self.client, host.site)

    def _eventually(self, condition: Callable[[], object]) -> None:
        def looked() -> bool:
            assert self.generated.process.process.poll() is None, self.generated.process.last_lines()
            return bool(condition())

        eventually(looked, STARTED_S)


@contextmanager
def _swarm(lab: Lab, folder: Path, kind: str) -> Iterator[_Place]:
    homes = [lab.site(kind, HOME_MS) for _ in range(len(DEMO_SPANS) + 1)]
    hosts = [lab.public_host(ANCHOR_MS) for _ in range(ANCHORS)]
    with LabSwarm(folder) as swarm:
        anchors = {host: swarm.bootstrap(host) for host in hosts}
        swarm.servers(dict(zip(DEMO_SPANS, (home.host() for home in homes[:-1]), strict=True)))
        generated = swarm.generate(homes[-1].host(), TOKENS, ROUNDS_MAX)
        try:
            yield _Place(lab, swarm, homes[-1], anchors, generated)
        finally:
            generated.process.kill()
