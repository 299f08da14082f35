"""A long prompt over slow edges: the time to its first token with the wire coding int8, and without.

    python benchmarks/wire_prefill.py [--tokens 2048] [--width 8192] [--mbit-s 20] [--delay-ms 10] [--check] [--json P]

In front of each of three servers stands a proxy of limited rate, so that each edge of the route carries so much in each
direction. The model is a random llama in bfloat16 of the given width. Its blocks are tiny: what is measured is the
wire. `bound` is the time that the prompt's bytes take on one edge, since a long prompt travels in pieces, which are on
all edges at once.

A slow line is no fault: `repairs` counts those of the last session, and should be 0.

`--check` exits with 1 if the coded prompt takes more than 0.56 of the plain one's time, or a route was repaired.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from common import SEED, Samples, interleaved, table, write_json
from transformers import AutoConfig, AutoModelForCausalLM
from wire import sent_bytes

from swarm.client import AutoDistributedModel
from swarm.demo.distance import far_apart
from swarm.demo.local import LocalSwarm
from swarm.protocol.tensors import Coding

HOPS = 3
SHARE_MAX = 0.56
VOCABULARY = 128
WIRES: dict[str, Coding | None] = {"plain": None, "int8": "int8"}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    arguments.add_argument("--width", type=int, default=8192)
    arguments.add_argument("--mbit-s", type=float, default=20.0, help="of each edge")
    arguments.add_argument("--delay-ms", type=float, default=10.0, help="one way")
    arguments.add_argument("--rounds", type=int, default=3, help="of both in turn; the medians count")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promise is kept")
    arguments.add_argument("--quick", action="store_true", help="a short prompt, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    options = arguments.parse_args()
    if options.quick:
        options.tokens, options.width, options.rounds = 256, 2048, 1
    torch.set_num_threads(1)
    with ring(options) as swarm, ExitStack() as stack:
        works: dict[str, Callable[[], object]] = {}
        repairs: dict[str, Callable[[], int]] = {}
        prompt = torch.randint(3, VOCABULARY, (1, options.tokens), generator=torch.Generator().manual_seed(SEED))
        for name, coding in WIRES.items():
            works[name], repairs[name] = stack.enter_context(prefill(swarm, coding, prompt))
        interleaved(1, {name: works[name] for name in ("int8",)})  # warms up
        measured = interleaved(options.rounds, works)
        repaired = {name: count() for name, count in repairs.items()}
    rows, share = rows_of(measured, repaired, options)
    columns = ["wire", "MB an edge", "bound, s", "first token, s", "of plain", "repairs"]
    title = f"{options.tokens:,} tokens of width {options.width:,}, {options.mbit_s:g} Mbit/s an edge"
    table(title, columns, [[str(each) for each in row] for row in rows])
    write_json(options.json, "wire_prefill", SEED, list(measured.values()), columns=columns, rows=rows)
    if options.check and any(repaired.values()):
        sys.exit(f"routes were repaired: {repaired}")
    if options.check and not options.quick and share > SHARE_MAX:
        sys.exit(f"the coded prompt takes {share:.3f} of the plain one's time, and not {SHARE_MAX}")


@contextmanager
def ring(options: argparse.Namespace) -> Iterator[LocalSwarm]:
    """Start servers of one block each, and proxies in front of them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        save_wide_llama(folder / "model", options.width, options.tokens)
        swarm = stack.enter_context(LocalSwarm(folder / "model", log_level="warning"))
        spans = [f"{each}:{each + 1}" for each in range(HOPS)]
        servers = ("--wire", "int8", "--dtype", "bfloat16")
        line = (options.delay_ms, folder / "late.json", servers, options.mbit_s)
        yield stack.enter_context(far_apart(swarm, spans, *line))


def save_wide_llama(folder: Path, width: int, positions: int) -> None:
    """Write a checkpoint whose hidden states are wide, and whose blocks hardly compute."""
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=HOPS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=positions + 64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        dtype="bfloat16",
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)


@contextmanager
def prefill(
    swarm: LocalSwarm, coding: Coding | None, prompt: torch.Tensor
) -> Iterator[tuple[Callable[[], object], Callable[[], int]]]:
    """Join. Yield what generates a first token, and what counts the latest session's repairs."""
    join = {"initial_peers": swarm.initial_peers, "network": swarm.network, "audit": 0.0}
    with AutoDistributedModel.from_pretrained(swarm.model, wire=coding, **join) as model:
        generate: Any = model.generate
        mask = torch.ones_like(prompt)
        how = {"attention_mask": mask, "max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
        yield lambda: generate(prompt, **how), lambda: model.backend._latest.repairs


def rows_of(
    measured: dict[str, Samples], repaired: dict[str, int], options: argparse.Namespace
) -> tuple[list[list[Any]], float]:
    """Return the table's rows, and the coded prompt's share of the plain one's time."""
    rows, share = [], 1.0
    for name, coding in WIRES.items():
        n_bytes = options.tokens * sent_bytes(options.width, coding)
        bound_s, took_s = 8e-6 * n_bytes / options.mbit_s, measured[name].median / 1000
        share = took_s / (measured["plain"].median / 1000)
        figures = (round(n_bytes / 1e6, 1), round(bound_s, 2), round(took_s, 2), round(share, 3))
        rows.append([name, *figures, repaired[name]])
    return rows, share


if __name__ == "__main__":
    main()
