"""A part of `nat.py`: tokens behind mixes of routers, in turns, and how fast their servers are online."""

import json
import tempfile
from collections import Counter
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from common import Samples
from nat_result import Line, Part, middle

from tests.support.lab import Lab
from tests.support.lab.swarm import LabSwarm, local_tokens
from tests.support.swarms import DEMO_SPANS, eventually

HOME_MS, ANCHOR_MS = 10.0, 5.0  # one way: a token takes 80 ms on its way directly, 120 through the anchor
CONE_SHARE_MAX, ONLINE_S_MAX, JOIN_S_MAX = 1.05, 2.0, 10.0
ANCHORS = 2
ROUND_S = 60.0
MIXES = {  # the client's router, and those of the three servers
    "all public": ("public", "public", "public", "public"),
    "four cones": ("full_cone", "address_restricted", "port_restricted", "reject"),
    "all double": ("double", "double", "double", "double"),
    "one symmetric": ("port_restricted", "port_restricted", "symmetric", "public"),
    "all symmetric": ("symmetric", "symmetric", "symmetric", "symmetric"),
}
CONES = ("four cones", "all double")


def tokens(quick: bool) -> Part:
    """Generate behind each mix in turn, all of them being there at one time."""
    rounds, count = (1, 12) if quick else (3, 32)
    mixes = [name for name in MIXES if not quick or name in ("all public", "four cones", "all symmetric")]
    part, online, joined = Part(), list[float](), list[float]()
    with Lab() as lab, ExitStack() as ending:
        places = {name: _Mix(lab, ending, name, rounds + 1, count) for name in mixes}
        for number in range(rounds + 1):  # the first one connects
            for place in places.values():
                place.round(number)
        for name, place in places.items():
            online += place.online_s
            joined.append(place.joined_s)
            part.samples += [Samples(f"token, {name}", place.ms), Samples(f"first token, {name}", place.ttft_ms)]
            part.facts[name] = {"ways": dict(place.ways), "online_s": place.online_s, "joined_s": place.joined_s}
            part.lines.append(Line(f"{name}: wrong generations", place.wrong, "", 0))
        part.lines += _compared(places)
    part.lines += [
        Line("server behind a router: loaded until online, longest", max(online), "s", ONLINE_S_MAX),
        Line("client: to join, longest", max(joined), "s", JOIN_S_MAX),
    ]
    return part


def _compared(places: "dict[str, _Mix]") -> list[Line]:
    public = middle(places["all public"].ms)
    lines = []
    for name, place in places.items():
        lines.append(Line(f"{name}: a token, median", middle(place.ms), "ms"))
        if name in CONES:
            lines += [
                Line(f"{name}: times that of all public", middle(place.ms) / public, "", CONE_SHARE_MAX),
                Line(f"{name}: channels relayed", place.ways["relayed"], "", 0),
            ]
    return lines


class _Mix:
    """A swarm whose servers are behind such routers, and a client that generates when it is told."""

    def __init__(self, lab: Lab, ending: ExitStack, name: str, rounds: int, count: int) -> None:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        self.count, self.wrong, self.ms, self.ttft_ms = count, 0, list[float](), list[float]()
        client, *servers = (lab.site(kind, HOME_MS).host() for kind in MIXES[name])
        self._swarm = ending.enter_context(LabSwarm(folder, env={"SWARM_LOG_LEVEL": "info"}))
        for _ in range(ANCHORS):
            self._swarm.bootstrap(lab.public_host(ANCHOR_MS))
        started = self._swarm.servers(dict(zip(DEMO_SPANS, servers, strict=True)))
        hidden = [kind not in ("public", "forwarded") for kind in MIXES[name][1:]]
        self.online_s = [_online_s(server.log) for server, is_hidden in zip(started, hidden, strict=True) if is_hidden]
        self._generated = self._swarm.generate(client, count, rounds, paced=True)

    def round(self, number: int) -> None:
        """Generate once; the first time is not counted."""
        self._generated.go(number)
        eventually(lambda: len(list(self._generated.finished())) > number, ROUND_S)
        done = list(self._generated.finished())[number]
        self.wrong += done.tokens != local_tokens(self.count)
        self.ttft_ms.append(1000 * done.ttft_s)
        if number > 0:
            self.ms += [1000 * gap for gap in done.gaps_s]

    @property
    def ways(self) -> Counter[str]:
        """How the channels to hidden peers came about, as all processes tell."""
        lines = [line for process in self._swarm.processes for line in process.log.read_text().splitlines()]
        return Counter(json.loads(line)["way"] for line in lines if '"met a hidden peer"' in line)

    @property
    def joined_s(self) -> float:
        """How long the client took to join."""
        return self._generated.joined_s


def _online_s(log: Path) -> float:
    """Return the seconds from the loaded span to being online, from a server's log, once it says both."""
    at: dict[str, datetime] = {}

    def both() -> bool:
        for line in log.read_text().splitlines():
            for event in ("kernels chosen", "online"):
                if f'"event": "{event}"' in line:
                    at.setdefault(event, datetime.fromisoformat(json.loads(line)["timestamp"]))
        return len(at) == 2

    eventually(both, within_s=ROUND_S)  # a client may find a record before its server has logged it
    return (at["online"] - at["kernels chosen"]).total_seconds()
