"""One service, brought one step nearer to what it should be: observe, decide, apply, publish.

Level-based: everything is read anew from caches and signals, and what is remembered between passes
(`ServiceMemory`) can be lost at the price of patience. Each step has its own module; here is only
their order, and what an obstacle at one step means for the ones behind it:

- a spec that can't be acted on, or a budget that does not fit, makes no new child, and leaves what
  runs exactly as it is;
- a pause stops every write but the one that shows it;
- an error is a condition, and another try with backoff.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvscaler.scaling import ReplicaPhase, decide
from kvscaler.traffic import Present
from kvscaler_api.conditions import ConditionType
from kvscaler_api.executor import is_modelled
from kvscaler_api.reasons import EventReason, Reason
from kvscaler_api.scaling import ScalingMode
from kvscaler_api.service import InferenceService

from kvscaler_operator import conditions as verdict
from kvscaler_operator import stored
from kvscaler_operator.assess import Assessment, Finding
from kvscaler_operator.autoscalers import conflicting_autoscaler
from kvscaler_operator.belief import believed
from kvscaler_operator.cache import Key, ObjectCache
from kvscaler_operator.children.intent import Intent
from kvscaler_operator.conditions import Verdict
from kvscaler_operator.decision import Decide, calibrate, decide_fleet, replica_capacity
from kvscaler_operator.errors import Blocked
from kvscaler_operator.fleet import ensure_children, follow_replicas, write_decision
from kvscaler_operator.freshness import path_faults, signals_fresh
from kvscaler_operator.gateways.kube import ConflictError, NotFoundError, UnavailableError
from kvscaler_operator.keys import KeyFileError
from kvscaler_operator.memory import ServiceMemory
from kvscaler_operator.metrics import ServiceMetrics
from kvscaler_operator.observe import observe_fleet
from kvscaler_operator.publish import GONE_SECONDS, Publisher
from kvscaler_operator.report import Report
from kvscaler_operator.resources import INFERENCE_SERVICES, Object, Resource, uid_of
from kvscaler_operator.scale import foreign_scaler
from kvscaler_operator.signals import SignalStore
from kvscaler_operator.writers import Writers

logger = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 15.0
"""Without any event, a service is looked at this often: windows pass, and signals grow old."""
PASSING_ERRORS = (ConflictError, UnavailableError)
PASSING_FAILURES = 3
"""Errors that usually pass are news for a reader only after so many in a row."""


@dataclass(frozen=True, slots=True)
class Options:
    """What holds for all services alike.

    `schema_fault` is set while the installed CRD lacks fields of this version. Names of
    `prometheus_servers` are those that the operator's configuration knows.
    """

    sidecar_image: str
    image_pull_policy: str = "IfNotPresent"
    prometheus_servers: frozenset[str] = frozenset()
    schema_fault: Finding | None = None


class Reconciler:
    """Reconciles services by key. One key is never reconciled twice at once (see `queue`)."""

    def __init__(
        self,
        caches: Mapping[Resource, ObjectCache],
        signals: SignalStore,
        writers: Writers,
        metrics: ServiceMetrics,
        options: Options,
        public_keys: Callable[[], Mapping[str, str]],
        *,
        decide_with: Decide = decide,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._caches = caches
        self._signals = signals
        self._writers = writers
        self._publisher = Publisher(writers, caches[INFERENCE_SERVICES], metrics, clock)
        self._options = options
        self._public_keys = public_keys
        self._decide = decide_with
        self._clock = clock
        self._memories: dict[str, ServiceMemory] = {}
        self._uid_of_key: dict[Key, str] = {}

    async def reconcile(self, key: Key) -> float | None:
        """One pass; returns the seconds after which to look again without any event."""
        obj = self._caches[INFERENCE_SERVICES].get(*key)
        known = self._uid_of_key.get(key)
        if known is not None and (obj is None or uid_of(obj) != known):
            self._forget(key, known)
        if obj is None or obj["metadata"].get("deletionTimestamp"):
            return None
        uid = uid_of(obj)
        self._uid_of_key[key] = uid
        memory = self._memories.setdefault(uid, ServiceMemory())
        report = self._observe(obj, memory)
        if stored.paused(obj):
            await self._publisher.show_pause(report, memory)
            return None
        memory.pause_shown = False
        waits: list[float | None] = []
        failure: Exception | None = None
        try:
            waits.append(await self._advance(report, memory))
        except Blocked as blocked:
            waits.append(blocked.retry_seconds)
            self._blocked(report, memory, blocked)
        except NotFoundError as error:
            # Something vanished between cache and write: its event is on the way.
            logger.info("%s/%s: %s", *key, error)
            waits.append(GONE_SECONDS)
        except Exception as error:
            failure = error
            memory.failures += 1
            if not isinstance(error, PASSING_ERRORS) or memory.failures >= PASSING_FAILURES:
                words = f"{error}; it is tried again with backoff"
                report.say(ConditionType.READY, Verdict(None, Reason.RECONCILE_ERROR, words))
        if failure is None:
            memory.failures = 0
        waits.append(await self._publisher.publish(report, memory))
        if failure is not None:
            raise failure
        return min((w for w in waits if w is not None), default=LOOK_AGAIN_SECONDS)

    def _observe(self, obj: Object, memory: ServiceMemory) -> Report:
        uid = uid_of(obj)
        now = self._clock()
        fleet = observe_fleet(self._caches, uid, self._writers.scales.replicas)
        pods = {r.uid for r in fleet.replicas}
        self._signals.keep(uid, pods)
        states = {pod: self._signals.state(uid, pod, now) for pod in pods}
        memory.learn(fleet.replicas, states.values())
        text = memory.text(obj)
        return Report(obj, fleet, text.status, text.status_wire, states=states)

    async def _advance(self, report: Report, memory: ServiceMemory) -> float | None:
        text = memory.text(report.obj)
        service, fault = text.service, text.fault
        if fault is None and self._options.schema_fault is not None:
            fault = self._options.schema_fault
        if service is None or fault is not None:
            assert fault is not None
            report.say(ConditionType.SPEC_VALID, Verdict(False, fault.reason, fault.message))
            raise Blocked(Reason.SPEC_INVALID, fault.message)
        report.service = service
        words = "the spec can be acted on"
        report.say(ConditionType.SPEC_VALID, Verdict(True, Reason.VALID, words))
        pinned = self._pinned_image(service, report)
        image = service.spec.engine.image or pinned
        assessment = self._assess(service, report, memory)
        if assessment.obstacle is not None or assessment.memory_bytes is None:
            raise Blocked(Reason.BUDGET_DOES_NOT_FIT, verdict.budget_fits(assessment).message)
        report.pinned_image = pinned
        intent = Intent(
            service, image, self._options.image_pull_policy, assessment.memory_bytes, self._keys()
        )
        spec_replicas = self._writers.scales.replicas(report.obj)
        waits: list[float | None] = []
        blocked: Blocked | None = None
        try:
            first = _first_replicas(service, spec_replicas)
            documents = memory.children(intent)
            waits.append(await ensure_children(self._writers, report.obj, documents, first))
        except Blocked as obstacle:
            if report.fleet.deployment is None:
                raise
            # What runs is scaled and limited all the same.
            blocked = obstacle
        waits.append(await self._scale(report, service, memory, spec_replicas))
        waits.append(await self._limit(report))
        if blocked is not None:
            raise blocked
        return min((w for w in waits if w is not None), default=None)

    def _assess(
        self, service: InferenceService, report: Report, memory: ServiceMemory
    ) -> Assessment:
        assessment = memory.assess(service.spec, memory.text(report.obj).facts)
        report.assessment = assessment
        mismatch = verdict.accelerator_mismatch(assessment, report.fleet.replicas, report.states)
        report.say(ConditionType.BUDGET_FITS, mismatch or verdict.budget_fits(assessment))
        return assessment

    async def _scale(
        self,
        report: Report,
        service: InferenceService,
        memory: ServiceMemory,
        spec_replicas: int,
    ) -> float | None:
        spec, now = service.spec, self._clock()
        uid = uid_of(report.obj)
        # Children were just written: look at the Deployment as it is now.
        fleet = observe_fleet(self._caches, uid, self._writers.scales.replicas)
        report.fleet = fleet
        assert report.assessment is not None
        report.states = believed(fleet.deployment, fleet.replicas, report.states, report.assessment)
        serving = [r for r in fleet.replicas if r.phase is ReplicaPhase.READY]
        states = {r.uid: report.states[r.uid] for r in fleet.replicas if r.uid in report.states}
        report.calibration = calibrate(fleet.replicas, states)
        report.capacity = replica_capacity(spec, report.assessment, report.calibration, states, now)
        report.traffic = self._signals.window(uid, {r.uid for r in serving}, now)
        moved = memory.history is not None and memory.history.last_desired != spec_replicas
        mode = spec.scaling.mode
        history = memory.history_for(mode, now, spec_replicas)
        decision = decide_fleet(
            self._decide,
            spec,
            report.capacity,
            report.traffic,
            states,
            fleet,
            fleet.view(spec_replicas, memory.start_seconds),
            history,
            now,
        )
        memory.history = decision.history
        report.decision = decision
        target = spec_replicas
        memory.autoscaler = await conflicting_autoscaler(
            self._writers.kube, report.obj, fleet.deployment, mode, memory.autoscaler, now
        )
        rival = memory.autoscaler.found
        if rival is not None:
            # Its number stands, and nothing is drained towards ours.
            target = fleet.replica_count
        elif mode is ScalingMode.MANAGED and decision.active:
            target = await write_decision(self._writers, report.obj, decision, spec_replicas)
        wait = await follow_replicas(
            self._writers, report, target, spec.scaling.scale_down.drain_timeout_seconds, now
        )
        faults = path_faults(
            self._signals,
            uid,
            spec.signals.prometheus,
            self._options.prometheus_servers,
            serving,
            now,
        )
        report.say(ConditionType.SIGNALS_FRESH, signals_fresh(serving, states, faults))
        report.say(ConditionType.SCALING_ACTIVE, verdict.scaling_active(mode, decision, rival))
        # Whoever wrote what was decided anyway does no harm.
        foreign = memory.foreign_writer(foreign_scaler(report.obj) if moved else None, now)
        report.say(ConditionType.REPLICAS_OWNED, verdict.replicas_owned(mode, foreign, rival))
        least, modelled = spec.scaling.min_replicas, is_modelled(spec)
        said = verdict.ready(fleet, target, least, modelled=modelled)
        report.say(ConditionType.READY, said)
        return wait

    async def _limit(self, report: Report) -> float | None:
        serving = [r for r in report.fleet.replicas if r.phase is ReplicaPhase.READY]
        if isinstance(report.capacity, Present):
            report.limits = await self._writers.limits.step(
                uid_of(report.obj), serving, report.states, report.capacity.value.limits
            )
            for pod in report.limits.changed:
                note = f"{pod} enforces {report.capacity.value.limits.kv_blocks} KV blocks"
                self._writers.events.record(report.obj, EventReason.LIMITS_CHANGED, note)
        outcome = report.limits
        report.say(ConditionType.LIMITS_APPLIED, verdict.limits_applied(serving, outcome))
        return 2.0 if outcome is not None and outcome.pending else None

    def _pinned_image(self, service: InferenceService, report: Report) -> str:
        """What runs unless the spec names another: pinned in status, or in the Deployment if status is
        lost. An image that the spec names is no pin: taken out again, it is gone."""
        pinned = report.before.sidecar_image
        if pinned is None and service.spec.engine.image is None:
            pinned = stored.running_image(report.fleet.deployment)
        return pinned or self._options.sidecar_image

    def _keys(self) -> Mapping[str, str]:
        try:
            return self._public_keys()
        except KeyFileError as error:
            logger.warning("No public keys are published: %s", error)
            return {}

    def _blocked(self, report: Report, memory: ServiceMemory, blocked: Blocked) -> None:
        if blocked.reason is Reason.TEMPLATE_INVALID:
            refused = Verdict(False, blocked.reason, blocked.message)
            report.say(ConditionType.SPEC_VALID, refused)
        status = None if blocked.reason is Reason.PROGRESSING else False
        report.say(ConditionType.READY, Verdict(status, blocked.reason, blocked.message))
        if status is False and memory.told != blocked.message:
            memory.told = blocked.message
            self._writers.events.record(report.obj, blocked.reason, blocked.message, warning=True)

    def _forget(self, key: Key, uid: str) -> None:
        self._uid_of_key.pop(key, None)
        self._memories.pop(uid, None)
        self._signals.forget(uid)
        self._writers.events.forget(uid)
        self._writers.scales.forget(uid)
        self._publisher.forget(key)


def _first_replicas(service: InferenceService, spec_replicas: int) -> int:
    scaling = service.spec.scaling
    if scaling.mode is not ScalingMode.MANAGED:
        return spec_replicas
    return min(max(spec_replicas, scaling.min_replicas), scaling.max_replicas)
