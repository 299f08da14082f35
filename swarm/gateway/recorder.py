"""The gateway's figures for Prometheus. One recorder is passed to all parts; tenants are no labels."""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Recorder:
    """Counts requests and tokens."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "swarm_gateway_requests", "Answered requests.", ("path", "status", "model"), registry=registry
        )
        self._tokens = Counter(
            "swarm_gateway_tokens",
            "Tokens: of prompts that were computed, of prompts that sessions had already, of outputs.",
            ("model", "kind"),
            registry=registry,
        )
        self._repairs = Counter(
            "swarm_gateway_repairs", "Changes of routes under running generations.", ("model",), registry=registry
        )
        self._first = Histogram(
            "swarm_gateway_ttft_seconds",
            "From the arrival of a sequence to its first token.",
            ("model",),
            buckets=(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
            registry=registry,
        )
        self._next = Histogram(
            "swarm_gateway_inter_token_seconds",
            "Between two tokens of a sequence.",
            ("model",),
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
            registry=registry,
        )

    def request(self, path: str, status: int, model: str) -> None:
        """Count an answered request. path: the route's, not the client's."""
        self._requests.labels(path, str(status), model).inc()

    def of(self, model: str) -> "ModelFigures":
        """Return the counters of one model's tokens."""
        computed, cached, output = (self._tokens.labels(model, kind) for kind in ("prompt", "cached", "output"))
        first, following = self._first.labels(model), self._next.labels(model)
        return ModelFigures(computed, cached, output, self._repairs.labels(model), first, following)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Have a figure read whenever all are."""
        Gauge(f"swarm_gateway_{name}", text, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        return bytes(generate_latest(self._registry))


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """The figures of one model, looked up once: they are counted for each token."""

    computed: Counter  # tokens of prompts
    cached: Counter
    output: Counter
    repairs: Counter
    first_s: Histogram
    next_s: Histogram

    def prompt(self, computed: int, cached: int) -> None:
        """Count a prompt."""
        self.computed.inc(computed)
        self.cached.inc(cached)

    def token(self, after_s: float, *, is_first: bool) -> None:
        """Count a token of an output. after_s: since the one before, or since the sequence was asked for."""
        self.output.inc()
        (self.first_s if is_first else self.next_s).observe(after_s)

    def repair(self) -> None:
        """Count a change of a route."""
        self.repairs.inc()
