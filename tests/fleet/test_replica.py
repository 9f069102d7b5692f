"""Replicas that only pretend report as real ones do, by both paths."""

import pytest
from kvscaler.protocol.limits import LimitsReport
from kvscaler.protocol.metrics import cumulative_buckets, samples
from kvscaler.protocol.state import Histogram, ReplicaState
from prometheus_client.parser import text_string_to_metric_families

from hack.fleet.replica import (
    CAPACITY_BLOCKS,
    OWN_LIMITS,
    REQUEST_BLOCKS,
    SEQUENCES,
    FakeReplica,
    page,
)


def replica_after(seconds: float, per_second: float) -> FakeReplica:
    made = FakeReplica("service", "chat", "pod", "chat-0", 1000.0)
    for second in range(1, int(seconds) + 1):
        made.advance(1000.0 + second, per_second)
    return made


def state_of(replica: FakeReplica, now: float) -> ReplicaState:
    return ReplicaState.model_validate(replica.state(now))


def test_under_capacity_every_request_runs_at_once() -> None:
    state = state_of(replica_after(200, 2.0), 1200.0)
    assert state.occupancy is not None
    assert state.occupancy.waiting_requests == 0
    assert state.traffic.arrivals == state.traffic.admitted
    assert state.traffic.arrivals == pytest.approx(400, rel=0.2)
    assert state.traffic.finished + state.occupancy.running_requests == state.traffic.admitted
    assert sum(state.traffic.time_to_first_token.counts) == state.traffic.admitted


def test_over_capacity_the_pool_is_full_and_requests_wait() -> None:
    state = state_of(replica_after(60, 40.0), 1060.0)
    assert state.occupancy is not None
    assert state.occupancy.running_requests == SEQUENCES
    assert state.occupancy.referenced_blocks == SEQUENCES * REQUEST_BLOCKS
    assert state.occupancy.waiting_blocks > 0
    assert state.traffic.refused["QueueFull"] > 0
    assert state.occupancy.capacity_blocks == CAPACITY_BLOCKS


def test_limits_that_are_put_are_reported() -> None:
    replica = replica_after(1, 1.0)
    tighter = OWN_LIMITS.model_copy(update={"kv_blocks": 100})
    replica.take_limits(tighter)
    report = LimitsReport.model_validate(replica.limits)
    assert report.hash == report.requested_hash == tighter.content_hash
    assert report.own_hash == OWN_LIMITS.content_hash
    assert report.applied == tighter


def test_the_page_says_what_the_state_says() -> None:
    replica = replica_after(100, 30.0)
    state = replica.state(1100.0)
    series = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page(state))
        for sample in family.samples
    }
    for sample in samples(ReplicaState.model_validate(state)):
        name, labels = sample.metric.name, tuple(sorted(sample.labels.items()))
        if isinstance(sample.value, Histogram):
            for bound, count in cumulative_buckets(sample.value):
                key = (f"{name}_bucket", (("le", bound),))
                assert series[key] == count
            assert series[f"{name}_sum", ()] == pytest.approx(sample.value.sum_seconds)
        else:
            assert series[name, labels] == pytest.approx(sample.value), name
