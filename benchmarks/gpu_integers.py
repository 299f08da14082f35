"""Weights in int8 and int4 on a GPU, for `gpu_check.py`: equal bits with the CPU, speed, and whole spans."""

import os
from statistics import median
from typing import Any

import torch
from gpu_spans import Bench, noise, tiny_checkpoint, wide_config, wide_span
from torch import Tensor, nn

from swarm.blocks import Blocks
from swarm.model.eightbits import IntegerMatrix
from swarm.model.fourbits import FourBitMatrix
from swarm.model.integer import RoundedMatrix, place, rounded_of, to_integers
from swarm.model.loading import load_span
from swarm.model.packed import Segment
from swarm.model.probe import prove_packing
from swarm.model.quantising import on_device
from swarm.model.span import Span

KINDS: tuple[type[RoundedMatrix], ...] = (IntegerMatrix, FourBitMatrix)
COMPARED = 40  # rows of the largest product that is computed on the CPU, too


def integers(bench: Bench) -> list[dict[str, Any]]:
    """Look at products, tiny spans and a wide one. On a CPU only whether they run, by Triton's interpreter."""
    if bench.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return [{"skipped": "kernels run on a CPU with TRITON_INTERPRET=1 alone"}]
    return products(bench) + spans(bench) + decode(bench)


def products(bench: Bench) -> list[dict[str, Any]]:
    """Compare single products with the CPU's, and time them beside plain ones."""
    sizes, device, found = bench.sizes, bench.device, []
    moved = on_device(device)
    shapes = ((sizes.hidden, sizes.hidden), (sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate))
    for n_outputs, n_inputs in shapes:
        weight = torch.randn(n_outputs, n_inputs, generator=torch.Generator().manual_seed(bench.seed)) / n_inputs**0.5
        plain = weight.to(device, sizes.speed_dtype)
        for kind in KINDS:
            host = kind.of(weight)
            matrix = moved(host)
            for rows in (1, 8, 32, COMPARED, 128, *sizes.prompts) if device.type == "cuda" else (1, COMPARED):
                if bench.late:
                    return found
                some = torch.randn(rows, n_inputs, generator=torch.Generator().manual_seed(rows)).to(sizes.speed_dtype)
                there = some.to(device)
                row: dict[str, Any] = {"what": kind.weights, "shape": f"{n_outputs} x {n_inputs}", "rows": rows}
                if rows <= COMPARED:
                    got = matrix.multiply(there).cpu()
                    row["equal"] = bool(torch.equal(got, host.multiply(some)))
                    row["failed"] = not row["equal"]
                row["ms"] = _ms(bench, lambda m=matrix, t=there: m.multiply(t))
                row["plain_ms"] = _ms(bench, lambda t=there, p=plain: nn.functional.linear(t, p))
                found.append(row)
                bench.say(
                    "  " + ", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
                )
    return found


def spans(bench: Bench) -> list[dict[str, Any]]:
    """Compare spans that a server would load with the CPU's: packed, alone and there."""
    found: list[dict[str, Any]] = []
    for family in ("llama", "qwen3_moe", "gemma3_text") if bench.device.type == "cuda" else ("llama",):
        with tiny_checkpoint(family, bench.seed) as checkpoint:
            for kind in KINDS:
                if bench.late:
                    return found
                here, there = (
                    load_span(checkpoint, Blocks(1, 5), dtype=torch.float32, device=device, quantize=kind.weights)
                    for device in ("cpu", bench.device)
                )
                with torch.inference_mode():
                    row: dict[str, Any] = {"what": f"{family}, {there.numeric_class}", "packs": there.packs}
                    row["from_cpu"] = _apart(_decoded(there), _decoded(here))
                    row["packed_equal"] = there.packs and _packed_equals_solo(there)
                row["bytes"], row["bytes_on_cpu"] = there.weight_bytes, here.weight_bytes
                bound = 0.05 if "moe" in family else 1e-3  # a last bit of attention may choose another expert
                row["failed"] = row["from_cpu"] > bound or (there.packs and not row["packed_equal"])
                found.append(row)
                bench.say(f"  {row}")
    return found


