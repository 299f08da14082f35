"""What the wire coding int8 costs in quality: the perplexity of a model with it on every edge, and without.

    python benchmarks/wire_quality.py [--model DIRECTORY] [--windows 24] [--dtype bfloat16] [--check] [--json PATH]

The model reads held-out windows of 512 tokens of Python's standard library. Its blocks are spans of this process, and
hidden states between them become bytes and are read again, as on a connection. `3 hops` has four edges: the client's
to the first hop, two between hops, and the last hop's to the client. `every block` has a hop for each block, so it has
as many edges as a route of this model can have. KL is that of the next token to the plain route's, in nats. `error` is
the standard error of `of plain`, over the windows.

`--check` exits with 1 if the perplexity of `3 hops` is more than 0.1 % above that of the plain route.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import SEED, Samples, table, write_json
from quantised import DEMO, held_out
from torch import Tensor

from swarm.blocks import Blocks
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import load_ends, load_span
from swarm.model.span import Span
from swarm.protocol.tensors import Coding, decode_tensors, encode_tensor, meta_of

WORSE_MAX = 1.001  # times the plain route's perplexity
HOPS = 3


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, default=DEMO, help="a checkpoint that reads text")
    arguments.add_argument("--windows", type=int, default=24, help="of 512 tokens")
    arguments.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promise is kept")
    arguments.add_argument("--quick", action="store_true", help="two windows, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    options = arguments.parse_args()
    windows = held_out(options.model, 2 if options.quick else options.windows)
    reader = Reader(options.model, getattr(torch, options.dtype))
    blocks = len(reader.spans)
    routes: dict[str, tuple[int, Coding | None]] = {
        "plain": (HOPS, None),
        f"int8, {HOPS} hops": (HOPS, "int8"),
        "int8, every block": (blocks, "int8"),
    }
    losses, kls, same, times = ({name: list[float]() for name in routes} for _ in range(4))
    for window in windows:
        reference = None
        for name, (hops, coding) in routes.items():
            began = time.perf_counter()
            likely = reader.likely(window, hops, coding)
            times[name].append(1000 * (time.perf_counter() - began))
            reference = likely if reference is None else reference
            losses[name].append(-float(likely[:-1].gather(1, window[1:, None]).mean()))
            kls[name].append(float((reference.exp() * (reference - likely)).sum(-1).mean()))
            same[name].append(float((likely.argmax(-1) == reference.argmax(-1)).float().mean()))
    rows = rows_of(options.dtype, routes, losses, kls, same)
    columns = ["activations", "wire", "edges", "perplexity", "of plain", "error", "KL", "same first choice"]
    table(f"{options.model.name}, {windows.numel():,} tokens", columns, [[str(each) for each in row] for row in rows])
    samples = [Samples(name, ms) for name, ms in times.items()]
    write_json(
        options.json, "wire_quality", SEED, samples, columns=columns, rows=rows, losses=losses, tokens=windows.numel()
    )
    worse = float(rows[1][4])
    if options.check and not options.quick and worse > WORSE_MAX:
        sys.exit(f"perplexity is {worse:.5f} times the plain route's, and not {WORSE_MAX}")


class Reader:
    """A model whose blocks are spans of one, with edges between some of them."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        checkpoint = open_checkpoint(model)
        self.spans: list[Span] = [
            load_span(checkpoint, Blocks(each, each + 1), dtype=dtype) for each in range(checkpoint.n_blocks)
        ]
        self._ends: Any = load_ends(checkpoint, dtype=dtype)

    @torch.inference_mode()
    def likely(self, window: Tensor, hops: int, coding: Coding | None) -> Tensor:
        """Return the logarithms of the next token's chances, [tokens, vocabulary], on a route of so many hops."""
        hidden: Tensor = self._ends.get_input_embeddings()(window[None])
        for hop in hops_of(self.spans, hops):
            hidden = carried(hidden, coding)
            for span in hop:
                hidden = span.forward(hidden, cache=span.new_cache())
        hidden = carried(hidden, coding)
        likely: Tensor = self._ends.get_output_embeddings()(self._ends.get_decoder().norm(hidden))[0]
        return likely.float().log_softmax(-1)


def hops_of(spans: Sequence[Span], hops: int) -> Iterator[Sequence[Span]]:
    """Cut a model's blocks into hops of about one size."""
    cuts = [round(len(spans) * n / hops) for n in range(hops + 1)]
    return (spans[start:stop] for start, stop in pairwise(cuts))


def carried(hidden: Tensor, coding: Coding | None) -> Tensor:
    """Return what the other end of an edge reads."""
    found = decode_tensors((meta_of(hidden, coding),), memoryview(bytearray(encode_tensor(hidden, coding))))[0]
    assert found is not None
    return found


def rows_of(
    dtype: str,
    routes: dict[str, tuple[int, Coding | None]],
    losses: dict[str, list[float]],
    kls: dict[str, list[float]],
    same: dict[str, list[float]],
) -> list[list[Any]]:
    """Return the table's rows: the plain route's, and then the others'."""
    rows = []
    for name, (hops, _) in routes.items():
        more = [coded - plain for coded, plain in zip(losses[name], losses["plain"], strict=True)]
        ratio, error = math.exp(statistics.fmean(more)), statistics.stdev(more) / len(more) ** 0.5
        kl, first = statistics.fmean(kls[name]), statistics.fmean(same[name])
        perplexity = math.exp(statistics.fmean(losses[name]))
        figures = (f"{perplexity:.4f}", f"{ratio:.5f}", f"{error:.5f}", f"{kl:.6f}", f"{first:.4f}")
        rows.append([dtype, name, hops + 1, *figures])
    return rows


if __name__ == "__main__":
    main()
