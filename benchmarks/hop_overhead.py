"""What a hop costs: milliseconds per token of a tiny llama, local and over 1, 2 and 3 hops on loopback, in one run.

    python benchmarks/hop_overhead.py [--tokens 400] [--quick] [--json PATH]

Three one-thread servers, each a process that holds all blocks, so that every route computes the same. The local model
(one thread as well) and the routes take their tokens in turn, one each: the machine's noise hits all alike. The
software cost per hop is (swarm - local) / hops, the client's part and the sockets included. Where others use the
machine, the processes' own computing time is the steadier figure: the kernel counts it, without waiting for a core.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from common import SEED, ByHand, Samples, cpu_ms, decoder_step, even_cuts, interleaved, table, tiny_llama, write_json
from memory_ring import measure_software
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client import AutoDistributedModel
from swarm.client.hf.runtime import LoopThread
from swarm.compute.task import Probe
from swarm.compute.thread import ComputeThread
from swarm.demo.local import LocalSwarm
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import load_span
from swarm.net.frames import Sealer
from swarm.protocol import codec
from swarm.protocol import messages as wire
from swarm.protocol.tensors import meta_of

PROMPT_TOKENS = 16
WARM_UP = 20
HOPS = (1, 2, 3)
CPU_BLOCKS = 5
GENERATED = 20  # tokens of one generate() call


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tokens", type=int, default=400, help="measured tokens of each kind")
    arguments.add_argument("--blocks", type=int, default=6, help="blocks of the model, a multiple of 6")
    arguments.add_argument("--quick", action="store_true", help="a few tokens, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    tokens = 40 if options.quick else options.tokens
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder, torch.inference_mode():
        local = tiny_llama(Path(folder), options.blocks, options.seed)
        parts = measure_parts(Path(folder), local, tokens)
        with LocalSwarm(folder, [f"0:{options.blocks}"] * max(HOPS), log_level="warning") as swarm:
            steps, calls, cpu = measure_routes(swarm, local, tokens)
        parts |= measure_software(tokens, WARM_UP, local.config.hidden_size)
    report(steps, calls, parts, cpu)
    samples = [*steps.values(), *calls.values(), *parts.values()]
    write_json(options.json, "hop_overhead", options.seed, samples, tokens=tokens, blocks=options.blocks, cpu_ms=cpu)


# Along routes


def measure_routes(
    swarm: LocalSwarm, local: PreTrainedModel, tokens: int
) -> tuple[dict[str, Samples], dict[str, Samples], dict[str, list[float]]]:
    """Return samples of single forward calls, of calls of stock `generate()` per token, and computing time per token.

    Computing time: of the client and of each server, milliseconds.
    """
    n_blocks = local.config.num_hidden_layers
    peers = [server.ready["peer_id"] for server in swarm.servers]
    prompt = torch.randint(2, 128, (1, PROMPT_TOKENS))
    model = AutoDistributedModel.from_pretrained(
        swarm.model, initial_peers=swarm.initial_peers, network=swarm.network, dtype=torch.float32
    )
    with model:
        client = ByHand.take_over(model.backend)
        works = {"local": decoder_step(local, DynamicCache(config=local.config), prompt)}
        for hops in HOPS:
            client.by_hand = model.backend._loop.run(client.servers_in_turn(peers, even_cuts(n_blocks, hops)))
            works[_name(hops)] = decoder_step(model, model.new_cache(), prompt)
        interleaved(WARM_UP, works)
        steps = interleaved(tokens, works)
        cpu = _computing_time(works, [os.getpid(), *(server.ready["pid"] for server in swarm.servers)], tokens)

        def generate(with_model: PreTrainedModel) -> Tensor:
            found = with_model.generate(prompt, max_new_tokens=GENERATED, min_new_tokens=GENERATED, do_sample=False)
            assert isinstance(found, Tensor)
            return found

        assert generate(local).equal(generate(model)), "the swarm's tokens are not the local model's"
        calls = interleaved(
            max(2, tokens // GENERATED // 2),
            {"generate, local": lambda: generate(local), f"generate, {_name(3)}": lambda: generate(model)},
        )
    for sample in calls.values():
        sample.ms = [each / GENERATED for each in sample.ms]
    return steps, calls, cpu


def _computing_time(works: dict[str, Callable[[], None]], pids: list[int], tokens: int) -> dict[str, list[float]]:
    """Return milliseconds of each process per token, the median over blocks of tokens."""
    found = {}
    for name, work in works.items():
        blocks = []
        for _ in range(CPU_BLOCKS):
            before = cpu_ms(pids)
            for _ in range(tokens // CPU_BLOCKS):
                work()
            blocks.append([(b - a) / (tokens // CPU_BLOCKS) for a, b in zip(before, cpu_ms(pids), strict=True)])
        found[name] = [statistics.median(column) for column in zip(*blocks, strict=True)]
    return found


def _name(hops: int) -> str:
    return f"{hops} hop" + "s" * (hops > 1)


# The parts of a step


def measure_parts(folder: Path, local: PreTrainedModel, count: int) -> dict[str, Samples]:
    """Time what a step is made of, each alone and hot, in this process."""
    hidden = torch.randn(1, 1, local.config.hidden_size)
    loop = LoopThread()
    message = wire.Step(
        session="0" * 32, epoch=0, step=1000, keep=1000, budget_ms=100_000, want=1, hidden=meta_of(hidden)
    )
    plaintext = b"".join(codec.encode(message, Activations(hidden)))
    there, back = Sealer(bytes(32)), Sealer(bytes(32))
    compute = loop.run(_compute_thread())

    def seal_and_open() -> None:
        frame = there.seal([plaintext])
        back.open(frame[:4], memoryview(frame)[4:])

    async def nothing() -> None:
        pass

    works: dict[str, Callable[[], object]] = {
        "step: message made": lambda: message.model_copy(update={"budget_ms": 1, "hidden": meta_of(hidden)}),
        "step: encoded": lambda: codec.encode(message, Activations(hidden)),
        "step: decoded": lambda: codec.decode(memoryview(bytearray(plaintext))),
        "frame: sealed and opened": seal_and_open,
        "server: into the compute thread and back": lambda: loop.run(_through(compute)),
        "client: into the loop's thread and back": lambda: loop.run(nothing()),
        **_model_parts(folder, local),
    }
    interleaved(WARM_UP, works)
    samples = interleaved(count, works)
    compute.stop()
    loop.stop()
    through, across = (
        samples["server: into the compute thread and back"],
        samples["client: into the loop's thread and back"],
    )
    through.ms = [both - one for both, one in zip(through.ms, across.ms, strict=True)]
    return samples


async def _compute_thread() -> ComputeThread:
    return ComputeThread(asyncio.get_running_loop(), threads=1)


async def _through(compute: ComputeThread) -> None:
    back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    compute.submit(Probe(lambda: None), lambda result: back.set_result(None))
    await back


def _model_parts(folder: Path, local: PreTrainedModel) -> dict[str, Callable[[], object]]:
    n_blocks = local.config.num_hidden_layers
    span = load_span(open_checkpoint(folder), Blocks(0, n_blocks), dtype=torch.float32)
    hidden = torch.randn(1, 1, span.hidden_size)

    def runs(blocks: Blocks) -> Callable[[], object]:
        part = span.part(blocks)
        cache = part.new_cache()
        part.forward(hidden.expand(1, PROMPT_TOKENS, -1), cache=cache)
        return lambda: part.forward(hidden, cache=cache)

    whole = decoder_step(local, DynamicCache(config=local.config), torch.ones(1, PROMPT_TOKENS, dtype=torch.int64))
    spans = {f"model: Span.forward, {n_blocks // hops} blocks": runs(even_cuts(n_blocks, hops)[0]) for hops in HOPS}
    return {"model: local, whole": whole, **spans}


# The report


def report(
    steps: dict[str, Samples], calls: dict[str, Samples], parts: dict[str, Samples], cpu: dict[str, list[float]]
) -> None:
    rows = []
    for group, base in ((steps, "local"), (calls, "generate, local")):
        for name, sample in group.items():
            paired = statistics.median(a - b for a, b in zip(sample.ms, group[base].ms, strict=True))
            figures = f"{sample.median:.3f}", f"{sample.percentile(0.95):.3f}"
            rows.append([name, *figures, _per_hop(name, sample.median - group[base].median), _per_hop(name, paired)])
    table("milliseconds per token", ("", "median", "p95", "cost per hop", "paired"), rows)
    print(
        "cost per hop: (its median - local's) / hops; paired: median of (its token - local's token next to it) / hops"
    )
    rows = [
        [
            name,
            *(f"{ms:.3f}" for ms in (client, sum(servers))),
            _per_hop(name, client + sum(servers) - sum(cpu["local"])),
        ]
        for name, (client, *servers) in cpu.items()
    ]
    table("milliseconds of computing per token, all threads", ("", "client", "servers", "cost per hop"), rows)
    rows = [[name, f"{1000 * part.median:.1f}", f"{1000 * part.percentile(0.95):.1f}"] for name, part in parts.items()]
    table("the parts of a step, microseconds, each alone and hot in one process", ("", "median", "p95"), rows)


def _per_hop(name: str, ms: float) -> str:
    hops = next((hops for hops in HOPS if _name(hops) in name), 0)
    return f"{ms / hops:.3f}" if hops else ""


if __name__ == "__main__":
    main()
