"""The state as Prometheus metrics. One series per model, never one per server: strangers must not fill a database."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swarm.monitor.state import AnchorFigures, AnchorState, ModelSummary, State

_MODEL = ("root", "model")


def metrics_text(state: State, history_problem: str) -> bytes:
    """Return the state in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_State(state, history_problem))
    return bytes(generate_latest(registry))


class _State(Collector):
    def __init__(self, state: State, history_problem: str) -> None:
        self._state, self._history_problem = state, history_problem

    def collect(self) -> Iterator[Metric]:
        state = self._state
        yield _one("swarm_servers_online", "Servers that answered a handshake lately.", state.servers_online)
        yield _one("swarm_servers_announced", "Servers with a living record.", state.servers_announced)
        yield _one("swarm_history_failing", "1 while no history can be written.", int(bool(self._history_problem)))
        yield _one("swarm_reading_failing", "1 if the last reading of the DHT failed.", int(bool(state.reading.error)))
        if state.reading.at is not None and state.reading.took_s is not None:
            yield _one("swarm_reading_timestamp_seconds", "When the DHT was last read.", state.reading.at)
            yield _one("swarm_reading_duration_seconds", "How long that took.", state.reading.took_s)
        versions = GaugeMetricFamily(
            "swarm_servers_by_version", "Servers by version of the software.", labels=["version"]
        )
        for count in state.versions:
            versions.add_metric([count.version], count.servers)
        yield versions
        ways = GaugeMetricFamily("swarm_servers_by_way", "Servers that answer, by the way to them.", labels=["way"])
        for way, servers in state.ways:
            ways.add_metric([way], servers)
        yield ways
        yield from _anchors(state.anchors)
        yield _one(
            "swarm_other_protocols", "Other major protocol versions that servers announce.", len(state.other_protocols)
        )
        yield from _models(state.models)
        yield from _probes(state.models)


def _one(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _anchors(anchors: Iterable[AnchorState]) -> Iterator[GaugeMetricFamily]:
    """Sums over all anchors: any peer can be one, under any number of identities."""
    loads = [anchor.load for anchor in anchors if anchor.load is not None]
    yield _one("swarm_anchors", "Anchors that tell their load.", len(loads))
    figures: dict[str, tuple[str, Callable[[AnchorFigures], int]]] = {
        "swarm_anchors_moored": ("Servers moored at anchors.", lambda load: load.moored),
        "swarm_anchors_moored_max": ("The limit of it.", lambda load: load.moored_max),
        "swarm_anchors_meetings": ("Meetings that wait for a peer.", lambda load: load.meetings),
        "swarm_anchors_meetings_max": ("The limit of it.", lambda load: load.meetings_max),
        "swarm_anchors_relayed_pairs": ("Pairs of peers that anchors relay.", lambda load: load.pairs),
        "swarm_anchors_relayed_pairs_max": ("The limit of it.", lambda load: load.pairs_max),
        "swarm_anchors_relayed_bytes_per_second": ("Bytes that anchors relay.", lambda load: load.relayed_bytes_per_s),
        "swarm_anchors_relayed_bytes_per_second_max": ("The limit of it.", lambda load: load.relayed_bytes_per_s_max),
        "swarm_anchors_refused": ("Refused since the starts of the anchors.", lambda load: load.refused),
    }
    for name, (text, value_of) in figures.items():
        yield _one(name, f"{text} Claims of the anchors.", sum(map(value_of, loads)))


def _models(models: Iterable[ModelSummary]) -> Iterator[GaugeMetricFamily]:
    figures: dict[str, tuple[str, Callable[[ModelSummary], float | None]]] = {
        "swarm_model_blocks": ("Blocks of the model.", lambda m: m.n_blocks),
        "swarm_model_missing_blocks": ("Blocks without a server that answers.", lambda m: len(m.missing_blocks)),
        "swarm_model_coverage_ratio": ("Share of blocks with a server that answers.", lambda m: m.coverage),
        "swarm_model_servers_online": ("Servers of the model that answer.", lambda m: m.servers_online),
        "swarm_model_servers_announced": ("Servers of the model with a living record.", lambda m: m.servers_announced),
        "swarm_model_free_tokens": ("Free KV tokens at the block that has fewest.", lambda m: m.free_tokens),
        "swarm_model_decode_tokens_per_second": ("Estimate for one user.", lambda m: m.decode_tps),
        "swarm_model_servers_audited": ("Servers that this page has audited.", lambda m: m.servers_audited),
        "swarm_model_servers_wrong": ("Of them, those that audits have shown as wrong.", lambda m: m.servers_wrong),
        "swarm_model_prefill_tokens_per_second": ("Of all servers at the weakest block.", lambda m: m.prefill_tps),
    }
    for name, (text, value_of) in figures.items():
        family = GaugeMetricFamily(name, text, labels=_MODEL)
        for model in models:
            value = value_of(model)
            if value is not None:
                family.add_metric([model.root, model.name], value)
        yield family
    status = GaugeMetricFamily("swarm_model_status", "1 for the status that holds.", labels=[*_MODEL, "status"])
    for model in models:
        for name in ("healthy", "degraded", "broken"):
            status.add_metric([model.root, model.name, name], int(model.status == name))
    yield status


def _probes(models: Iterable[ModelSummary]) -> Iterator[GaugeMetricFamily]:
    labels = [*_MODEL, "window"]
    attempts = GaugeMetricFamily("swarm_probe_attempts", "Synthetic generations within the window.", labels=labels)
    success = GaugeMetricFamily("swarm_probe_success_ratio", "Share of them that succeeded.", labels=labels)
    quantile = [*labels, "quantile"]
    first = GaugeMetricFamily("swarm_probe_ttft_seconds", "Time to first token.", labels=quantile)
    gaps = GaugeMetricFamily("swarm_probe_inter_token_seconds", "Time between tokens.", labels=quantile)
    for model in models:
        for stats in model.probes:
            values = [model.root, model.name, stats.window]
            attempts.add_metric(values, stats.attempts)
            if stats.success_rate is not None:
                success.add_metric(values, stats.success_rate)
            for family, found in ((first, stats.ttft_ms), (gaps, stats.inter_token_ms)):
                if found is not None:
                    family.add_metric([*values, "0.5"], found.p50 / 1000)
                    family.add_metric([*values, "0.95"], found.p95 / 1000)
    yield from (attempts, success, first, gaps)
