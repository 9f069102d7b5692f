"""The gauges of each service: set to the last pass, and gone with what it says nothing of."""

from kvscaler.scaling import ReplicaPhase
from kvscaler_api.conditions import ConditionType
from kvscaler_api.reasons import Reason
from kvscaler_api.status import InferenceServiceStatus
from kvscaler_operator.conditions import Verdict
from kvscaler_operator.metrics import ServiceMetrics
from kvscaler_operator.observe import Fleet, Replica
from kvscaler_operator.report import Report
from prometheus_client import CollectorRegistry

from tests.controller.world import service_object


def report(name: str, *phases: ReplicaPhase, ready: bool | None = True) -> Report:
    replicas = tuple(
        Replica({"metadata": {"name": f"{name}-{i}", "uid": f"{name}-{i}"}}, phase, 0.0, "r")
        for i, phase in enumerate(phases)
    )
    made = Report(
        service_object("ns", name), Fleet(None, 0, replicas), InferenceServiceStatus(), {}
    )
    made.say(ConditionType.READY, Verdict(ready, Reason.REPLICAS_READY, "words"))
    return made


class Gauges:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = ServiceMetrics(self.registry)

    def series(self, name: str) -> set[tuple[str, ...]]:
        return {
            (*sample.labels.values(), f"{sample.value:g}")
            for family in self.registry.collect()
            if family.name == f"kvscaler_service_{name}"
            for sample in family.samples
        }


def test_a_pass_replaces_what_the_last_one_said() -> None:
    gauges = Gauges()
    ready, warming = ReplicaPhase.READY, ReplicaPhase.WARMING
    gauges.metrics.publish(report("a", ready, ready, warming), 3, paused=False)
    gauges.metrics.publish(report("b", ready), 1, paused=True)
    assert gauges.series("replicas") == {
        ("ns", "a", "Ready", "2"), ("ns", "a", "Warming", "1"), ("ns", "b", "Ready", "1"),
    }  # fmt: skip
    gauges.metrics.publish(report("a", ready, ready, ready, ready=None), 4, paused=False)
    assert gauges.series("replicas") == {("ns", "a", "Ready", "3"), ("ns", "b", "Ready", "1")}
    assert ("ns", "a", "Ready", "unknown", "1") in gauges.series("condition")
    assert ("ns", "a", "Ready", "true", "1") not in gauges.series("condition")
    assert gauges.series("spec_replicas") == {("ns", "a", "4"), ("ns", "b", "1")}


def test_a_series_that_was_dropped_comes_back() -> None:
    gauges = Gauges()
    busy, idle = report("a", ReplicaPhase.READY), report("a")
    for made in (busy, idle, busy):
        gauges.metrics.publish(made, 1, paused=False)
    assert gauges.series("replicas") == {("ns", "a", "Ready", "1")}


def test_a_service_that_is_gone_leaves_no_series() -> None:
    gauges = Gauges()
    gauges.metrics.publish(report("a", ReplicaPhase.READY), 1, paused=False)
    gauges.metrics.publish(report("b", ReplicaPhase.READY), 1, paused=False)
    gauges.metrics.forget("ns", "a")
    gauges.metrics.forget("ns", "never-there")
    for name in ("replicas", "condition", "spec_replicas", "paused"):
        assert {labels[1] for labels in gauges.series(name)} == {"b"}
