"""One pretended replica: the state of an engine whose requests arrive at random and take their time.

Only what a replica *reports* is made here, so that a thousand of them cost little. Requests arrive
as a Poisson stream, hold their blocks for a fixed time and wait while the pool is full, so that
occupancy, queue, counters and latencies belong together, and the operator decides as on real ones.
"""

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvscaler.protocol.limits import AdmissionLimits, LimitsReport
from kvscaler.protocol.metrics import STATE_METRICS, MetricKind, cumulative_buckets
from kvscaler.protocol.state import LATENCY_BUCKETS_SECONDS, Histogram

CAPACITY_BLOCKS = 200
BLOCK_TOKENS = 16
BLOCK_BYTES = 737_280
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 60
REQUEST_BLOCKS = 10
RESIDENCE_SECONDS = 5.0
SEQUENCES = CAPACITY_BLOCKS // REQUEST_BLOCKS
MOST_WAITING = 64
FIRST_TOKEN_SECONDS = 0.25

OWN_LIMITS = AdmissionLimits(
    max_sequences=64,
    kv_blocks=CAPACITY_BLOCKS,
    step_tokens=512,
    queue_requests=MOST_WAITING,
    queue_tokens=100_000,
    queue_bytes=10_000_000,
    max_wait_seconds=30.0,
    max_request_tokens=2048,
    watermark_blocks=1,
)


@dataclass(slots=True)
class Latency:
    """One histogram of the state."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_SECONDS) + 1))
    sum_seconds: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        index = sum(1 for bound in LATENCY_BUCKETS_SECONDS if bound < seconds)
        self.counts[index] += 1
        self.sum_seconds += seconds

    def to_json(self) -> dict[str, Any]:
        """As the state has it."""
        return {"counts": self.counts, "sum_seconds": self.sum_seconds}


class FakeReplica:
    """The engine of one Pod; `look` moves it to a time and gives the body of `/state`."""

    def __init__(
        self, service_uid: str, service_name: str, pod_uid: str, pod_name: str, now: float
    ) -> None:
        self.service_uid, self.service_name = service_uid, service_name
        self.pod_uid, self.pod_name = pod_uid, pod_name
        self.started_at = now
        self._random = random.Random(pod_uid)
        self._now = now
        self._ends: deque[float] = deque()
        self._waiting: deque[float] = deque()
        self._arrivals = self._admitted = self._refused = self._finished = 0
        self._first, self._token, self._wait = Latency(), Latency(), Latency()
        limits = OWN_LIMITS.content_hash
        self.limits = LimitsReport(hash=limits, applied=OWN_LIMITS, own_hash=limits).model_dump(
            mode="json"
        )
        self.drain: dict[str, Any] = {"phase": "Serving", "live_requests": 0}

    def take_limits(self, limits: AdmissionLimits) -> None:
        """Enforce what was put, as far as a report goes."""
        digest = limits.content_hash
        self.limits |= {
            "hash": digest,
            "requested_hash": digest,
            "applied": limits.model_dump(mode="json"),
        }

    def advance(self, now: float, per_second: float) -> None:
        """Let requests end, start and arrive up to `now`."""
        self._end_until(now)
        for _ in range(_poisson(self._random, per_second * max(0.0, now - self._now))):
            self._arrivals += 1
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(now)
            else:
                self._refused += 1
        self._start_waiting(now)
        self._now = max(now, self._now)

    def _end_until(self, now: float) -> None:
        while self._ends and self._ends[0] <= now:
            at = self._ends.popleft()
            self._finished += 1
            self._token.observe(RESIDENCE_SECONDS / OUTPUT_TOKENS)
            self._start_waiting(at)

    def _start_waiting(self, now: float) -> None:
        while self._waiting and len(self._ends) < SEQUENCES:
            waited = max(0.0, now - self._waiting.popleft())
            self._admitted += 1
            self._ends.append(now + RESIDENCE_SECONDS)
            self._wait.observe(waited)
            self._first.observe(waited + FIRST_TOKEN_SECONDS)

    def state(self, now: float) -> dict[str, Any]:
        """The body of `/state`."""
        running, waiting = len(self._ends), len(self._waiting)
        used = running * REQUEST_BLOCKS
        blocks = float(REQUEST_BLOCKS)
        decode = self._admitted * OUTPUT_TOKENS
        return {
            "version": 1,
            "service_uid": self.service_uid,
            "service_name": self.service_name,
            "pod_uid": self.pod_uid,
            "pod_name": self.pod_name,
            "started_at": self.started_at,
            "observed_at": now,
            "ready": True,
            "executor": _EXECUTOR,
            "model": _MODEL,
            "capacity": _CAPACITY,
            "occupancy": {
                "capacity_blocks": CAPACITY_BLOCKS,
                "referenced_blocks": used,
                "reserved_blocks": used,
                "cached_blocks": 0,
                "free_blocks": CAPACITY_BLOCKS - used,
                "running_requests": running,
                "waiting_requests": waiting,
                "waiting_tokens": waiting * PROMPT_TOKENS,
                "waiting_blocks": waiting * REQUEST_BLOCKS,
            },
            "limits": self.limits,
            "step_costs": _STEP_COSTS,
            "traffic": {
                "arrivals": self._arrivals,
                "arrival_prompt_tokens": self._arrivals * PROMPT_TOKENS,
                "arrival_prompt_tokens_squared": self._arrivals * PROMPT_TOKENS**2,
                "arrival_max_tokens": self._arrivals * OUTPUT_TOKENS,
                "admitted": self._admitted,
                "refused": {"QueueFull": self._refused} if self._refused else {},
                "finished": self._finished,
                "cancelled": 0,
                "failed": 0,
                "finished_prompt_tokens": self._finished * PROMPT_TOKENS,
                "finished_prompt_tokens_squared": self._finished * PROMPT_TOKENS**2,
                "finished_output_tokens": self._finished * OUTPUT_TOKENS,
                "finished_output_tokens_squared": self._finished * OUTPUT_TOKENS**2,
                "finished_prompt_output_tokens": self._finished * PROMPT_TOKENS * OUTPUT_TOKENS,
                "finished_block_seconds": self._finished * blocks * RESIDENCE_SECONDS,
                "finished_block_squared_seconds": self._finished * blocks**2 * RESIDENCE_SECONDS,
                "preemptions": 0,
                "prefix_queried_tokens": 0,
                "prefix_hit_tokens": 0,
                "steps": decode,
                "step_seconds": decode * 0.01,
                "prefill_tokens": self._admitted * PROMPT_TOKENS,
                "decode_tokens": decode,
                "time_to_first_token": self._first.to_json(),
                "time_per_output_token": self._token.to_json(),
                "queue_wait": self._wait.to_json(),
            },
            "in_flight": {
                "requests": running,
                "prompt_tokens": running * PROMPT_TOKENS,
                "generated_tokens": running * OUTPUT_TOKENS // 2,
                "generated_tokens_squared": running * OUTPUT_TOKENS**2 / 3,
            },
            "drain": self.drain,
        }


_EXECUTOR = {
    "type": "Modelled",
    "device": "cpu",
    "compute_dtype": "float32",
    "kv_dtype": "float32",
    "reason": "it only pretends",
}
_MODEL = {"uri": "builtin://smollm2-135m", "served_names": ["chat"], "digest": "pretended"}
_CAPACITY = {
    "kv_blocks": CAPACITY_BLOCKS,
    "block_tokens": BLOCK_TOKENS,
    "block_bytes": BLOCK_BYTES,
    "pool_bytes": CAPACITY_BLOCKS * BLOCK_BYTES,
    "predicted_kv_blocks": CAPACITY_BLOCKS,
    "predicted_pool_bytes": CAPACITY_BLOCKS * BLOCK_BYTES,
    "weight_bytes": 538_060_032,
    "predicted_weight_bytes": 538_060_032,
    "max_sequences": 64,
    "max_context_tokens": 2048,
}
_STEP_COSTS = {
    "base_seconds": 0.01,
    "per_sequence_seconds": 0.001,
    "per_context_token_seconds": 1e-6,
    "per_prefill_token_seconds": 1e-4,
}


def page(state: dict[str, Any]) -> str:
    """The body of `/metrics` for a state: the series that the operator's queries read."""
    lines = list(_plain(state))
    limits = state["limits"]
    info = {
        "hash": limits["hash"],
        "own_hash": limits["own_hash"],
        "requested_hash": limits.get("requested_hash") or "",
        "charge": limits["applied"]["charge"],
        "mode": limits["applied"]["mode"],
    }
    lines.append(f"kvscaler_limits_info{_labels(info)} 1")
    lines.append(_EXECUTOR_LINE)
    lines.append(_MODEL_LINE)
    lines.append(f'kvscaler_drain_phase{{phase="{state["drain"]["phase"]}"}} 1')
    return "\n".join(lines) + "\n"


