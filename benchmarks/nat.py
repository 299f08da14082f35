"""Peers behind routers, in the lab of network namespaces: how they meet, what anchors pay for it, what attackers reach.

    python benchmarks/nat.py [PART ...] [--quick] [--check] [--json PATH]

Every peer is a process, or a socket, in the network of its own host, behind a router of the kernel's (nftables). Parts:

pairs      400 pairs of routers without a symmetric one, and 100 with: how they connect, and how fast
relay      what an anchor computes for a relayed frame, for 16 KiB of many, and for a call
moored     what an anchor with 500 moored peers remembers
hostile    fifty hostile peers against an anchor: honest meetings, its memory, and whether a third party is dialled
kills      the relaying anchor is killed, or stopped, in mid-generation
tokens     tokens behind six mixes of routers, in turns, and how fast servers are online

Needs Linux, nftables and iproute2, and root or user namespaces.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import ROOT, SEED, table, write_json
from nat_hostile import hostile
from nat_kills import kills
from nat_pairs import pairs
from nat_relay import moored, relay
from nat_result import COLUMNS, Line, Part, part_of
from nat_tokens import tokens

from tests.support.lab import unavailable

PARTS: dict[str, Callable[[bool], Part]] = {
    "pairs": pairs,
    "relay": relay,
    "moored": moored,
    "hostile": hostile,
    "kills": kills,
    "tokens": tokens,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--quick", action="store_true", help="few of everything, to see that it works")
    parser.add_argument("--deaths", type=int, default=100, help="of relaying anchors")
    parser.add_argument("--add", type=Path, help="the JSON of deaths before, to which those of this run are added")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    parser.add_argument("--json", type=Path, help="where the raw samples go")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no part is named {', '.join(sorted(unknown))}")
    if reason := unavailable():
        sys.exit(reason)
    os.environ["PYTHONPATH"] = str(ROOT)  # for the process that the swarm's commands are forked from
    parts = PARTS | {"kills": partial(kills, deaths=options.deaths, before=part_of(options.add, "kills"))}
    measured = {name: parts[name](options.quick) for name in options.parts or parts}
    lines = [line for part in measured.values() for line in part.lines]
    table("peers behind routers", COLUMNS, [line.cells for line in lines])
    for line in lines:
        if not line.holds:
            print(f"BROKEN: {line.what}")
    samples = [sample for part in measured.values() for sample in part.samples]
    facts = {name: part.facts for name, part in measured.items()}
    rows = [line.cells for line in lines]
    write_json(options.json, "nat", SEED, samples, columns=COLUMNS, rows=rows, facts=facts, broken=_broken(lines))
    if options.check and _broken(lines):
        sys.exit(1)


def _broken(lines: list[Line]) -> list[str]:
    return [line.what for line in lines if not line.holds]


if __name__ == "__main__":
    main()
