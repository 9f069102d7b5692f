"""The `/metrics` page: the replica's state by the protocol's table, plus finer latencies.

Everything that `/state` says is rendered from the same `ReplicaState`, so the two can't disagree.
Only what no state holds (each gap between tokens, end-to-end times, lengths) is observed here.
"""

from collections.abc import Callable, Iterator

from kvscaler import __version__
from kvscaler.protocol import metrics as names
from kvscaler.protocol.drain import DrainPhase
from kvscaler.protocol.metrics import MetricKind, cumulative_buckets, samples
from kvscaler.protocol.state import LATENCY_BUCKETS_SECONDS, ReplicaState
from kvscaler.protocol.state import Histogram as StateHistogram
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_INTER_TOKEN_BUCKETS_SECONDS = LATENCY_BUCKETS_SECONDS


class Latencies:
    """Histograms per event, fed by the engine's thread; prometheus_client's are thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.inter_token = Histogram(
            names.INTER_TOKEN_LATENCY,
            "Time between two output tokens of one request.",
            buckets=_INTER_TOKEN_BUCKETS_SECONDS,
            registry=registry,
        )
        self.end_to_end = Histogram(
            names.END_TO_END_LATENCY,
            "From a request's arrival to its last output token.",
            buckets=LATENCY_BUCKETS_SECONDS,
            registry=registry,
        )
        self.prompt_length = Histogram(
            names.PROMPT_LENGTH,
            "Prompt tokens of admitted requests.",
            buckets=names.LENGTH_BUCKETS_TOKENS,
            registry=registry,
        )
        self.output_length = Histogram(
            names.OUTPUT_LENGTH,
            "Output tokens of finished requests.",
            buckets=names.LENGTH_BUCKETS_TOKENS,
            registry=registry,
        )


class StateCollector(Collector):
    """Families of the page, from one state per scrape."""

    def __init__(
        self,
        state: Callable[[], ReplicaState],
        heartbeat_age_seconds: Callable[[], float | None],
    ) -> None:
        self._state = state
        self._heartbeat_age_seconds = heartbeat_age_seconds

    def collect(self) -> Iterator[Metric]:
        """One family per name of the table, then the families that carry facts in labels."""
        state = self._state()
        yield from _table_families(state)
        yield from _info_families(state)
        if state.occupancy is not None and state.capacity is not None:
            yield from _cache_families(state)
        age = self._heartbeat_age_seconds()
        if age is not None:
            yield GaugeMetricFamily(
                names.LIVENESS_AGE, "Time since the engine's loop last turned.", value=age
            )


def _table_families(state: ReplicaState) -> Iterator[Metric]:
    families: dict[str, Metric] = {}
    help_of = {m.name: m.help for m in reversed(names.STATE_METRICS) if m.help}
    for sample in samples(state):
        metric = sample.metric
        labels = sorted(sample.labels)
        values = [sample.labels[label] for label in labels]
        family = families.get(metric.name)
        if metric.kind is MetricKind.HISTOGRAM:
            if not isinstance(family, HistogramMetricFamily):
                family = HistogramMetricFamily(metric.name, help_of[metric.name], labels=labels)
            assert isinstance(sample.value, StateHistogram)
            family.add_metric(values, cumulative_buckets(sample.value), sample.value.sum_seconds)
        elif metric.kind is MetricKind.COUNTER:
            if not isinstance(family, CounterMetricFamily):
                family = CounterMetricFamily(metric.name, help_of[metric.name], labels=labels)
            assert isinstance(sample.value, float)
            family.add_metric(values, sample.value)
        else:
            if not isinstance(family, GaugeMetricFamily):
                family = GaugeMetricFamily(metric.name, help_of[metric.name], labels=labels)
            assert isinstance(sample.value, float)
            family.add_metric(values, sample.value)
        families[metric.name] = family
    yield from families.values()


def _info(name: str, text: str, labels: dict[str, str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), 1.0)
    return family


def _info_families(state: ReplicaState) -> Iterator[Metric]:
    yield _info(
        names.REPLICA_INFO,
        "Which replica this is.",
        {
            "service_uid": state.service_uid,
            "service_name": state.service_name,
            "pod_uid": state.pod_uid,
            "pod_name": state.pod_name,
            "version": __version__,
        },
    )
    executor = state.executor
    yield _info(
        names.EXECUTOR_INFO,
        "What computes the steps; a modelled executor computes no real tokens.",
        {
            "type": executor.type,
            "device": executor.device,
            "compute_dtype": executor.compute_dtype,
            "kv_dtype": executor.kv_dtype,
            "time_scale": f"{executor.time_scale:g}",
        },
    )
    yield _info(
        names.MODEL_INFO,
        "The model that is served.",
        {
            "uri": state.model.uri,
            "digest": state.model.digest,
            "served_names": ",".join(state.model.served_names),
        },
    )
    phases = GaugeMetricFamily(names.DRAIN_PHASE, "1 for the phase of the drain.", labels=["phase"])
    for phase in DrainPhase:
        phases.add_metric([str(phase)], 1.0 if phase is state.drain.phase else 0.0)
    yield phases
    if state.limits is not None:
        limits = state.limits
        yield _info(
            names.LIMITS_INFO,
            "The limits in force, by hash, with what is no number.",
            {
                "hash": limits.hash,
                "own_hash": limits.own_hash,
                "requested_hash": limits.requested_hash or "",
                "charge": str(limits.applied.charge),
                "mode": str(limits.applied.mode),
            },
        )
    if state.budget:
        lines = GaugeMetricFamily(
            names.BUDGET_BYTES, "The replica's own budget, by line.", labels=["line", "basis"]
        )
        for line in state.budget:
            lines.add_metric([line.name, line.basis], float(line.bytes))
        yield lines


def _cache_families(state: ReplicaState) -> Iterator[Metric]:
    assert state.occupancy is not None and state.capacity is not None
    occupancy, block_tokens = state.occupancy, state.capacity.block_tokens
    yield _info(
        names.CACHE_CONFIG_INFO,
        "Block size and count, under the label names that endpoint pickers read.",
        {
            "block_size": str(block_tokens),
            "num_gpu_blocks": str(state.capacity.kv_blocks),
        },
    )
    tokens = GaugeMetricFamily(
        names.KV_TOKENS, "Token slots by the state of their block.", labels=["state"]
    )
    for name, blocks in (
        ("referenced", occupancy.referenced_blocks),
        ("cached", occupancy.cached_blocks),
        ("free", occupancy.free_blocks),
    ):
        tokens.add_metric([name], float(blocks * block_tokens))
    yield tokens
    if occupancy.capacity_blocks:
        yield GaugeMetricFamily(
            names.KV_CACHE_UTILIZATION,
            "Referenced share of the KV blocks, 0 to 1.",
            value=occupancy.referenced_blocks / occupancy.capacity_blocks,
        )


def render(registry: CollectorRegistry) -> bytes:
    """The page in Prometheus' text format."""
    return generate_latest(registry)
