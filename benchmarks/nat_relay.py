"""Parts of `nat.py`: what an anchor computes and remembers for others, as its process's own figures say."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from common import Samples
from nat_crowd import Crowd
from nat_peers import PeerProcess
from nat_result import Line, Part

from tests.support.lab import Lab

FRAME_US_MAX, BULK_US_MAX, CALL_MS_MAX, MOORED_MIB_MAX = 60.0, 30.0, 2.0, 16.0
CALLERS, CALLEES = 8, 4  # an anchor takes two calls a second of a caller, and four to a hidden peer
CALLS_PER_S = 40.0  # an anchor takes 50 in all
OF_HOST_MAX = 16  # moorings that an anchor takes from one address
SETTLE_S = 7.0  # of pings on all moorings, before the memory is read


def relay(quick: bool) -> Part:
    """Measure what an anchor computes for a relayed frame, for 16 KiB of many, and for a call."""
    rounds, echoes, bulk, calls = (1, 200, 256, 16) if quick else (8, 400, 960, 48)  # below 16 MiB no byte waits
    frames, bulks = Samples("anchor's CPU, a relayed frame"), Samples("anchor's CPU, 16 KiB of many")
    called = {way: Samples(f"anchor's CPU, a call, {way}") for way in ("punched", "relayed")}
    seen: Counter[str] = Counter()
    with Lab() as lab, ExitStack() as ending:

        def pair(kind: str) -> list[PeerProcess]:
            return [ending.enter_context(PeerProcess(lab.site(kind).host())) for _ in range(2)]

        anchor = ending.enter_context(PeerProcess(lab.public_host()))
        at = anchor.ask("anchor", host=anchor.host.address)
        pairs = {"punched": pair("port_restricted"), "relayed": pair("symmetric")}
        for _ in range(rounds):
            frames.ms.append(_frames(anchor, pairs["relayed"], at, "echo", 2 * echoes, frames=echoes))
            bulks.ms.append(_frames(anchor, pairs["relayed"], at, "flood", bulk, frames=bulk))
            for way, ends in pairs.items():
                called[way].ms.append(_calls(anchor, ends, at, calls, seen))
    lines = [
        Line("relayed frame of 16 KiB, anchor's CPU", 1000 * frames.median, "us", FRAME_US_MAX),
        Line("16 KiB of many relayed, anchor's CPU", 1000 * bulks.median, "us", BULK_US_MAX),
        *(Line(f"call, {way}, anchor's CPU", each.median, "ms", CALL_MS_MAX) for way, each in called.items()),
    ]
    return Part([frames, bulks, *called.values()], lines, {"ways": dict(seen)})


def moored(quick: bool) -> Part:
    """Measure the memory of an anchor with many moored peers, and what it computes for their pings."""
    hosts, warm_up = (3, 16) if quick else (32, 16)
    peers = 40 if quick else 500
    with Lab() as lab, ExitStack() as ending:
        anchor = ending.enter_context(PeerProcess(lab.public_host()))
        at = anchor.ask("anchor", host=anchor.host.address)
        places = [lab.public_host() for _ in range(hosts + 1)]
        crowd = ending.enter_context(PeerProcess(places[0], Crowd))
        paths = [str(place.namespace.path) for place in places]
        crowd.ask("moor", paths=paths[:1], anchor=at, count=warm_up)  # imports and caches of the first ones
        crowd.ask("leave")
        time.sleep(1.0)
        before = anchor.resident_mib()
        moored = crowd.ask("moor", paths=paths[1:], anchor=at, count=peers)
        time.sleep(SETTLE_S)
        grown, began, cpu_ms = anchor.resident_mib() - before, time.perf_counter(), anchor.cpu_ms
        time.sleep(SETTLE_S)
        share = Samples("anchor's CPU, a second of pings", [(anchor.cpu_ms - cpu_ms) / (time.perf_counter() - began)])
        assert anchor.ask("load")["moored"] == moored == peers
    lines = [
        Line(f"anchor with {peers} moored peers: memory more than before", grown, "MiB", MOORED_MIB_MAX),
        Line(f"anchor with {peers} moored peers: CPU a second", share.median, "ms"),
    ]
    return Part([share], lines, {"moored": moored, "before_mib": before, "grown_mib": grown})


def _frames(
    anchor: PeerProcess, ends: Sequence[PeerProcess], at: list[str], do: str, relayed: int, **arguments: int
) -> float:
    """Let a relayed pair exchange frames. Returns the anchor's ms for each that it relays."""
    caller, hidden = ends
    (known,) = hidden.ask("moor", anchors=[at])
    caller.ask("callers", count=1)
    met = caller.ask("call", anchor=at, callee=known, keep=True)
    assert met["way"] == "relayed", met
    caller.ask("echo", frames=16)  # the connection's windows grow
    began, before = anchor.cpu_ms, anchor.ask("load")["relayed_bytes"]
    caller.ask(do, **arguments)
    cpu_ms, passed = anchor.cpu_ms - began, anchor.ask("load")["relayed_bytes"] - before
    assert passed >= relayed * 16384, passed
    return cpu_ms / relayed


def _calls(anchor: PeerProcess, ends: Sequence[PeerProcess], at: list[str], calls: int, seen: Counter[str]) -> float:
    """Let callers with lines to the anchor call hidden peers in turn. Returns the anchor's ms for each call."""
    caller, hidden = ends
    known = hidden.ask("moor", anchors=[at], count=CALLEES)
    caller.ask("callers", count=CALLERS, anchor=at)
    began = anchor.cpu_ms
    for number in range(calls):
        time.sleep(1 / CALLS_PER_S)
        met = caller.ask("call", anchor=at, callee=known[number % CALLEES], caller=number % CALLERS)
        assert met["way"], met
        seen[met["way"]] += 1
    return (anchor.cpu_ms - began) / calls
