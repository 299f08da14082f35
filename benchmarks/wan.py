"""A wide-area ring: three hops with 25 ms one way on every edge. Milliseconds per token, and time to first token.

    python benchmarks/wan.py [--tokens 100] [--prompts 12] [--delay-ms 25] [--quick] [--json PATH]

In front of every server stands a proxy that delays every byte, and the server announces the proxy's address. So each
edge of the ring (client, hop 1, hop 2, hop 3, client) crosses one proxy once: the limit is 4 x 25 = 100 ms a token. The
last hop answers on the client's own connection, back through that hop's proxy.
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from common import SEED, ByHand, Samples, decoder_step, even_cuts, interleaved, table, tiny_llama, write_json
from transformers import DynamicCache, PreTrainedModel

from swarm.client import AutoDistributedModel
from swarm.demo.delay_proxy import late_ms
from swarm.demo.distance import far_apart
from swarm.demo.local import LocalSwarm

HOPS = 3
N_BLOCKS = 6
PROMPT_TOKENS = 128
WARM_UP = 3


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tokens", type=int, default=100, help="measured tokens")
    arguments.add_argument("--prompts", type=int, default=12, help="measured first tokens")
    arguments.add_argument("--delay-ms", type=float, default=25.0, help="one way")
    arguments.add_argument("--quick", action="store_true", help="a few tokens, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    tokens, prompts = (10, 3) if options.quick else (options.tokens, options.prompts)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        stack.enter_context(torch.inference_mode())
        local = tiny_llama(folder, N_BLOCKS, options.seed)
        proxied = stack.enter_context(ExitStack())
        swarm = _ring(proxied, folder, options.delay_ms)
        latencies, samples = measure(swarm, local, tokens, prompts)
        proxied.close()
        late = late_ms(folder / "late.json")
    report(options.delay_ms, latencies, samples, late)
    figures = {"delay_ms": options.delay_ms, "latencies_ms": latencies, "proxy_late_ms": late}
    write_json(options.json, "wan", options.seed, list(samples.values()), **figures)


def _ring(stack: ExitStack, folder: Path, delay_ms: float) -> LocalSwarm:
    """Start a swarm of servers that announce proxies."""
    swarm = stack.enter_context(LocalSwarm(folder, log_level="warning"))
    cuts = [str(cut) for cut in even_cuts(N_BLOCKS, HOPS)]
    return stack.enter_context(far_apart(swarm, cuts, delay_ms, folder / "late.json"))


def measure(
    swarm: LocalSwarm, local: PreTrainedModel, tokens: int, prompts: int
) -> tuple[list[float], dict[str, Samples]]:
    """Return the hops' measured round trips, and samples: per token, and for first tokens."""
    prompt = torch.randint(2, 128, (1, PROMPT_TOKENS))
    model = AutoDistributedModel.from_pretrained(
        swarm.model, initial_peers=swarm.initial_peers, network=swarm.network, dtype=torch.float32
    )
    with model:
        client = ByHand.take_over(model.backend)
        peers = [server.ready["peer_id"] for server in swarm.servers]
        client.by_hand = model.backend._loop.run(client.servers_in_turn(peers, even_cuts(N_BLOCKS, HOPS)))
        steps = {
            "token, local": decoder_step(local, DynamicCache(config=local.config), prompt),
            "token, ring": decoder_step(model, model.new_cache(), prompt),
        }
        interleaved(WARM_UP, steps)
        samples = interleaved(tokens, steps)
        first = {
            "first token, local": lambda: local.generate(prompt, max_new_tokens=1, do_sample=False),
            "first token, ring": lambda: model.generate(prompt, max_new_tokens=1, do_sample=False),
        }
        assert first["first token, local"]().equal(first["first token, ring"]()), "the ring computes something else"
        samples |= interleaved(prompts, first)
        latencies = [hop.latency_ms or 0.0 for hop in model.route]
    return latencies, samples


def report(delay_ms: float, latencies: Sequence[float], samples: dict[str, Samples], late: tuple[float, float]) -> None:
    ring_ms = (HOPS + 1) * delay_ms
    rows = []
    for kind, trips in (("token", 1), ("first token", 2)):
        local, ring = samples[f"{kind}, local"], samples[f"{kind}, ring"]
        for sample in (local, ring):
            rows.append([sample.name, f"{sample.median:.1f}", f"{sample.percentile(0.95):.1f}", "", "", ""])
        bound = trips * ring_ms
        rows[-1][3:] = [f"{bound:.0f}", f"{ring.median - bound:.1f}", f"{(ring.median - local.median) / ring_ms:.2f}"]
    table(
        f"milliseconds over {HOPS} hops, {delay_ms:g} ms one way, a prompt of {PROMPT_TOKENS} tokens",
        ("", "median", "p95", "bound", "beyond", "ring trips"),
        rows,
    )
    print(
        "bound: the delays of one ring trip for a token, of two for a first token; ring trips: (ring - local) in those"
    )
    print("round trips to the hops:", ", ".join(f"{latency:.1f} ms" for latency in latencies), end="; ")
    print(f"the proxies were {late[0]:.2f} ms late beyond their delay (p95 {late[1]:.2f})")


if __name__ == "__main__":
    main()