def _plain(state: dict[str, Any]) -> Iterator[str]:
    for metric in STATE_METRICS:
        value: Any = state
        for name in metric.path.split("."):
            value = value.get(name) if value is not None else None
        if value is None:
            continue
        if metric.kind is MetricKind.HISTOGRAM:
            histogram = Histogram.model_construct(None, **value)
            for bound, count in cumulative_buckets(histogram):
                yield f'{metric.name}_bucket{{le="{bound}"}} {count:g}'
            yield f"{metric.name}_sum {value['sum_seconds']!r}"
            yield f"{metric.name}_count {sum(value['counts'])}"
        elif metric.key_label is not None:
            for key, count in value.items():
                yield f'{metric.name}{{{metric.key_label}="{key}"}} {count}'
        else:
            yield f"{metric.name}{_labels(metric.labels)} {float(value)!r}"


def _labels(labels: Any) -> str:
    inner = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""


_EXECUTOR_LINE = "kvscaler_executor_info" + _labels(
    {k: v for k, v in _EXECUTOR.items() if k != "reason"} | {"time_scale": "1.0"}
) + " 1"  # fmt: skip
_MODEL_LINE = (
    f'kvscaler_model_info{{uri="{_MODEL["uri"]}",digest="pretended",served_names="chat"}} 1'
)


def _poisson(source: random.Random, mean: float) -> int:
    """A Poisson number (Knuth's method; the normal limit for large means)."""
    if mean > 50.0:
        return max(0, round(source.gauss(mean, math.sqrt(mean))))
    limit, count, product = math.exp(-mean), 0, source.random()
    while product > limit:
        count += 1
        product *= source.random()
    return count
