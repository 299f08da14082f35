"""Measure the wire coding int8: bytes of a position, and the time to encode and decode, plain and coded.

    python benchmarks/wire.py [--width 4096 8192] [--positions 1 8 64 256] [--count 200] [--quick] [--json PATH]

Hidden states are in bfloat16, on one thread. A plain frame's tensor is not copied, so its times are those of finding
its bytes. The last column is the speed of a connection at which the coding takes as long as the bytes that it saves: a
slower one gains.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from common import SEED, Samples, interleaved, table, write_json

from swarm.protocol.tensors import Coding, TensorMeta, decode_tensors, encode_tensor, meta_of


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--width", type=int, nargs="+", default=[4096, 8192])
    arguments.add_argument("--positions", type=int, nargs="+", default=[1, 8, 64, 256])
    arguments.add_argument("--count", type=int, default=200, help="samples of each work")
    arguments.add_argument("--quick", action="store_true", help="a few samples, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rows, samples = [], []
    for width in options.width:
        for positions in options.positions:
            measured = measure(width, positions, 3 if options.quick else options.count)
            rows += [row_of(width, positions, coding, measured) for coding in codings()]
            samples += measured.values()
    columns = ("width x positions", "wire", "bytes a position", "encode, ms", "decode, ms", "pays below, Mbit/s")
    table("one step's hidden states, medians", columns, rows)
    write_json(options.json, "wire", SEED, samples)


def measure(width: int, positions: int, count: int) -> dict[str, Samples]:
    """Time both ends of both codings, in turn."""
    hidden = torch.randn(1, positions, width).to(torch.bfloat16)
    works: dict[str, Callable[[], object]] = {}
    for coding in codings():
        meta, payload = meta_of(hidden, coding), memoryview(bytearray(encode_tensor(hidden, coding)))
        works[name_of("encode", width, positions, coding)] = encoding(hidden, coding)
        works[name_of("decode", width, positions, coding)] = decoding(meta, payload)
    interleaved(5, works)  # warms up
    return interleaved(count, works)


def encoding(hidden: torch.Tensor, coding: Coding | None) -> Callable[[], object]:
    return lambda: encode_tensor(hidden, coding)


def decoding(meta: TensorMeta, payload: memoryview) -> Callable[[], object]:
    return lambda: decode_tensors((meta,), payload)


def name_of(end: str, width: int, positions: int, coding: Coding | None) -> str:
    return f"{end} {coding or 'plain'}, {width} x {positions}"


def row_of(width: int, positions: int, coding: Coding | None, measured: dict[str, Samples]) -> tuple[str, ...]:
    sent = {each: sent_bytes(width, each) for each in codings()}
    ends = [measured[name_of(end, width, positions, coding)].median for end in ("encode", "decode")]
    pays = ""
    if coding is not None:
        saved_bits = 8 * (sent[None] - sent[coding]) * positions
        pays = f"{saved_bits / sum(ends) / 1000:,.0f}"
    shown = (f"{ms:.3f}" for ms in ends)
    return f"{width:,} x {positions}", coding or "plain", f"{sent[coding]:,}", *shown, pays


def codings() -> tuple[Coding | None, ...]:
    return None, "int8"


def sent_bytes(width: int, coding: Coding | None) -> int:
    return TensorMeta(dtype="bfloat16", shape=(1, 1, width), coding=coding).sent_bytes


if __name__ == "__main__":
    main()
