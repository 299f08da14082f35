"""How fast a wide span computes on a device, beside what the device itself can do."""

from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from common import Samples
from gpu_spans import Bench, name_of, noise, wide_config, wide_span
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from swarm.activations import Activations
from swarm.compute.queues import Queue
from swarm.compute.scheduler import Part
from swarm.compute.task import Forward, Place, Tenure
from swarm.compute.thread import run
from swarm.model.cache import SpanCache
from swarm.model.packed import Segment
from swarm.model.span import Span
from swarm.server.measure import cache_prices, device_name, measure_throughput, tokens_that_fit


class Speed:
    """The timed sections. They share one span, made when the first of them runs."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.samples: list[Samples] = []
        self._span: Span | None = None

    @property
    def span(self) -> Span:
        """The wide span."""
        if self._span is None:
            sizes = self.bench.sizes
            config = wide_config(sizes, sizes.blocks)
            self._span = wide_span(config, sizes.speed_dtype, self.bench.device, self.bench.seed)
            self.bench.say(f"  a span of {sizes.blocks} blocks, {self._span.weight_bytes / 1e9:.2f} GB")
        return self._span

    def limits(self) -> dict[str, float]:
        """Measure the device: a copy, reading weights for one row, and products of matrices."""
        bench, sizes = self.bench, self.bench.sizes
        dtype, device = sizes.speed_dtype, bench.device
        source = torch.ones(sizes.copy_bytes // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        copy_ms = bench.median_ms(lambda: target.copy_(source), 10)
        facts = bench.facts
        facts["copy_gb_s"] = 2 * sizes.copy_bytes / copy_ms / 1e6
        rows = max(1, sizes.copy_bytes // 2 // dtype.itemsize // sizes.hidden)
        weight = torch.randn(rows, sizes.hidden, dtype=dtype, device=device)
        one = torch.randn(1, sizes.hidden, dtype=dtype, device=device)
        read_ms = bench.median_ms(lambda: nn.functional.linear(one, weight), 10)
        facts["one_row_linear_gb_s"] = weight.nbytes / read_ms / 1e6
        left = torch.randn(sizes.matmul, sizes.matmul, dtype=dtype, device=device)
        right = torch.randn(sizes.matmul, sizes.matmul, dtype=dtype, device=device)
        facts["matmul_tflop_s"] = 2 * sizes.matmul**3 / bench.median_ms(lambda: left @ right, 10) / 1e9
        for tokens in sizes.prompts:
            thin = torch.randn(tokens, sizes.hidden, dtype=dtype, device=device)
            shape = torch.randn(sizes.intermediate, sizes.hidden, dtype=dtype, device=device)
            took_ms = bench.median_ms(lambda t=thin, s=shape: nn.functional.linear(t, s), 20)
            flop = 2 * tokens * sizes.hidden * sizes.intermediate
            facts[f"linear_{tokens}_tokens_tflop_s"] = flop / took_ms / 1e9
        for name, value in facts.items():
            bench.say(f"  {name} {value:.1f}")
        return dict(facts)

    def announced(self) -> dict[str, Any]:
        """What a server measures when it starts, and how many tokens it would keep."""
        span = self.span
        with torch.inference_mode():
            throughput, prices = measure_throughput(span), cache_prices(span)
        found = asdict(throughput) | asdict(prices) | {"device": device_name(span.device)}
        found |= {"pool_tokens": tokens_that_fit(span, prices, None), "numeric_class": str(span.numeric_class)}
        found |= {"weight_bytes": span.weight_bytes, "packs": span.packs, "direct": span.is_direct}
        self.bench.say(f"  {found}")
        return found

    def decode(self) -> list[dict[str, Any]]:
        """Time decode steps: sessions packed, rows of one session, and packed sessions from and to the host."""
        found: list[dict[str, Any]] = []
        for past in self.bench.sizes.pasts:
            caches = self._caches(max(self.bench.sizes.batches), past)
            for batch in self.bench.sizes.batches:
                if self.bench.late:
                    return found
                found.append(self._decoded("sessions", batch, past, self._packed_step(caches[:batch])))
                found.append(self._decoded("sessions, host to host", batch, past, self._served_step(batch, past)))
                if batch > 1:
                    found.append(self._decoded("rows of one session", batch, past, self._rows_step(batch, past)))
        return found

    def prefill(self) -> list[dict[str, Any]]:
        """Time whole prompts."""
        bench, span, found = self.bench, self.span, []
        flop_weights = 2 * span.weight_bytes / span.dtype.itemsize
        for tokens in bench.sizes.prompts:
            if bench.late:
                break
            hidden = noise(span, tokens, 1)

            def prompt(hidden: Tensor = hidden) -> None:
                span.forward(hidden, cache=span.new_cache())

            with torch.inference_mode():
                samples = Samples(f"prefill, {tokens} tokens", bench.times_ms(prompt, max(3, bench.sizes.steps // 2)))
            self.samples.append(samples)
            # A causal attention computes half of the products of queries with keys and of weights with values.
            flop = tokens * flop_weights + 2 * tokens**2 * bench.sizes.hidden * len(span.blocks)
            rate = flop / samples.median / 1e9
            row = {"tokens": tokens, "ms": samples.median, "tokens_s": 1000 * tokens / samples.median, "tflop_s": rate}
            row |= self._share("of_matmul", rate, "matmul_tflop_s")
            row |= self._share("of_linear", rate, f"linear_{tokens}_tokens_tflop_s")
            found.append(row)
            bench.say(f"  {tokens} tokens: {row['tokens_s']:.0f} tokens/s, {rate:.2f} TFLOP/s")
        return found

    def overhead(self) -> list[dict[str, Any]]:
        """Compare the wall time of a decode step with the time that the device computes; count its kernels."""
        bench, found = self.bench, []
        for past in bench.sizes.pasts:
            caches = self._caches(max(bench.sizes.overhead_batches), past)
            for batch in bench.sizes.overhead_batches:
                if bench.late:
                    return found
                step = self._packed_step(caches[:batch])
                row = {"batch": batch, "past": past} | self._profiled(step)
                found.append(row)
                bench.say(f"  batch {batch}, past {past}: " + ", ".join(f"{k} {v:.2f}" for k, v in row.items()))
        return found

    def attention(self) -> dict[str, Any]:
        """Time lone steps at lengths of a past that this process has not seen, with cuDNN's attention and without."""
        if self.bench.device.type != "cuda":
            return {"skipped": "no CUDA device"}
        span, found = self.span, {}
        past = max(self.bench.sizes.pasts) + 1000
        for name, planned in (("cudnn", True), ("others", False), ("cudnn again", True)):
            torch.backends.cuda.enable_cudnn_sdp(planned)
            (cache,) = self._caches(1, past)
            new = noise(span, 1, 1)
            with torch.inference_mode():
                samples = Samples(
                    f"decode, one, past {past}, attention by {name}",
                    self.bench.times_ms(lambda c=cache, n=new: span.forward(n, cache=c), self.bench.sizes.steps, 4),
                )
            self.samples.append(samples)
            found[f"{name}_ms"] = samples.median
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.bench.say(f"  {found}")
        return found

    def graphs(self) -> dict[str, Any]:
        """Capture one decode step as a CUDA graph, as the code is, and replay it at the same position.

        It computes the same position again at every replay: a figure of what graphs would give, and no decode.
        """
        if self.bench.device.type != "cuda":
            return {"skipped": "no CUDA device"}
        found: dict[str, Any] = {}
        for past in self.bench.sizes.pasts:
            found[f"one row, past {past}"] = self._tried(lambda past=past: self._graph_of_one(past))
            found[f"8 rows of one session, past {past}"] = self._tried(lambda past=past: self._graph_of_one(past, 8))
        found["8 sessions packed"] = self._tried(lambda: self._graph_of_packed(8, self.bench.sizes.pasts[0]))
        return found

    def _decoded(self, what: str, batch: int, past: int, step: Callable[[], object]) -> dict[str, Any]:
        bench, span = self.bench, self.span
        with torch.inference_mode():
            samples = Samples(f"decode, {what}, {batch}, past {past}", bench.times_ms(step, bench.sizes.steps, 4))
        self.samples.append(samples)
        kv_bytes = batch * past * len(span.blocks) * 2 * span.hidden_size // bench.sizes.heads * bench.sizes.kv_heads
        weights_gb_s = span.weight_bytes / samples.median / 1e6
        total_gb_s = (span.weight_bytes + kv_bytes * span.dtype.itemsize) / samples.median / 1e6
        row: dict[str, Any] = {"what": what, "batch": batch, "past": past, "ms": samples.median}
        row |= {"p95_ms": samples.percentile(0.95), "tokens_s": 1000 * batch / samples.median}
        row |= {"weights_gb_s": weights_gb_s, "weights_and_kv_gb_s": total_gb_s}
        # A copy reads and writes: its bytes a second count both, as the memory does.
        row |= self._share("of_copy", total_gb_s, "copy_gb_s")
        bench.say(f"  {what}, {batch}, past {past}: {samples.median:.2f} ms, {row['tokens_s']:.0f} tokens/s")
        return row

    def _share(self, name: str, value: float, of: str) -> dict[str, float]:
        whole = self.bench.facts.get(of)
        return {name: value / whole} if whole else {}

    def _caches(self, count: int, past: int) -> list[SpanCache]:
        span, caches = self.span, []
        hidden = noise(span, past, 1)
        with torch.inference_mode():
            for _ in range(count):
                caches.append(span.new_cache())
                span.forward(hidden, cache=caches[-1])
        return caches

    def _packed_step(self, caches: list[SpanCache]) -> Callable[[], object]:
        """As the compute thread does it: alone where there is one session, else packed."""
        span = self.span
        new = [noise(span, 1, number) for number in range(len(caches))]
        if len(caches) == 1:
            return lambda: span.forward(new[0], cache=caches[0])
        return lambda: span.forward_packed([Segment(hidden, cache) for hidden, cache in zip(new, caches, strict=True)])

    def _rows_step(self, rows: int, past: int) -> Callable[[], object]:
        span, cache = self.span, self.span.new_cache()
        with torch.inference_mode():
            span.forward(noise(span, past, 1, rows), cache=cache)
        new = noise(span, 1, 2, rows)
        return lambda: span.forward(new, cache=cache)

    def _served_step(self, batch: int, past: int) -> Callable[[], object]:
        """Tasks of the server, run as its compute thread runs them: hidden states come from the host and go there."""
        span = self.span
        tenures = [Tenure(f"peer {number}", span, 0) for number in range(batch)]
        prompt = Activations(noise(span, past, 1).cpu())
        with torch.inference_mode():
            for tenure in tenures:
                Forward(tenure, prompt, Place(0, want=1)).complete()
        new = [Activations(noise(span, 1, number).cpu()) for number in range(batch)]

        def step() -> None:
            tasks = [
                Forward(tenure, hidden, Place(tenure.past.cache.length))
                for tenure, hidden in zip(tenures, new, strict=True)
            ]
            failed = run([Part(task, 1, _no_queue(), decodes=True) for task in tasks])
            if failed:
                raise next(iter(failed.values()))
            for task in tasks:
                task.result()

        return step

    def _profiled(self, step: Callable[[], object]) -> dict[str, float]:
        """Wall time, time of the device, kernels and calls of operators of one step. Devices' figures on CUDA only."""
        bench, count = self.bench, 3
        cuda = bench.device.type == "cuda"
        with torch.inference_mode():
            wall_ms = median(bench.times_ms(step, bench.sizes.steps, 3))
            bench.wait()
            with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as recorded:
                for _ in range(count):
                    step()
                bench.wait()
        events = list(recorded.events())
        found = {"wall_ms": wall_ms, "aten_calls": sum(e.name.startswith("aten::") for e in events) / count}
        if cuda:
            kernels = [event for event in events if event.device_type.name == "CUDA"]
            found["device_ms"] = sum(kernel.time_range.elapsed_us() for kernel in kernels) / 1000 / count
            found["kernels"] = len(kernels) / count
            launches = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
            found["launches"] = sum(event.name in launches for event in events) / count
            found["copies"] = sum(event.name.startswith("cudaMemcpy") for event in events) / count
            found["waits"] = sum("Synchronize" in event.name for event in events) / count
            found["device_share"] = found["device_ms"] / wall_ms
        return found

    def _tried(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - what cannot be captured is a result
            torch.cuda.synchronize()
            found = {"error": f"{type(error).__name__}: {error}"[:600]}
        self.bench.say(f"  {found}")
        return found

    def _graph_of_one(self, past: int, rows: int = 1) -> dict[str, Any]:
        span, new = self.span, noise(self.span, 1, 2, rows)
        cache = span.new_cache()
        with torch.inference_mode():
            span.forward(noise(span, past, 1, rows), cache=cache)

            def step() -> Tensor:
                output = span.forward_directly(new, cache)
                if output is None:
                    raise RuntimeError("the span does not go without its parent here")
                cache.keep(past)
                return output

            return self._captured(step)

    def _graph_of_packed(self, batch: int, past: int) -> dict[str, Any]:
        caches = self._caches(batch, past)
        packed = self._packed_step(caches)

        def step() -> Tensor:
            outputs = packed()
            for cache in caches:
                cache.keep(past)
            return torch.cat(outputs)

        with torch.inference_mode():
            return self._captured(step)

    def _captured(self, step: Callable[[], Tensor]) -> dict[str, Any]:
        """Time a step as it is and as a graph, and compare their outputs."""
        bench = self.bench
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        eager_ms = bench.median_ms(step, bench.sizes.steps)
        expected = step().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = step()
        graph_ms = bench.median_ms(graph.replay, bench.sizes.steps)
        weights_gb_s = self.span.weight_bytes / graph_ms / 1e6
        equal = bool(torch.equal(output, expected))
        return {"eager_ms": eager_ms, "graph_ms": graph_ms, "equal_bits": equal, "weights_gb_s": weights_gb_s}


def _no_queue() -> Queue:
    """Parts that the scheduler did not form belong to no queue, and `run` looks at none."""
    return None  # type: ignore[return-value]


def describe(bench: Bench) -> dict[str, Any]:
    """The device, its driver, and how its products of matrices are set up."""
    found: dict[str, Any] = {"device": str(bench.device), "speed_dtype": name_of(bench.sizes.speed_dtype)}
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        found |= {"name": properties.name, "memory_gb": properties.total_memory / 1e9, "cuda": torch.version.cuda}
        found |= {
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
        }
        found |= {"tf32_matmul": torch.backends.cuda.matmul.allow_tf32, "tf32_cudnn": torch.backends.cudnn.allow_tf32}
        found["bf16_reduced_sums"] = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    return found
