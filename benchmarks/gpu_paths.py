"""Every way through a span on a device, compared with another way or with a float32 twin on the CPU."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from gpu_spans import Bench, name_of, noise, parted, tiny_checkpoint, tiny_span, wide_config, wide_span
from torch import Tensor

from swarm.activations import Activations
from swarm.compute.task import Forward, Place, Tenure
from swarm.compute.thread import ComputeThread
from swarm.errors import RollbackImpossible
from swarm.model.packed import Segment
from swarm.model.past import SpanPast
from swarm.model.prefix import Cutting, can_share, refill
from swarm.model.span import Span


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest relative error of a position's hidden state, by dtype.

    whole: against the float32 twin, through all blocks. ways: between two ways through the same span.
    """

    whole: dict[str, float]
    ways: dict[str, float]


@dataclass(frozen=True, slots=True)
class Compared:
    """One way against another. error, middle: the largest and the median relative error of a position.

    same_tokens: the share of positions whose largest logit, by a fixed random head, is the same.
    """

    what: str
    equal_bits: bool
    error: float
    middle: float
    same_tokens: float
    bound: float
    ok: bool


def bounds() -> Bounds:
    """The bounds that the report states."""
    return Bounds(
        whole={"float32": 1e-3, "bfloat16": 1e-1, "float16": 2e-2},
        ways={"float32": 1e-4, "bfloat16": 1e-1, "float16": 2e-2},
    )


def compare(what: str, got: Tensor, expected: Tensor, bound: float, *, routed: bool = False) -> Compared:
    """Compare hidden states [rows, tokens, hidden_size]; of any dtypes and devices.

    routed: a router may choose other experts for a position, so the median counts instead of the largest error.
    """
    equal = got.dtype == expected.dtype and bool(torch.equal(got.cpu(), expected.cpu()))
    left, right = got.detach().float().cpu(), expected.detach().float().cpu()
    errors = ((left - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-12)).flatten()
    head = torch.randn(512, right.shape[-1], generator=torch.Generator().manual_seed(5))
    same = (left @ head.T).argmax(-1) == (right @ head.T).argmax(-1)
    error, middle = float(errors.max()), float(errors.median())
    ok = bool(torch.isfinite(left).all()) and (middle if routed else error) <= bound
    return Compared(what, equal, error, middle, float(same.float().mean()), bound, ok)


def families(bench: Bench) -> list[dict[str, Any]]:
    """Compare all ways through tiny spans of several families, in every dtype."""
    found: list[dict[str, Any]] = []
    for dtype in bench.sizes.dtypes:
        for family in bench.sizes.families:
            if bench.left_s < bench.sizes.graphs_s:
                bench.say("  no time for more families")
                return found
            with tiny_checkpoint(family, bench.seed) as checkpoint, torch.inference_mode():
                twin = tiny_span(checkpoint, torch.float32, "cpu")
                same = dtype is torch.float32 or bench.device.type == "cpu"
                host = None if same else tiny_span(checkpoint, dtype, "cpu")
                found.append(_all_ways(bench, family, tiny_span(checkpoint, dtype, bench.device), twin, host))
    return found


def wide(bench: Bench) -> list[dict[str, Any]]:
    """Compare all ways through some blocks of the wide model, in every dtype."""
    config = wide_config(bench.sizes, bench.sizes.compared_blocks)
    made = wide_span(config, torch.float32, bench.device, bench.seed)
    twin = wide_span(config, torch.float32, "cpu", bench.seed, like=made)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for dtype in bench.sizes.dtypes:
            if bench.late:
                return found
            span = made if dtype is torch.float32 else wide_span(config, dtype, bench.device, bench.seed, like=made)
            found.append(_all_ways(bench, f"wide llama, {bench.sizes.hidden}", span, twin, None))
            del span
    return found


