"""The names under which `/metrics` exports what `/state` reports: one table for both sides.

The replica renders its page from this table and the operator makes its queries from it, so an
exporter and a query can't drift apart, and a replica seen through Prometheus and one asked
directly give the same facts. What the state does not know has no sample, never a 0.

Counters are cumulative since the process started and keep their plain sums, so a window of length
statistics is a `increase()` of each sum.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvscaler.protocol.state import LATENCY_BUCKETS_SECONDS, Histogram, ReplicaState


class MetricKind(StrEnum):
    """Prometheus' type of a family."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class StateMetric:
    """One number of `ReplicaState` as a series.

    `path` is where the number stands in the state, dotted. A family of several series repeats its
    name with other `labels`. With `key_label` the number is a map and its keys are that label.
    """

    name: str
    kind: MetricKind
    path: str
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)
    key_label: str | None = None


def _gauge(name: str, path: str, text: str, **labels: str) -> StateMetric:
    return StateMetric(name, MetricKind.GAUGE, path, text, labels)


def _counter(name: str, path: str, text: str, key_label: str | None = None) -> StateMetric:
    return StateMetric(name, MetricKind.COUNTER, path, text, {}, key_label)


def _histogram(name: str, path: str, text: str) -> StateMetric:
    return StateMetric(name, MetricKind.HISTOGRAM, path, text)


# Names that queries, dashboards and rules use one by one.
READY = "kvscaler_ready"
START_TIME = "kvscaler_start_time_seconds"
KV_BLOCKS = "kvscaler_kv_blocks"
KV_BLOCKS_CAPACITY = "kvscaler_kv_blocks_capacity"
KV_BLOCKS_RESERVED = "kvscaler_kv_blocks_reserved"
KV_BLOCKS_WAITING = "kvscaler_kv_blocks_waiting"
REQUESTS_RUNNING = "kvscaler_requests_running"
REQUESTS_WAITING = "kvscaler_requests_waiting"
WAITING_TOKENS = "kvscaler_waiting_tokens"
REQUESTS_ARRIVED = "kvscaler_requests_arrived_total"
REQUESTS_ADMITTED = "kvscaler_requests_admitted_total"
REQUESTS_REFUSED = "kvscaler_requests_refused_total"
REQUESTS_FINISHED = "kvscaler_requests_finished_total"
TIME_TO_FIRST_TOKEN = "kvscaler_time_to_first_token_seconds"  # noqa: S105
TIME_PER_OUTPUT_TOKEN = "kvscaler_time_per_output_token_seconds"  # noqa: S105
QUEUE_WAIT = "kvscaler_queue_wait_seconds"

# Families that are no number of the state: facts in labels, ratios and finer latencies.
KV_CACHE_UTILIZATION = "kvscaler_kv_cache_utilization_ratio"
KV_TOKENS = "kvscaler_kv_tokens"
CACHE_CONFIG_INFO = "kvscaler_cache_config_info"
REPLICA_INFO = "kvscaler_replica_info"
EXECUTOR_INFO = "kvscaler_executor_info"
LIMITS_INFO = "kvscaler_limits_info"
MODEL_INFO = "kvscaler_model_info"
DRAIN_PHASE = "kvscaler_drain_phase"
BUDGET_BYTES = "kvscaler_budget_bytes"
INTER_TOKEN_LATENCY = "kvscaler_inter_token_latency_seconds"  # noqa: S105
END_TO_END_LATENCY = "kvscaler_end_to_end_latency_seconds"
PROMPT_LENGTH = "kvscaler_prompt_length_tokens"
OUTPUT_LENGTH = "kvscaler_output_length_tokens"
LIVENESS_AGE = "kvscaler_engine_heartbeat_age_seconds"
GATE_CHARGES = "kvscaler_gate_charges_total"
GATE_BROKEN = "kvscaler_gate_broken_answers_total"
GATE_UNMEASURED = "kvscaler_gate_unmeasured_answers_total"

LENGTH_BUCKETS_TOKENS: tuple[float, ...] = tuple(float(2**k) for k in range(18))
"""Upper bounds of the histograms of prompt and output lengths: powers of two up to 131,072."""

