"""Conditions, each from what it is about. Words say object, cause and next step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvscaler.protocol.state import ExecutorType, ReplicaState
from kvscaler.scaling import Constraint, Decision, DecisionReason, ReplicaPhase
from kvscaler.traffic import Present, Signal
from kvscaler_api.conditions import ConditionType
from kvscaler_api.reasons import Reason
from kvscaler_api.scaling import ScalingMode

from kvscaler_operator.assess import Assessment
from kvscaler_operator.limits import LimitsOutcome
from kvscaler_operator.observe import Fleet, Replica

NAMED_PODS = 3
_MODELLED = ExecutorType.MODELLED


@dataclass(frozen=True, slots=True)
class Verdict:
    """Status (`None` is Unknown), reason and words of one condition."""

    status: bool | None
    reason: Reason
    message: str


Verdicts = dict[ConditionType, Verdict]


def budget_fits(assessment: Assessment) -> Verdict:
    """BudgetFits: by how much it fits or does not, and what would."""
    if assessment.obstacle is not None:
        return Verdict(False, assessment.obstacle.reason, assessment.obstacle.message)
    if assessment.budget is None:
        awaiting = assessment.awaiting
        words = awaiting.message if awaiting else "no facts about the model yet"
        return Verdict(None, Reason.AWAITING_MODEL_FACTS, words)
    return Verdict(True, Reason.FITS, assessment.budget.fit.message)


def accelerator_mismatch(
    assessment: Assessment, replicas: Sequence[Replica], states: Mapping[str, Signal[ReplicaState]]
) -> Verdict | None:
    """A replica that runs on another kind of device than the budget was made for."""
    if assessment.accelerator is None:
        return None
    for replica in replicas:
        state = states.get(replica.uid)
        if not isinstance(state, Present) or state.value.executor.type == _MODELLED:
            continue
        device = state.value.executor.device.partition(":")[0]
        if device and device != assessment.accelerator.device:
            return Verdict(
                False,
                Reason.ACCELERATOR_MISMATCH,
                f"{replica.name} runs on {device}, but spec.accelerator is "
                f"{assessment.accelerator.name} ({assessment.accelerator.device}): correct "
                "spec.accelerator or the Pod's resources",
            )
    return None


def scaling_active(mode: ScalingMode, decision: Decision, rival: str | None = None) -> Verdict:
    """ScalingActive: whether the number of replicas is being decided on.

    `rival` is an autoscaler that conflicts with us, in words.
    """
    if rival is not None:
        return _conflict(rival)
    if decision.reason is DecisionReason.HOLD_EXPIRED or not decision.active:
        return Verdict(False, Reason.HOLD_EXPIRED, decision.message)
    if decision.binding_constraint is Constraint.SIGNAL_HOLD:
        return Verdict(False, Reason.HOLDING, decision.message)
    if mode is ScalingMode.ADVISORY:
        words = f"scaling.mode is Advisory: {decision.desired_replicas} replicas are recommended"
        return Verdict(True, Reason.ADVISING, words)
    if mode is ScalingMode.EXTERNAL:
        words = "scaling.mode is External: another autoscaler writes spec.replicas"
        return Verdict(True, Reason.EXTERNALLY_MANAGED, words)
    return Verdict(True, Reason.DECIDING, "replicas follow the decision")


def limits_applied(serving: Sequence[Replica], outcome: LimitsOutcome | None) -> Verdict:
    """LimitsApplied: whether every ready replica enforces the limits."""
    if not serving:
        return Verdict(None, Reason.NO_REPLICAS, "no replica is ready to be limited")
    if outcome is None:
        return Verdict(None, Reason.PENDING, "no limits are known yet: there is no budget")
    if outcome.pending:
        count = f"{len(outcome.pending)} of {len(serving)} ready replicas have other limits"
        return Verdict(False, Reason.PENDING, f"{count}: {outcome.problem or 'being written'}")
    if outcome.clamped:
        return Verdict(False, Reason.CLAMPED, outcome.problem)
    return Verdict(True, Reason.APPLIED, "all ready replicas enforce the limits")


def _conflict(rival: str) -> Verdict:
    words = (
        f"{rival}, which is the operator's to write: nothing is scaled by it until that ends. Let "
        "the autoscaler target the InferenceService and set scaling.mode External, or delete it"
    )
    return Verdict(False, Reason.CONFLICTING_AUTOSCALER, words)


def replicas_owned(
    mode: ScalingMode, conflicting_writer: str | None, rival: str | None = None
) -> Verdict:
    """ReplicasOwned: whether anyone else writes what is ours to write."""
    if rival is not None:
        return _conflict(rival)
    if mode is not ScalingMode.MANAGED:
        words = f"scaling.mode is {mode.value}: spec.replicas is not the operator's to write"
        return Verdict(True, Reason.NOT_OURS, words)
    if conflicting_writer is not None:
        return Verdict(
            False,
            Reason.CONFLICTING_WRITER,
            f"{conflicting_writer} writes spec.replicas too, although scaling.mode is Managed: "
            "stop it, or set scaling.mode External",
        )
    return Verdict(True, Reason.OWNED, "the operator alone writes spec.replicas")


def ready(fleet: Fleet, target: int, minimum: int, *, modelled: bool = False) -> Verdict:
    """Ready: at least the minimum serves. The words tell the rest."""
    counts = f"{fleet.ready} of {target} replicas are ready"
    if modelled:
        counts += " (executor Modelled: no model runs)"
    if target == 0:
        return Verdict(True, Reason.SCALED_TO_ZERO, "no replica is wanted")
    troubled = {
        phase: [r for r in fleet.replicas if r.phase is phase]
        for phase in (ReplicaPhase.CRASH_LOOPING, ReplicaPhase.UNSCHEDULABLE)
    }
    words = "".join(
        f"; {r.name}: {r.complaint}" for rs in troubled.values() for r in rs[:NAMED_PODS]
    )
    if fleet.ready >= max(1, min(minimum, target)):
        return Verdict(True, Reason.REPLICAS_READY, counts + words)
    if troubled[ReplicaPhase.CRASH_LOOPING]:
        return Verdict(False, Reason.REPLICAS_CRASHING, counts + words)
    if troubled[ReplicaPhase.UNSCHEDULABLE]:
        return Verdict(False, Reason.REPLICAS_UNSCHEDULABLE, counts + words)
    if fleet.rollout_in_progress:
        return Verdict(False, Reason.ROLLING_OUT, f"{counts}; a rollout is in progress")
    return Verdict(False, Reason.REPLICAS_NOT_READY, counts)
