"""What one pass found out about a service, and the status that says it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kvscaler.protocol.state import ReplicaState
from kvscaler.scaling import Decision, ReplicaCapacity, ReplicaPhase
from kvscaler.traffic import Present, Signal, TrafficWindow
from kvscaler_api.conditions import ConditionType
from kvscaler_api.service import InferenceService
from kvscaler_api.status import InferenceServiceStatus

from kvscaler_operator import status as parts
from kvscaler_operator.assess import Assessment
from kvscaler_operator.children.intent import selector
from kvscaler_operator.conditions import Verdict, Verdicts
from kvscaler_operator.decision import Calibration
from kvscaler_operator.limits import LimitsOutcome
from kvscaler_operator.observe import Fleet
from kvscaler_operator.resources import Object, uid_of


@dataclass(slots=True)
class Report:
    """Filled step by step; what stays `None` keeps what status said before."""

    obj: Object
    fleet: Fleet
    before: InferenceServiceStatus
    before_wire: Object
    """The same as it is stored."""
    verdicts: Verdicts = field(default_factory=dict)
    service: InferenceService | None = None
    pinned_image: str | None = None
    assessment: Assessment | None = None
    calibration: Calibration = field(default_factory=Calibration)
    states: Mapping[str, Signal[ReplicaState]] = field(default_factory=dict)
    traffic: Signal[TrafficWindow] | None = None
    capacity: Signal[ReplicaCapacity] | None = None
    decision: Decision | None = None
    limits: LimitsOutcome | None = None

    def say(self, kind: ConditionType, verdict: Verdict) -> None:
        """Set one condition; the last word of a pass counts."""
        self.verdicts[kind] = verdict

    @property
    def quiet(self) -> bool:
        """Whether no traffic arrives: seen, and none there."""
        if not isinstance(self.traffic, Present):
            return True
        window = self.traffic.value
        return window.arrivals_level.count == 0 and not any(
            s.value.occupancy.running_requests or s.value.occupancy.waiting_requests
            for s in self.states.values()
            if isinstance(s, Present) and s.value.occupancy is not None
        )

    def status(self, now: datetime) -> InferenceServiceStatus:
        """The whole status; parts that this pass did not come to stay as they were."""
        metadata = self.obj["metadata"]
        generation = int(metadata.get("generation") or 0)
        labels = selector(uid_of(self.obj))
        changes: dict[str, object] = {
            "observed_generation": generation,
            "selector": ",".join(f"{key}={value}" for key, value in labels.items()),
            "replicas": self.fleet.existing,
            "ready_replicas": self.fleet.ready,
            "conditions": parts.condition_list(
                self.before.conditions, self.verdicts, generation, now
            ),
        }
        if self.pinned_image is not None:
            changes["sidecar_image"] = self.pinned_image
        executor = parts.executor_status(self.states.values())
        if executor is not None:
            changes["executor"] = executor
        if self.assessment is not None:
            model = parts.model_status(self.assessment)
            changes["model"] = model or self.before.model
            changes["budget"] = None
            if self.assessment.budget is not None:
                changes["budget"] = parts.budget_status(
                    self.assessment.budget, self.calibration, self.states
                )
        if self.decision is not None:
            changes["desired_replicas"] = self.decision.desired_replicas
            changes["decision"] = parts.decision_status(self.decision, self.before.decision)
        if isinstance(self.capacity, Present) and self.service is not None:
            changes["limits"] = parts.limits_status(
                self.capacity.value, self.service.spec.cache.block_tokens, self.limits
            )
        if self.service is not None and self.decision is not None:
            changes.update(self._figures(self.service))
        return self.before.model_copy(update=changes)

    def _figures(self, service: InferenceService) -> dict[str, object]:
        serving = [
            self.states[r.uid]
            for r in self.fleet.replicas
            if r.phase is ReplicaPhase.READY and r.uid in self.states
        ]
        figures: dict[str, object] = {
            "occupancy": parts.occupancy_status(serving) or self.before.occupancy
        }
        if self.traffic is not None:
            traffic = parts.traffic_status(self.traffic, service.spec.objectives)
            figures["traffic"] = traffic or self.before.traffic
        return figures