STATE_METRICS: tuple[StateMetric, ...] = (
    _gauge(START_TIME, "started_at", "Unix time at which the process started."),
    _gauge(
        "kvscaler_state_timestamp_seconds",
        "observed_at",
        "Unix time of the look at the engine that all series of this page come from.",
    ),
    _gauge(READY, "ready", "1 when the model is loaded and the replica is not draining."),
    _gauge(
        KV_BLOCKS,
        "occupancy.referenced_blocks",
        "KV blocks by state: referenced by a live request, cached (evictable) or free.",
        state="referenced",
    ),
    _gauge(KV_BLOCKS, "occupancy.cached_blocks", "", state="cached"),
    _gauge(KV_BLOCKS, "occupancy.free_blocks", "", state="free"),
    _gauge(KV_BLOCKS_CAPACITY, "occupancy.capacity_blocks", "KV blocks in the pool."),
    _gauge(
        KV_BLOCKS_RESERVED,
        "occupancy.reserved_blocks",
        "Projected peak of blocks of all admitted requests, what they hold included.",
    ),
    _gauge(
        KV_BLOCKS_WAITING,
        "occupancy.waiting_blocks",
        "Charge in blocks of the requests that wait for admission.",
    ),
    _gauge(REQUESTS_RUNNING, "occupancy.running_requests", "Requests admitted and not finished."),
    _gauge(REQUESTS_WAITING, "occupancy.waiting_requests", "Requests that wait for admission."),
    _gauge(WAITING_TOKENS, "occupancy.waiting_tokens", "Prompt tokens of the waiting requests."),
    _gauge("kvscaler_block_tokens", "capacity.block_tokens", "Tokens in one KV block."),
    _gauge("kvscaler_block_bytes", "capacity.block_bytes", "Bytes of one block over all layers."),
    _gauge("kvscaler_pool_bytes", "capacity.pool_bytes", "Bytes of the allocated KV pool."),
    _gauge(
        "kvscaler_predicted_kv_blocks",
        "capacity.predicted_kv_blocks",
        "KV blocks that the budget had predicted before the pool was allocated.",
    ),
    _gauge(
        "kvscaler_predicted_pool_bytes",
        "capacity.predicted_pool_bytes",
        "Bytes that the budget had predicted for the pool.",
    ),
    _gauge("kvscaler_weight_bytes", "capacity.weight_bytes", "Bytes of the loaded weights."),
    _gauge(
        "kvscaler_predicted_weight_bytes",
        "capacity.predicted_weight_bytes",
        "Bytes that the budget had predicted for the weights.",
    ),
    _gauge(
        "kvscaler_max_sequences",
        "capacity.max_sequences",
        "Requests that the replica was built to run at a time.",
    ),
    _gauge(
        "kvscaler_max_context_tokens",
        "capacity.max_context_tokens",
        "Longest prompt plus output that the replica serves.",
    ),
    _gauge(
        "kvscaler_limit_sequences",
        "limits.applied.max_sequences",
        "Limit in force: requests that run at a time.",
    ),
    _gauge(
        "kvscaler_limit_kv_blocks",
        "limits.applied.kv_blocks",
        "Limit in force: projected peak of KV blocks.",
    ),
    _gauge(
        "kvscaler_limit_step_tokens",
        "limits.applied.step_tokens",
        "Limit in force: tokens computed in one step.",
    ),
    _gauge(
        "kvscaler_limit_queue_requests",
        "limits.applied.queue_requests",
        "Limit in force: requests that wait.",
    ),
    _gauge(
        "kvscaler_limit_queue_tokens",
        "limits.applied.queue_tokens",
        "Limit in force: prompt tokens that wait.",
    ),
    _gauge(
        "kvscaler_limit_queue_bytes",
        "limits.applied.queue_bytes",
        "Limit in force: bytes of memory that waiting requests hold.",
    ),
    _gauge(
        "kvscaler_limit_wait_seconds",
        "limits.applied.max_wait_seconds",
        "Limit in force: time that a request may wait for admission.",
    ),
    _gauge(
        "kvscaler_limit_request_tokens",
        "limits.applied.max_request_tokens",
        "Limit in force: prompt plus output of one request.",
    ),
    _gauge(
        "kvscaler_limit_watermark_blocks",
        "limits.applied.watermark_blocks",
        "Limit in force: blocks kept out of the admission of new requests.",
    ),
    _gauge(
        "kvscaler_limits_pending_kv_blocks",
        "limits.pending_kv_blocks",
        "Blocks in use above a lowered limit; absent once the limit is reached.",
    ),
    _gauge(
        "kvscaler_step_base_seconds",
        "step_costs.base_seconds",
        "Step-time model: constant part of one step.",
    ),
    _gauge(
        "kvscaler_step_sequence_seconds",
        "step_costs.per_sequence_seconds",
        "Step-time model: per decoding sequence.",
    ),
    _gauge(
        "kvscaler_step_context_token_seconds",
        "step_costs.per_context_token_seconds",
        "Step-time model: per token that attention reads.",
    ),
    _gauge(
        "kvscaler_step_prefill_token_seconds",
        "step_costs.per_prefill_token_seconds",
        "Step-time model: per prompt token computed.",
    ),
    _gauge(
        "kvscaler_step_prefill_pair_seconds",
        "step_costs.per_prefill_pair_seconds",
        "Step-time model: per query-key pair of prefill; absent where it is not known.",
    ),
    _gauge("kvscaler_in_flight_requests", "in_flight.requests", "Requests admitted, unfinished."),
    _gauge(
        "kvscaler_in_flight_prompt_tokens",
        "in_flight.prompt_tokens",
        "Prompt tokens of requests in flight.",
    ),
    _gauge(
        "kvscaler_in_flight_generated_tokens",
        "in_flight.generated_tokens",
        "Output tokens so far of requests in flight.",
    ),
    _gauge(
        "kvscaler_in_flight_generated_tokens_squared",
        "in_flight.generated_tokens_squared",
        "Sum of squares of the output tokens so far of requests in flight.",
    ),
    _gauge(
        "kvscaler_drain_live_requests",
        "drain.live_requests",
        "Requests accepted and not yet answered in full.",
    ),
    _counter(
        REQUESTS_ARRIVED,
        "traffic.arrivals",
        "Well-formed requests, refused ones included.",
    ),
    _counter(
        "kvscaler_arrived_prompt_tokens_total",
        "traffic.arrival_prompt_tokens",
        "Sum of prompt tokens over arrivals.",
    ),
    _counter(
        "kvscaler_arrived_prompt_tokens_squared_total",
        "traffic.arrival_prompt_tokens_squared",
        "Sum of squared prompt tokens over arrivals.",
    ),
    _counter(
        "kvscaler_arrived_max_tokens_total",
        "traffic.arrival_max_tokens",
        "Sum of max_tokens over arrivals.",
    ),
    _counter(REQUESTS_ADMITTED, "traffic.admitted", "Requests admitted to the engine."),
    _counter(REQUESTS_REFUSED, "traffic.refused", "Requests refused, by reason.", "reason"),
    _counter(REQUESTS_FINISHED, "traffic.finished", "Requests answered in full."),
    _counter("kvscaler_requests_cancelled_total", "traffic.cancelled", "Clients that left early."),
    _counter("kvscaler_requests_failed_total", "traffic.failed", "Requests that the engine broke."),
    _counter(
        "kvscaler_finished_prompt_tokens_total",
        "traffic.finished_prompt_tokens",
        "Sum of prompt tokens over finished requests.",
    ),
    _counter(
        "kvscaler_finished_prompt_tokens_squared_total",
        "traffic.finished_prompt_tokens_squared",
        "Sum of squared prompt tokens over finished requests.",
    ),
    _counter(
        "kvscaler_finished_output_tokens_total",
        "traffic.finished_output_tokens",
        "Sum of output tokens over finished requests.",
    ),
    _counter(
        "kvscaler_finished_output_tokens_squared_total",
        "traffic.finished_output_tokens_squared",
        "Sum of squared output tokens over finished requests.",
    ),
    _counter(
        "kvscaler_finished_prompt_output_tokens_total",
        "traffic.finished_prompt_output_tokens",
        "Sum of prompt times output tokens over finished requests.",
    ),
    _counter(
        "kvscaler_finished_block_seconds_total",
        "traffic.finished_block_seconds",
        "Sum over finished requests of referenced blocks integrated over their life.",
    ),
    _counter(
        "kvscaler_finished_block_squared_seconds_total",
        "traffic.finished_block_squared_seconds",
        "Sum over finished requests of squared referenced blocks integrated over their life.",
    ),
    _counter("kvscaler_preemptions_total", "traffic.preemptions", "Requests preempted."),
    _counter(
        "kvscaler_prefix_queried_tokens_total",
        "traffic.prefix_queried_tokens",
        "Prompt tokens looked up in the prefix cache.",
    ),
    _counter(
        "kvscaler_prefix_hit_tokens_total",
        "traffic.prefix_hit_tokens",
        "Prompt tokens whose keys and values the prefix cache had.",
    ),
    _counter("kvscaler_steps_total", "traffic.steps", "Steps of the engine."),
    _counter("kvscaler_step_seconds_total", "traffic.step_seconds", "Time spent in steps."),
    _counter("kvscaler_prefill_tokens_total", "traffic.prefill_tokens", "Prompt tokens computed."),
    _counter("kvscaler_decode_tokens_total", "traffic.decode_tokens", "Decode tokens computed."),
    _histogram(
        TIME_TO_FIRST_TOKEN,
        "traffic.time_to_first_token",
        "From a request's arrival to its first output token.",
    ),
    _histogram(
        TIME_PER_OUTPUT_TOKEN,
        "traffic.time_per_output_token",
        "Mean time between output tokens of a finished request, the first excluded.",
    ),
    _histogram(QUEUE_WAIT, "traffic.queue_wait", "From a request's arrival to its admission."),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One series with its value: a number, or a histogram as the state holds it."""

    metric: StateMetric
    labels: Mapping[str, str]
    value: float | Histogram


def read_path(state: ReplicaState, path: str) -> object:
    """The value at a dotted path of the state, `None` when any part of the way is absent."""
    value: object = state
    for name in path.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value


def samples(state: ReplicaState) -> Iterator[Sample]:
    """Every series of the table that this state has a value for, in the table's order."""
    for metric in STATE_METRICS:
        value = read_path(state, metric.path)
        if value is None:
            continue
        if isinstance(value, Histogram):
            yield Sample(metric, metric.labels, value)
        elif metric.key_label is not None:
            assert isinstance(value, dict), metric.path
            for key in sorted(value):
                yield Sample(metric, {**metric.labels, metric.key_label: key}, float(value[key]))
        else:
            assert isinstance(value, (int, float)), metric.path
            yield Sample(metric, metric.labels, float(value))


def cumulative_buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """`(le, cumulative count)` pairs in Prometheus' form, the last one `+Inf`."""
    bounds = [repr(bound) for bound in LATENCY_BUCKETS_SECONDS] + ["+Inf"]
    total = 0
    pairs: list[tuple[str, float]] = []
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        pairs.append((bound, float(total)))
    return pairs


def counts_from_buckets(buckets: Mapping[str, float]) -> tuple[int, ...]:
    """Counts per bucket, the inverse of `cumulative_buckets`, from `le` to cumulative count.

    Raises `ValueError` when a bound is missing: a partial histogram is not a smaller one.
    """
    by_bound = {float(bound): count for bound, count in buckets.items()}
    bounds = [*LATENCY_BUCKETS_SECONDS, float("inf")]
    missing = [bound for bound in bounds if bound not in by_bound]
    if missing:
        raise ValueError(f"histogram lacks the buckets le={missing}")
    counts: list[int] = []
    below = 0.0
    for bound in bounds:
        counts.append(round(by_bound[bound] - below))
        below = by_bound[bound]
    return tuple(counts)