def _all_ways(bench: Bench, family: str, span: Span, twin: Span, host: Span | None) -> dict[str, Any]:
    """Compare all ways through one span. host: the same span on the CPU in the same dtype, to compare the errors."""
    dtype = name_of(span.dtype)
    routed = "moe" in family or "deepseek" in family or "qwen3_next" in family
    routed = routed and span.dtype is not torch.float32
    limits = bounds()
    rows: list[Compared] = []
    errors: dict[str, str] = {}

    def add(what: str, work: Callable[[], tuple[Tensor, Tensor]], bound: float) -> None:
        try:
            got, expected = work()
            rows.append(compare(what, got, expected, bound, routed=routed))
        except RollbackImpossible as error:
            errors[what] = f"not for this family: {error}"
        except Exception as error:  # noqa: BLE001 - recorded; the other ways are still tried
            errors[what] = f"{type(error).__name__}: {error}"[:600]

    add("against the float32 twin", lambda: (_solo(span), _solo(twin, like=span)), limits.whole[dtype])
    if host is not None:
        add("CPU in this dtype against it", lambda: (_solo(host), _solo(twin, like=host)), limits.whole[dtype])
    add("the same again", lambda: (_solo(span), _solo(span)), 0.0)
    way = limits.ways[dtype]
    add("decode without parent against with", lambda: _direct(span), way)
    add("prompt in chunks against whole", lambda: _chunked(span), way)
    if span.packs:
        add("packed decode against solo", lambda: _packed(bench, span, 1), way)
        add("packed with a prompt against solo", lambda: _packed(bench, span, 9), way)
        add("compute thread, 5 sessions, against solo", lambda: asyncio.run(_threaded(span)), way)
    add("rows of a batch against solo", lambda: _batched(span), way)
    add("padded rows against solo", lambda: _padded(span), way)
    add("rolled back against never went", lambda: _rolled_back(span), way)
    add("rows gathered against solo", lambda: _gathered(span), way)
    if can_share(span):
        add("a past put together from blocks", lambda: _prefixed(span), way)
    bad = [row.what for row in rows if not row.ok]
    bad += [what for what, text in errors.items() if not text.startswith("not for")]
    bench.say(
        f"  {family}, {dtype}: {len(rows)} ways, " + (f"NOT as expected: {'; '.join(bad)}" if bad else "all fine")
    )
    return {
        "family": family,
        "dtype": dtype,
        "packs": span.packs,
        "direct": span.is_direct,
        "ways": [asdict(row) for row in rows],
        "errors": errors,
        "failed": bad,
    }


def _steps(hidden: Tensor, span: Span, counts: Sequence[int], cache: Any = None) -> Tensor:  # noqa: ANN401
    """Run consecutive pieces of a session. Returns the outputs of all."""
    cache = cache if cache is not None else span.new_cache(8)
    return torch.cat([span.forward(part, cache=cache) for part in parted(hidden, counts)], 1)


def _solo(span: Span, like: Span | None = None) -> Tensor:
    """A prompt and 8 decode steps. like: take the inputs as this span rounds them."""
    hidden = noise(like or span, 40, 1).to(span.device, span.dtype)
    return _steps(hidden, span, (32, *[1] * 8))


def _direct(span: Span) -> tuple[Tensor, Tensor]:
    hidden = noise(span, 20, 2)
    left, right = span.new_cache(), span.new_cache()
    outputs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for part in parted(hidden, (12, *[1] * 8)):
        direct = span.forward_directly(part, left) if part.shape[1] == 1 else None
        outputs[0].append(direct if direct is not None else span.forward_through_parent(part, cache=left))
        outputs[1].append(span.forward_through_parent(part, cache=right))
    return torch.cat(outputs[0], 1), torch.cat(outputs[1], 1)


def _chunked(span: Span) -> tuple[Tensor, Tensor]:
    hidden = noise(span, 42, 3)
    return _steps(hidden, span, (7, 9, 16, 8, 1, 1)), _steps(hidden, span, (40, 1, 1))


def _packed(bench: Bench, span: Span, tokens: int) -> tuple[Tensor, Tensor]:
    """Sessions of different pasts; one of them takes `tokens` at a time beside the decode steps of the others."""
    pasts = bench.sizes.compared_pasts if span.hidden_size == bench.sizes.hidden else (3, 12, 30)
    alone, together = [], []
    caches = [(span.new_cache(), span.new_cache()) for _ in pasts]
    for number, (past, pair) in enumerate(zip(pasts, caches, strict=True)):
        for cache in pair:
            span.forward(noise(span, past, 10 + number), cache=cache)
    for step in range(4):
        new = [noise(span, tokens if not number else 1, 100 * step + number) for number in range(len(pasts))]
        alone += [span.forward(hidden, cache=pair[0]) for hidden, pair in zip(new, caches, strict=True)]
        together += span.forward_packed([Segment(hidden, pair[1]) for hidden, pair in zip(new, caches, strict=True)])
    return torch.cat(together, 1), torch.cat(alone, 1)


