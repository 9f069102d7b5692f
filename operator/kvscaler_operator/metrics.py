"""What the operator exports about itself and its decisions.

Names of the machinery are those of controller-runtime, so that existing dashboards and people
recognise them; `kvscaler_service_*` are the decisions. A gauge of what is unknown is absent.
"""

from collections import Counter as Counts
from collections.abc import Iterator

from kvscaler.scaling import Constraint
from kvscaler.traffic import Present
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvscaler_operator.report import Report
from kvscaler_operator.resources import name_of, namespace_of

CONTROLLER = "inferenceservice"
DURATION_BUCKETS_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
LAG_BUCKETS_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    10.0,
)
SERVICE = ("namespace", "name")


Value = tuple[Gauge, tuple[str, ...], float]
"""A gauge, its labels besides those of the service, and what it is set to."""
Values = dict[tuple[Gauge, tuple[str, ...]], float]


class MachineryMetrics:
    """Queue, reconciles, API requests and signal passes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reconciles = Counter(
            "controller_runtime_reconcile",
            "Reconciles by result.",
            ("controller", "result"),
            registry=registry,
        )
        self._errors = Counter(
            "controller_runtime_reconcile_errors",
            "Reconciles that raised an error.",
            ("controller",),
            registry=registry,
        )
        self._seconds = Histogram(
            "controller_runtime_reconcile_time_seconds",
            "Duration of a reconcile.",
            ("controller",),
            buckets=DURATION_BUCKETS_SECONDS,
            registry=registry,
        )
        self.active = Gauge(
            "controller_runtime_active_workers",
            "Reconciles that run now.",
            ("controller",),
            registry=registry,
        ).labels(CONTROLLER)
        name = ("name",)
        self._depth = Gauge("workqueue_depth", "Keys waiting.", name, registry=registry)
        self._adds = Counter("workqueue_adds", "Keys that became dirty.", name, registry=registry)
        self._retries = Counter("workqueue_retries", "Keys put back.", name, registry=registry)
        self._waited = Histogram(
            "workqueue_queue_duration_seconds",
            "Time that a key waited for a worker.",
            name,
            buckets=DURATION_BUCKETS_SECONDS,
            registry=registry,
        )
        self._requests = Counter(
            "rest_client_requests",
            "Requests to the API server; code 0 is no answer.",
            ("method", "resource", "code"),
            registry=registry,
        )
        self._request_seconds = Histogram(
            "rest_client_request_duration_seconds",
            "Duration of requests to the API server.",
            ("method",),
            buckets=DURATION_BUCKETS_SECONDS,
            registry=registry,
        )
        self._passes = Counter(
            "kvscaler_signal_passes",
            "Passes over a signal path by outcome.",
            ("path", "outcome"),
            registry=registry,
        )
        self._answers = Counter(
            "kvscaler_replica_answers",
            "Answers of replicas by path and outcome.",
            ("path", "outcome"),
            registry=registry,
        )
        self._pass_seconds = Histogram(
            "kvscaler_signal_pass_duration_seconds",
            "Duration of a pass over a signal path.",
            ("path",),
            buckets=DURATION_BUCKETS_SECONDS,
            registry=registry,
        )
        self._relist_seconds = Histogram(
            "kvscaler_relist_duration_seconds",
            "Duration of a list of every kind and its comparison with what watches told.",
            buckets=DURATION_BUCKETS_SECONDS,
            registry=registry,
        )
        self._lag = Histogram(
            "kvscaler_event_loop_lag_seconds",
            "How late the event loop woke a task that was due.",
            buckets=LAG_BUCKETS_SECONDS,
            registry=registry,
        )
        self._busy = Histogram(
            "kvscaler_event_loop_busy_seconds",
            "The part of that lag in which the loop itself was on a processor.",
            buckets=LAG_BUCKETS_SECONDS,
            registry=registry,
        )
        for counter in ("success", "error", "requeue_after"):
            self._reconciles.labels(CONTROLLER, counter)

    def reconciled(self, result: str, seconds: float) -> None:
        """One reconcile has ended: `success`, `requeue_after` or `error`."""
        self._reconciles.labels(CONTROLLER, result).inc()
        self._seconds.labels(CONTROLLER).observe(seconds)
        if result == "error":
            self._errors.labels(CONTROLLER).inc()

    def depth(self, keys: int) -> None:
        """Keys that wait for a worker."""
        self._depth.labels(CONTROLLER).set(keys)

    def added(self) -> None:
        """A key became dirty."""
        self._adds.labels(CONTROLLER).inc()

    def retried(self) -> None:
        """A key was put back because its reconcile failed."""
        self._retries.labels(CONTROLLER).inc()

    def waited(self, seconds: float) -> None:
        """A key was handed out after waiting for so long."""
        self._waited.labels(CONTROLLER).observe(seconds)

    def request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """One request to the API server has ended."""
        self._requests.labels(verb, resource, str(code)).inc()
        self._request_seconds.labels(verb).observe(seconds)

    def signal_pass(self, path: str, seconds: float, *, failed: bool) -> None:
        """One pass over a signal path has ended."""
        self._passes.labels(path, "failed" if failed else "ok").inc()
        self._pass_seconds.labels(path).observe(seconds)

    def relisted(self, seconds: float) -> None:
        """One list of every kind has been compared."""
        self._relist_seconds.observe(seconds)

    def lagged(self, seconds: float, busy_seconds: float) -> None:
        """The event loop woke its heartbeat so late, by its own work for so long."""
        self._lag.observe(seconds)
        self._busy.observe(busy_seconds)

    def answer(self, path: str, outcome: str) -> None:
        """One replica answered on a path, or did not."""
        self._answers.labels(path, outcome).inc()


class ServiceMetrics:
    """Each service's decision and what it rests on."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kvscaler_service_{name}", text, (*SERVICE, *labels), registry=registry)

        self._desired = gauge("desired_replicas", "Replicas that the last decision wants.")
        self._spec = gauge("spec_replicas", "spec.replicas as it is.")
        self._replicas = gauge("replicas", "Serving Pods by phase.", "phase")
        self._candidate = gauge(
            "constraint_replicas", "Replicas that one constraint alone asks for.", "constraint"
        )
        self._binding = gauge("binding_constraint", "1 for the binding constraint.", "constraint")
        self._condition = gauge(
            "condition", "1 for the status that a condition has.", "type", "status"
        )
        self._blocks = gauge("kv_blocks", "KV blocks over all replicas, by use.", "use")
        self._capacity = gauge("replica_kv_blocks", "KV blocks of one replica, calibrated.")
        self._deviation = gauge(
            "predicted_kv_blocks_error_ratio", "Observed over predicted blocks, less 1."
        )
        self._arrivals = gauge("arrivals_per_second", "Requests offered, refused ones included.")
        self._paused = gauge("paused", "1 while the pause annotation stops all writes.")
        self._published: dict[tuple[str, str], Values] = {}

    def publish(self, report: Report, spec_replicas: int, *, paused: bool) -> None:
        """Set the gauges of one service from a pass, and drop those that it says nothing of."""
        service = (namespace_of(report.obj), name_of(report.obj))
        values = {
            (gauge, labels): value
            for gauge, labels, value in self._values(report, spec_replicas, paused)
        }
        before = self._published.get(service, {})
        for (gauge, labels), value in values.items():
            if before.get((gauge, labels)) != value:
                gauge.labels(*service, *labels).set(value)
        for gauge, labels in before.keys() - values.keys():
            gauge.remove(*service, *labels)
        self._published[service] = values

    def forget(self, namespace: str, name: str) -> None:
        """Drop every series of a service."""
        for gauge, labels in self._published.pop((namespace, name), {}):
            gauge.remove(namespace, name, *labels)

    def _values(self, report: Report, spec_replicas: int, paused: bool) -> Iterator[Value]:
        yield self._spec, (), float(spec_replicas)
        yield self._paused, (), float(paused)
        phases = Counts(replica.phase.value for replica in report.fleet.replicas)
        for phase, count in phases.items():
            yield self._replicas, (phase,), float(count)
        for kind, verdict in report.verdicts.items():
            status = "unknown" if verdict.status is None else str(verdict.status).lower()
            yield self._condition, (kind.value, status), 1.0
        decision = report.decision
        if decision is not None:
            yield self._desired, (), float(decision.desired_replicas)
            for candidate in decision.candidates:
                yield self._candidate, (candidate.constraint.value,), float(candidate.replicas)
            for constraint in Constraint:
                binding = constraint is decision.binding_constraint
                yield self._binding, (constraint.value,), float(binding)
        if isinstance(report.capacity, Present):
            yield self._capacity, (), float(report.capacity.value.kv_blocks)
        observed = report.calibration.observed_blocks
        budget = report.assessment.budget if report.assessment else None
        if observed is not None and budget is not None and budget.blocks:
            yield self._deviation, (), observed / budget.blocks - 1
        if isinstance(report.traffic, Present):
            yield self._arrivals, (), report.traffic.value.arrivals_level.per_second
        yield from self._block_values(report)

    def _block_values(self, report: Report) -> Iterator[Value]:
        pools = [
            s.value.occupancy
            for s in report.states.values()
            if isinstance(s, Present) and s.value.occupancy is not None
        ]
        if pools:
            yield self._blocks, ("capacity",), float(sum(p.capacity_blocks for p in pools))
            yield self._blocks, ("referenced",), float(sum(p.referenced_blocks for p in pools))
            yield self._blocks, ("reserved",), float(sum(p.reserved_blocks for p in pools))
            yield self._blocks, ("cached",), float(sum(p.cached_blocks for p in pools))
