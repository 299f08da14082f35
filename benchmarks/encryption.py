"""What encryption costs: tokens per second over three hops, with sealed frames and with plain ones, in one run.

    python benchmarks/encryption.py [--model llama|demo] [--rounds 6] [--tokens 300] [--quick] [--json PATH]

Two swarms of three one-thread servers each, of a llama of 110 million parameters or of the demo checkpoint (fp32). They
differ in the frames of their channels alone: handshakes, identities and everything else are the same
(`plain_channel.py`; there is no switch for users). They take their tokens in turn, one each. Where its processes and
their memory happen to lie makes a swarm a few percent faster or slower than the next; so every round starts both anew,
the other one first, and the rounds' spread says what a difference is worth. Frames of the same content are sealed and
opened alone, too, for what it costs a step by itself.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import BinaryIO

import torch
from common import ROOT, SEED, Samples, decoder_step, even_cuts, interleaved, table, write_json
from load import save_checkpoint
from plain_channel import Plain, plain_channels
from transformers import AutoConfig

from swarm.activations import Activations
from swarm.client import AutoDistributedModel
from swarm.demo.local import LocalSwarm, Place, ProcessLimits
from swarm.demo.local import launch as launch_sealed
from swarm.net.frames import Sealer
from swarm.net.launch import command
from swarm.protocol import codec
from swarm.protocol import messages as wire
from swarm.protocol.tensors import meta_of

DEMO = ROOT / "swarm" / "demo" / "checkpoint"
HOPS = 3
PROMPT_TOKENS = 32
WARM_UP = 30
OPTIONS = ("--dtype", "float32")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=6, help="how often both swarms are started")
    arguments.add_argument("--tokens", type=int, default=300, help="measured tokens of each kind in a round")
    arguments.add_argument("--model", choices=("llama", "demo"), default="llama")
    arguments.add_argument("--quick", action="store_true", help="a few tokens, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    options = arguments.parse_args()
    rounds, tokens = (2, 40) if options.quick else (options.rounds, options.tokens)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder, torch.inference_mode():
        checkpoint = DEMO
        if options.model == "llama":
            checkpoint = Path(folder)
            save_checkpoint(checkpoint, "llama", torch.float32, SEED)
        steps = [measure_steps(checkpoint, tokens, plain_first=i % 2 == 1) for i in range(rounds)]
        frames = measure_frames(checkpoint, tokens)
    report(steps, frames)
    samples = [*(each for round_ in steps for each in round_.values()), *frames.values()]
    write_json(options.json, "encryption", SEED, samples, rounds=rounds, tokens=tokens, model=options.model)


def measure_steps(checkpoint: Path, tokens: int, *, plain_first: bool) -> dict[str, Samples]:
    """Time one token after another, in turn through a swarm with sealed frames and one with plain ones."""
    kinds = {"sealed": (launch_sealed, nullcontext()), "plain": (launch_plain, plain_channels())}
    order = sorted(kinds, reverse=not plain_first)
    with ExitStack() as closing:
        works = {name: _decoding(closing, checkpoint, *kinds[name]) for name in order}
        interleaved(WARM_UP, works)
        return interleaved(tokens, works)


def _decoding(
    closing: ExitStack, checkpoint: Path, launch: Callable[..., object], frames: object
) -> Callable[[], None]:
    """Start a swarm and a client of it; returns what computes one token."""
    n_blocks = AutoConfig.from_pretrained(checkpoint).num_hidden_layers
    spans = [str(cut) for cut in even_cuts(n_blocks, HOPS)]
    swarm = closing.enter_context(LocalSwarm(checkpoint, spans, options=OPTIONS, log_level="warning", launch=launch))  # type: ignore[arg-type]
    model = AutoDistributedModel.from_pretrained(
        swarm.model, initial_peers=swarm.initial_peers, network=swarm.network, dtype=torch.float32
    )
    closing.enter_context(model)
    prompt = torch.randint(2, 1000, (1, PROMPT_TOKENS))
    with frames:  # type: ignore[attr-defined]
        return decoder_step(model, model.new_cache(), prompt)  # connects


def launch_plain(
    place: Place, module: str, arguments: Sequence[str], env: dict[str, str], log: BinaryIO
) -> "subprocess.Popen[bytes]":
    """As `swarm.demo.local.launch`, with plain frames."""
    script = str(Path(__file__).with_name("plain_channel.py"))
    limits = ProcessLimits()
    line = command(
        *(sys.executable, script, module, *arguments),
        descriptors_max=limits.descriptors_max,
        data_bytes_max=limits.data_bytes_max,
    )
    return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, process_group=0)


def measure_frames(checkpoint: Path, count: int) -> dict[str, Samples]:
    """Time what a step's frame takes to be written and read."""
    hidden = torch.randn(1, 1, AutoConfig.from_pretrained(checkpoint).hidden_size)
    step = wire.Step(session="0" * 32, epoch=1, step=1, keep=0, want=1, budget_ms=1000, hidden=meta_of(hidden))
    parts = codec.encode(step, Activations(hidden))

    def there_and_back(kind: type[Sealer]) -> Callable[[], object]:
        writer, reader = kind(b"k" * 32), kind(b"k" * 32)

        def work() -> None:
            frame = writer.seal(parts)
            reader.open(frame[:4], memoryview(frame)[4:])

        return work

    works = {"a frame, sealed and opened": there_and_back(Sealer), "a frame, plain": there_and_back(Plain)}
    interleaved(WARM_UP, works)
    return interleaved(count, works)


def report(steps: list[dict[str, Samples]], frames: dict[str, Samples]) -> None:
    costs = [100 * (1 - each["plain"].median / each["sealed"].median) for each in steps]
    rows = [
        [str(i), *(f"{each[name].median:.3f}" for name in ("sealed", "plain")), f"{cost:+.2f} %"]
        for i, (each, cost) in enumerate(zip(steps, costs, strict=True), start=1)
    ]
    columns = ("round", "sealed", "plain", "fewer tokens/s")
    table("milliseconds per token over three hops, medians", columns, rows)
    error = statistics.stdev(costs) / len(costs) ** 0.5
    cost = statistics.mean(costs)
    print(f"encryption costs {cost:.2f} % of tokens per second (standard error {error:.2f})")
    table("microseconds", ("", "median"), [[name, f"{1000 * each.median:.1f}"] for name, each in frames.items()])
    per_frame = frames["a frame, sealed and opened"].median - frames["a frame, plain"].median
    share = (HOPS + 1) * per_frame / statistics.mean(each["sealed"].median for each in steps)
    print(f"sealing and opening alone: {HOPS + 1} frames a token, {100 * share:.2f} % of its time")


if __name__ == "__main__":
    main()