async def _threaded(span: Span) -> tuple[Tensor, Tensor]:
    """Sessions at once in the server's compute thread, from and to the host."""
    loop = asyncio.get_running_loop()
    hidden = [noise(span, 14 + number, 20 + number).cpu() for number in range(5)]
    thread = ComputeThread(loop)

    async def session(number: int) -> Tensor:
        tenure = Tenure(f"peer {number}", span, 0)
        outputs, keep = [], 0
        counts = (10 + number, 1, 1, 1, 1)
        for part in parted(hidden[number], counts):
            future: asyncio.Future[Any] = loop.create_future()
            thread.submit(Forward(tenure, Activations(part), Place(keep)), future.set_result)
            result = await future
            if isinstance(result, Exception):
                raise result
            outputs.append(result)
            keep += part.shape[1]
        return torch.cat(outputs, 1)

    try:
        got = await asyncio.gather(*(session(number) for number in range(5)))
    finally:
        await asyncio.to_thread(thread.stop)
    alone = [_steps(part.to(span.device), span, (10 + number, 1, 1, 1, 1)) for number, part in enumerate(hidden)]
    return torch.cat(list(got), 1), torch.cat(alone, 1)


def _batched(span: Span) -> tuple[Tensor, Tensor]:
    hidden = noise(span, 16, 4, rows=3)
    counts = (12, 1, 1, 1, 1)
    alone = torch.cat([_steps(row[None], span, counts) for row in hidden])
    return _steps(hidden, span, counts), alone


def _padded(span: Span) -> tuple[Tensor, Tensor]:
    """Two rows, of which the second begins with padding. Only what is no padding is compared."""
    hidden = noise(span, 14, 6, rows=2).cpu()
    pad, prompt = 4, 10
    mask = torch.ones(2, 14, dtype=torch.uint8)
    mask[1, :pad] = 0
    positions = torch.stack([torch.arange(14), (torch.arange(14) - pad).clamp_min(0)])
    whole = Activations(hidden, positions, mask)
    past = SpanPast(span.new_cache())
    outputs = [past.forward(span, whole.part(0, prompt))]
    outputs += [past.forward(span, whole.part(at, at + 1)) for at in range(prompt, 14)]
    got = torch.cat(outputs, 1)
    rows = [_steps(hidden[:1].to(span.device), span, (prompt, *[1] * 4))]
    rows.append(_steps(hidden[1:, pad:].to(span.device), span, (prompt - pad, *[1] * 4)))
    return torch.cat([got[:1], got[1:, pad:]], 1), torch.cat(rows, 1)


def _rolled_back(span: Span) -> tuple[Tensor, Tensor]:
    hidden, astray = noise(span, 26, 7), noise(span, 6, 8)
    cache = span.new_cache(8)
    _steps(hidden, span, (20,), cache)
    _steps(astray, span, (3, 1, 1, 1), cache)
    cache.keep(20)
    got = _steps(hidden[:, 20:], span, (1,) * 6, cache)
    return got, _steps(hidden, span, (20, *[1] * 6))[:, 20:]


def _gathered(span: Span) -> tuple[Tensor, Tensor]:
    """Rows that trade places and repeat, as in a beam search."""
    hidden = noise(span, 13, 9, rows=2)
    past = SpanPast(span.new_cache())
    past.forward(span, Activations(hidden[:, :12]))
    past.rewind(12, (1, 0, 1))
    got = past.forward(span, Activations(hidden[[1, 0, 1], 12:]))
    alone = torch.cat([_steps(hidden[row][None], span, (12, 1))[:, 12:] for row in (1, 0, 1)])
    return got, alone


def _prefixed(span: Span) -> tuple[Tensor, Tensor]:
    """A past of two blocks, cut out of one session's cache and put into another's."""
    hidden = noise(span, 36, 12)
    first, second = span.new_cache(), span.new_cache()
    expected = _steps(hidden, span, (32, 1, 1, 1, 1), first)[:, 32:]
    cutting = Cutting(((0, 16), (16, 32)))
    cutting.cut(first)
    refill(second, cutting.blocks)
    return _steps(hidden[:, 32:], span, (1,) * 4, second), expected
