"""Counting the operator's writes: from the counters that it really has."""

import pytest
from kvscaler_operator.metrics import MachineryMetrics
from prometheus_client import CollectorRegistry, generate_latest

from hack.demo.writes import NoCountersError, since, writes


def page(*requests: tuple[str, str, int]) -> str:
    registry = CollectorRegistry()
    metrics = MachineryMetrics(registry)
    for verb, resource, code in requests:
        metrics.request(verb, resource, code, 0.01)
    return generate_latest(registry).decode()


def test_writes_count_whatever_their_outcome_and_leases_and_reads_do_not() -> None:
    seen = page(
        ("PATCH", "deployments", 200), ("PATCH", "deployments", 409), ("POST", "events", 201),
        ("PUT", "leases", 200), ("PATCH", "leases", 200), ("GET", "pods", 200),
    )  # fmt: skip
    assert writes(seen) == {"PATCH deployments": 2.0, "POST events": 1.0}


def test_a_page_without_the_counters_is_no_zero() -> None:
    with pytest.raises(NoCountersError, match="rest_client_requests_total"):
        writes(page())


def test_what_came_since_an_earlier_look() -> None:
    before = {"PATCH deployments": 2.0}
    assert since(before, {"PATCH deployments": 2.0, "POST events": 1.0}) == {"POST events": 1.0}
