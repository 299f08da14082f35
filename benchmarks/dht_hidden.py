"""Joining and looking up in a DHT where nodes behind routers take part: as clients until others have called them.

    python benchmarks/dht_hidden.py [--public 6] [--hidden 8] [--delay-ms 10] [--check]

Every node is a process with a p2pd in a network namespace of its own. The hidden ones are behind routers that let no
connection in (port-restricted, symmetric, refusing, double). In turns with nodes that are all servers of the DHT from
the start, as those of version 0.1 are. Each join is a new client. Its computing and its waiting for a core are sums
over the threads of both processes: they tell a busy machine from a slow join. Needs Linux and nftables.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import ROOT, SEED, Samples, table, write_json

from tests.support.lab import Lab, unavailable
from tests.support.lab.lab import Host
from tests.support.lab.nodes import LabDht

KINDS = ("port_restricted", "symmetric", "reject", "double")
SETTLE_S = 20.0  # from the last node's start: every node has looked around once more
MODES = {"clients until called": False, "servers at once": True}
MEASURED = ("join", "look-up", "join: computing", "join: waiting for a core")
JOIN_MS_MAX, LOOKUP_MS_MAX = 1200.0, 150.0  # medians that --check allows


def main() -> None:
    options = _arguments()
    if reason := unavailable():
        sys.exit(reason)
    os.environ["PYTHONPATH"] = str(ROOT)  # for the process that nodes are forked from
    samples = {f"{what}, {mode}": Samples(f"{what}, {mode}") for mode in MODES for what in MEASURED}
    facts = {"public": options.public, "hidden": options.hidden, "delay_ms": options.delay_ms}
    known, missing = dict.fromkeys(MODES, 0), dict.fromkeys(MODES, 0)
    with Lab() as lab, tempfile.TemporaryDirectory() as folder:
        public = [lab.public_host(options.delay_ms) for _ in range(options.public)]
        sites = [lab.site(KINDS[i % len(KINDS)], options.delay_ms) for i in range(options.hidden)]
        hidden, client = [site.host() for site in sites], lab.public_host(options.delay_ms)
        for turn in range(options.turns):
            for mode, proven in MODES.items():
                with LabDht(Path(folder) / f"{turn}-{proven}", proven) as dht:
                    known[mode] = max(known[mode], _settled(dht, public, hidden, options.settle))
                    missing[mode] += _measure(dht, client, options, samples, mode)
    _report(samples, facts | {"hidden_known_max": known, "not_found": missing}, options.json)
    if options.check and (failed := _broken(samples, known, missing)):
        sys.exit("\n".join(failed))


def _settled(dht: LabDht, public: Sequence[Host], hidden: Sequence[Host], settle_s: float) -> int:
    """Start all nodes. Returns the most hidden ones that any public one has ever known."""
    nodes = dht.public(public)
    concealed = {node.state.peer_id for node in dht.hidden(hidden)}
    time.sleep(settle_s)
    return max(len(concealed.intersection(node.state.known)) for node in nodes)


def _measure(dht: LabDht, client: Host, options: argparse.Namespace, samples: dict[str, Samples], mode: str) -> int:
    """Join and look up. Returns how many announced servers the look-ups did not find."""
    missing = 0
    for _ in range(options.joins):
        measured = dht.look_up(client, options.lookups)
        samples[f"join, {mode}"].ms.append(1000 * measured.join_s)
        samples[f"join: computing, {mode}"].ms.append(1000 * measured.computed_s)
        samples[f"join: waiting for a core, {mode}"].ms.append(1000 * measured.waited_s)
        samples[f"look-up, {mode}"].ms += [1000 * took for took in measured.lookup_s]
        missing += sum(len(dht.nodes) - found for found in measured.found)
    return missing


def _report(samples: dict[str, Samples], facts: dict[str, object], path: Path | None) -> None:
    rows = [
        [each.name, f"{each.median:.0f}", f"{each.percentile(0.95):.0f}", f"{max(each.ms):.0f}", str(len(each.ms))]
        for each in samples.values()
    ]
    table(
        f"{facts['hidden']} hidden of {facts['hidden'] + facts['public']} nodes (ms)",
        ("", "median", "p95", "max", "n"),
        rows,
    )
    print(f"hidden nodes in a public node's routing table, at most: {facts['hidden_known_max']}")
    print(f"servers that look-ups missed: {facts['not_found']}")
    write_json(path, "dht_hidden", SEED, list(samples.values()), facts=facts)


def _broken(samples: dict[str, Samples], known: dict[str, int], missing: dict[str, int]) -> list[str]:
    """Name the promises that are not kept."""
    mode = next(iter(MODES))
    said = {
        f"a join takes more than {JOIN_MS_MAX:.0f} ms": samples[f"join, {mode}"].median > JOIN_MS_MAX,
        f"a look-up takes more than {LOOKUP_MS_MAX:.0f} ms": samples[f"look-up, {mode}"].median > LOOKUP_MS_MAX,
        "a hidden node was in a public node's routing table": known[mode] > 0,
        "look-ups missed servers": missing[mode] > 0,
    }
    return [text for text, broken in said.items() if broken]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--public", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=8)
    parser.add_argument("--delay-ms", type=float, default=10.0, help="one way, from each node to the middle")
    parser.add_argument("--turns", type=int, default=3, help="of each kind of nodes")
    parser.add_argument("--joins", type=int, default=5, help="in each turn, each by a new client")
    parser.add_argument("--lookups", type=int, default=12, help="of each client")
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds before the first join")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    parser.add_argument("--quick", action="store_true", help="few nodes, to see that it works")
    parser.add_argument("--json", type=Path, help="where the raw samples go")
    options = parser.parse_args()
    if options.quick:
        options.public, options.hidden, options.turns, options.joins, options.settle = 2, 2, 1, 1, 1.0
    return options


if __name__ == "__main__":
    main()
