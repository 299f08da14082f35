"""A part of `nat.py`: whether and how fast pairs of peers meet, behind all pairs of routers."""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product

from common import SEED, Samples
from nat_peers import Known, PeerProcess
from nat_result import Line, Part, late, middle

from tests.support.lab import KINDS, Lab

ANCHOR_MS, CALLER_MS, CALLEE_MS = 10.0, 15.0, 20.0  # one way, to the middle: 70 ms there and back, relayed 110
PUNCHED_SHARE_MIN = 0.99
CONNECT_S_MAX, RELAYED_S_MAX = 0.5, 0.6  # medians, with the caller's own way to the anchor
PLACES = 2  # of each kind and side
AT_ONCE = 4  # pairs that meet at one time
ROUTED = tuple(kind for kind, routers in KINDS.items() if routers)
SYMMETRIC = tuple(kind for kind, routers in KINDS.items() if any(router.random for router in routers))
CONES = tuple(kind for kind in ROUTED if kind not in SYMMETRIC)
Pair = tuple[str, str]


def pairs(quick: bool) -> Part:
    """Let pairs meet: each has new identities, ports and lines, so its routers know nothing of it."""
    cones, symmetric = (12, 6) if quick else (400, 100)
    draw = random.Random(SEED)
    wanted = [*_drawn(draw, [*product(CONES, CONES)], cones), *_drawn(draw, _with_symmetric(), symmetric)]
    draw.shuffle(wanted)
    with Lab() as lab, ExitStack() as ending:
        anchor = ending.enter_context(PeerProcess(lab.public_host(ANCHOR_MS)))
        at = Known(*anchor.ask("anchor", host=anchor.host.address))
        kinds = sorted({kind for pair in wanted for kind in pair})

        def places(delay_ms: float) -> dict[str, list[PeerProcess]]:
            hosts = {kind: [lab.site(kind, delay_ms).host() for _ in range(PLACES)] for kind in kinds}
            return {kind: [ending.enter_context(PeerProcess(one)) for one in of] for kind, of in hosts.items()}

        met = _meetings(wanted, places(CALLER_MS), places(CALLEE_MS), at)
    return _judged(met)


def _drawn(draw: random.Random, kinds: list[Pair], count: int) -> list[Pair]:
    """Return so many pairs: each kind as often as the others, and the rest by lot."""
    return [pair for _ in range(count // len(kinds)) for pair in kinds] + draw.sample(kinds, count % len(kinds))


def _with_symmetric() -> list[Pair]:
    """Return the pairs that a symmetric router keeps apart: the other one lets in what comes from one port alone."""
    strict = [kind for kind in ROUTED if kind not in {"forwarded", "full_cone", "address_restricted"}]
    return [pair for pair in product(strict, strict) if set(pair) & set(SYMMETRIC)]


Places = dict[str, list[PeerProcess]]
Met = list[tuple[Pair, dict[str, object]]]


def _meetings(wanted: Sequence[Pair], callers: Places, callees: Places, at: Known) -> Met:
    """Let the pairs meet, a few at one time, each process in one meeting."""
    met: Met = []
    waiting = list(wanted)
    while waiting:
        used: Counter[tuple[int, str]] = Counter()
        batch: list[tuple[Pair, PeerProcess, PeerProcess]] = []
        for pair in list(waiting):
            if len(batch) == AT_ONCE:
                break
            if used[0, pair[0]] < PLACES and used[1, pair[1]] < PLACES:
                batch.append((pair, callers[pair[0]][used[0, pair[0]]], callees[pair[1]][used[1, pair[1]]]))
                used[0, pair[0]] += 1
                used[1, pair[1]] += 1
                waiting.remove(pair)
        for _, caller, callee in batch:
            callee.send("moor", anchors=[at])
            caller.send("callers", count=1)
        known = [(callee.answer(), caller.answer())[0][0] for _, caller, callee in batch]
        for (_, caller, _), its in zip(batch, known, strict=True):
            caller.send("call", anchor=at, callee=its)
        met += [(pair, caller.answer()) for pair, caller, _ in batch]
    return met


def _judged(met: Met) -> Part:
    apart = set(_with_symmetric())
    samples = {False: Samples("connect, no symmetric router"), True: Samples("connect, a symmetric router")}
    ways: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    for pair, result in met:
        ways[pair in apart][str(result["way"]) or "failed"] += 1
        if result["way"]:
            samples[pair in apart].ms.append(1000 * float(str(result["s"])))
    count = {kind: sum(found.values()) for kind, found in ways.items()}
    failed = sum(found["failed"] for found in ways.values())
    others = [[*pair, result["way"], result.get("why", "")] for pair, result in met if result["way"] != "punched"]
    punched = ways[False]["punched"] / count[False]
    lines = [
        Line(f"{count[False]} pairs without a symmetric router: punched", punched, "of all", PUNCHED_SHARE_MIN, True),
        Line("the same: connect, median", middle(samples[False].ms) / 1000, "s", CONNECT_S_MAX),
        Line("the same: connect, p95", late(samples[False].ms) / 1000, "s"),
        Line(f"{count[True]} pairs with one: connect, median", middle(samples[True].ms) / 1000, "s", RELAYED_S_MAX),
        Line(f"pairs of all {len(met)} that did not connect", failed, "", 0),
    ]
    facts = {"ways": {"none symmetric": dict(ways[False]), "symmetric": dict(ways[True])}, "not_punched": others}
    return Part([sample for sample in samples.values() if sample.ms], lines, facts)
