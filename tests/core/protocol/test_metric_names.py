"""The table of metric names covers the state, follows Prometheus' rules and can be read back."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.protocol.drain import DrainReport
from kvscaler.protocol.metrics import (
    STATE_METRICS,
    MetricKind,
    counts_from_buckets,
    cumulative_buckets,
    samples,
)
from kvscaler.protocol.state import (
    LATENCY_BUCKETS_SECONDS,
    CapacityReport,
    ExecutorReport,
    Histogram,
    InFlight,
    ModelReport,
    OccupancyReport,
    ReplicaState,
    TrafficCounters,
)


def bare_state(**parts: object) -> ReplicaState:
    return ReplicaState.model_validate(
        {
            "service_uid": "s",
            "service_name": "n",
            "pod_uid": "p",
            "pod_name": "pn",
            "started_at": 1.0,
            "observed_at": 2.0,
            "ready": False,
            "executor": ExecutorReport(type="T", device="d", compute_dtype="c", kv_dtype="k"),
            "model": ModelReport(uri="u", served_names=("m",), digest="d"),
            **parts,
        }
    )


def test_every_traffic_counter_and_every_gauge_of_the_parts_has_a_series() -> None:
    paths = {metric.path for metric in STATE_METRICS}
    for part, model in (
        ("traffic", TrafficCounters),
        ("in_flight", InFlight),
        ("occupancy", OccupancyReport),
    ):
        missing = {f"{part}.{name}" for name in model.model_fields} - paths
        assert missing == set()
    assert {"capacity.kv_blocks"} == {  # the same number as occupancy.capacity_blocks
        f"capacity.{name}" for name in CapacityReport.model_fields
    } - paths
    assert "drain.live_requests" in paths
    assert "live_requests" in DrainReport.model_fields


def test_names_follow_the_rules() -> None:
    kinds: dict[str, MetricKind] = {}
    for metric in STATE_METRICS:
        assert re.fullmatch(r"kvscaler_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert kinds.setdefault(metric.name, metric.kind) is metric.kind
    series = [(m.name, tuple(sorted(m.labels.items()))) for m in STATE_METRICS]
    assert len(series) == len(set(series))


def test_unknown_is_absent_not_zero() -> None:
    names = {sample.metric.name for sample in samples(bare_state())}
    assert "kvscaler_kv_blocks" not in names
    assert "kvscaler_limit_kv_blocks" not in names
    assert "kvscaler_step_base_seconds" not in names
    assert "kvscaler_requests_arrived_total" in names


def test_refusals_become_one_series_a_reason() -> None:
    state = bare_state(traffic=TrafficCounters(refused={"QueueFull": 3, "Draining": 1}))
    found = {
        sample.labels["reason"]: sample.value
        for sample in samples(state)
        if sample.metric.name == "kvscaler_requests_refused_total"
    }
    assert found == {"Draining": 1.0, "QueueFull": 3.0}


@given(
    st.lists(
        st.integers(min_value=0, max_value=10**6),
        min_size=len(LATENCY_BUCKETS_SECONDS) + 1,
        max_size=len(LATENCY_BUCKETS_SECONDS) + 1,
    )
)
def test_a_histogram_survives_the_way_through_prometheus(counts: list[int]) -> None:
    buckets = dict(cumulative_buckets(Histogram(counts=tuple(counts))))
    assert counts_from_buckets(buckets) == tuple(counts)


def test_a_partial_histogram_is_refused() -> None:
    buckets = dict(cumulative_buckets(Histogram()))
    del buckets["0.3"]
    with pytest.raises(ValueError, match=r"0\.3"):
        counts_from_buckets(buckets)