def decode(bench: Bench) -> list[dict[str, Any]]:
    """Time decode steps and prompts of a wide span, plain and in both kinds."""
    sizes, found = bench.sizes, []
    config = wide_config(sizes, sizes.blocks)
    for kind in (None, *KINDS):
        if bench.late:
            break
        span = wide_span(config, sizes.speed_dtype, bench.device, bench.seed)
        if kind is not None:
            span = _rounded(span, kind)
        with torch.inference_mode():
            for batch in (1, 8, 32) if bench.device.type == "cuda" else (1, 3):
                caches = [span.new_cache() for _ in range(batch)]
                for number, cache in enumerate(caches):
                    span.forward(noise(span, sizes.pasts[0], number), cache=cache)
                one = [noise(span, 1, number) for number in range(batch)]

                def step(caches: list[Any] = caches, one: list[Tensor] = one, span: Span = span) -> None:
                    if len(caches) == 1:
                        span.forward(one[0], cache=caches[0])
                    else:
                        span.forward_packed([Segment(h, c) for h, c in zip(one, caches, strict=True)])

                ms = median(bench.times_ms(step, sizes.steps))
                found.append({"weights": kind.weights if kind else "plain", "sessions": batch, "ms": ms})
                bench.say(f"  {found[-1]}")
            for tokens in sizes.prompts if bench.device.type == "cuda" else ():
                prompt = noise(span, tokens, 1)
                ms = median(bench.times_ms(lambda p=prompt, s=span: s.forward(p, cache=s.new_cache()), 5))
                found.append({"weights": kind.weights if kind else "plain", "prompt": tokens, "ms": ms})
                bench.say(f"  {found[-1]}")
        del span
        torch.cuda.empty_cache()
    return found


def _ms(bench: Bench, work: Any) -> float:  # noqa: ANN401 - any call
    """Milliseconds of a call, by launching many behind each other."""
    if bench.device.type != "cuda":
        return bench.times_ms(work, 1, warm=0)[0]
    rounds = bench.sizes.steps * 2
    for _ in range(3):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # without the time that Python takes to launch it
        for _ in range(rounds):
            work()
    return bench.median_ms(graph.replay, 5) / rounds


def _rounded(span: Span, kind: type[RoundedMatrix]) -> Span:
    """Round a span's weights where they are."""
    with torch.inference_mode(mode=False):
        for layer in span.model.modules():
            for module in rounded_of(layer) if type(layer) is nn.ModuleList else ():
                weight = module.weight  # type: ignore[union-attr]
                to_integers(module, kind, (kind.of(weight.cpu()),))  # type: ignore[arg-type]
        place(span.model, span.device, on_device(span.device))
    made = Span.of(span.model, span.traits, span.blocks)
    prove_packing(made)
    return made


def _decoded(span: Span) -> Tensor:
    """A prompt and some steps."""
    cache = span.new_cache()
    outputs = [span.forward(noise(span, 17, 3), cache=cache)]
    outputs += [span.forward(noise(span, 1, 100 + number), cache=cache) for number in range(6)]
    return torch.cat(outputs, dim=1).cpu()


def _apart(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def _packed_equals_solo(span: Span) -> bool:
    """Whether steps of sessions of several lengths have the same bits alone and together."""
    lengths, ways = (5, 17, 40), []
    for packed in (False, True):
        caches = [span.new_cache() for _ in lengths]
        for length, cache in zip(lengths, caches, strict=True):
            span.forward(noise(span, length, length), cache=cache)
        steps = [noise(span, 1, 50 + length) for length in lengths]
        if packed:
            ways.append(span.forward_packed([Segment(h, c) for h, c in zip(steps, caches, strict=True)]))
        else:
            ways.append([span.forward(h, cache=c) for h, c in zip(steps, caches, strict=True)])
    return all(torch.equal(alone, together) for alone, together in zip(*ways, strict=True))
