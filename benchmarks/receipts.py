"""What receipts cost a hop's event loop: microseconds per position of the tally, in and out, and of the signature.

    python benchmarks/receipts.py [--repeats 200] [--quick] [--json PATH]

Activations of bfloat16 with 4,096 numbers a position, as a model of 7 to 8 billion parameters has them. A tally notes
a step behind its sending: no step of its session waits, and the loop is busy for so long. Steps of one position are
hashed sixteen together: fifteen cost next to nothing, and the figure is the mean. Sealing the same bytes is
measured beside it: a hop opens each step once and seals it once. A session's owner asks for one signature.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import SEED, Samples, table, write_json

from swarm.activations import Activations
from swarm.identity import Identity
from swarm.net.frames import Sealer
from swarm.protocol.receipts import Receipt, ReceiptLimits, Statement, Tally
from swarm.protocol.tensors import Coding, encode_tensor

WIDTH = 4096
STEPS = ReceiptLimits().together


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--repeats", type=int, default=200)
    arguments.add_argument("--quick", action="store_true", help="a few, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    options = arguments.parse_args()
    repeats = 5 if options.quick else options.repeats
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    works = {
        f"{STEPS} steps of one position, noted, each": stepping(),
        f"{STEPS} steps of one position, coded in int8, noted, each": stepping("int8"),
        "one position, sealed": sealing(1),
        "128 positions (1 MiB), noted": noting(128),
        "128 positions (1 MiB), sealed": sealing(128),
        "a session of 8,192 positions, signed": signing(8192),
    }
    times = {name: STEPS if name.endswith("each") else 1 for name in works}
    samples = [Samples(name, [timed(work) / times[name] for _ in range(repeats)]) for name, work in works.items()]
    rows = [[each.name, round(1000 * each.median, 1), round(1000 * each.percentile(0.9), 1)] for each in samples]
    columns = ("what", "microseconds, median", "nine of ten below")
    table("receipts", columns, [[str(cell) for cell in row] for row in rows])
    write_json(options.json, "receipts", SEED, samples, columns=columns, rows=rows)


def timed(work: Callable[[], object]) -> float:
    """Return milliseconds."""
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def noting(tokens: int) -> Callable[[], object]:
    """Return what notes a step: its inputs and its outputs."""
    tally, given = Tally(), Activations(torch.randn(1, tokens, WIDTH).to(torch.bfloat16))
    output = given.hidden.clone()
    return lambda: tally.add(0, given, output)


def stepping(coding: Coding | None = None) -> Callable[[], object]:
    """Return what notes so many steps as are hashed together."""
    tally, given = Tally(coding), Activations(torch.randn(1, 1, WIDTH).to(torch.bfloat16))
    output = given.hidden.clone()

    def work() -> None:
        for at in range(STEPS):
            tally.add(at, given, output)

    return work


def sealing(tokens: int) -> Callable[[], object]:
    """Return what seals the bytes of a step."""
    sealer, data = Sealer(bytes(32)), encode_tensor(torch.randn(1, tokens, WIDTH).to(torch.bfloat16))
    return lambda: sealer.seal([data])


def signing(tokens: int) -> Callable[[], object]:
    """Return what signs a session of so many positions."""
    me, tally = Identity.generate(), Tally()
    hidden = torch.randn(1, tokens, 8)
    tally.add(0, Activations(hidden), hidden)
    fields = {"peer": me.public_key.hex(), "session": "0" * 32, "root": "0" * 64, "numeric_class": "bfloat16"}

    def sign() -> Receipt:
        digests = {"inputs": tally.inputs, "outputs": tally.outputs, "told": tally.told}
        sizes = {"start": 0, "stop": 4, "rows": 1, "length": tally.length, "issued": 1}
        return Receipt.sign(Statement(**fields, **digests, **sizes), me)  # type: ignore[arg-type]

    return sign


if __name__ == "__main__":
    main()
