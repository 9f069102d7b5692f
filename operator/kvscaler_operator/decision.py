"""From what was observed to the brain's arguments, and back: no formula is made here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvscaler.performance.step_time import StepTimeModel
from kvscaler.protocol.state import OccupancyReport, ReplicaState
from kvscaler.scaling import (
    Decision,
    FleetView,
    History,
    ReplicaCapacity,
    ReplicaPhase,
    ScalingSpec,
)
from kvscaler.scaling.capacity import replica_capacity as brain_capacity
from kvscaler.traffic import AbsenceReason, Absent, Present, Signal, TrafficWindow, map_signal
from kvscaler_api.service import InferenceServiceSpec

from kvscaler_operator.assess import Assessment, admission_policy
from kvscaler_operator.observe import Fleet, Replica

States = Mapping[str, Signal[ReplicaState]]
"""By Pod UID."""
Decide = Callable[
    [
        ScalingSpec,
        Signal[ReplicaCapacity],
        Signal[TrafficWindow],
        Mapping[str, Signal[OccupancyReport]],
        FleetView,
        History,
        float,
    ],
    Decision,
]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What running replicas say about their size, against what was predicted."""

    observed_blocks: int | None = None
    """The least that a replica reports."""
    predicted_blocks: int | None = None
    """What that replica's own budget had predicted before it allocated."""


def scaling_spec(spec: InferenceServiceSpec) -> ScalingSpec:
    """Bounds, behaviour and objectives in the brain's terms."""
    return ScalingSpec(
        min_replicas=max(1, spec.scaling.min_replicas),
        max_replicas=spec.scaling.max_replicas,
        stabilization_seconds=spec.scaling.scale_down.stabilization_window_seconds,
        hold_seconds=spec.scaling.on_missing_signals.for_seconds,
        time_per_output_token_seconds=spec.objectives.time_per_output_token_seconds,
        time_to_first_token_seconds=spec.objectives.time_to_first_token_seconds,
    )


def calibrate(replicas: Sequence[Replica], states: States) -> Calibration:
    """The smallest replica's blocks: a fleet is as strong as the one that holds least."""
    capacities = [
        state.value.capacity
        for replica in replicas
        if replica.phase in (ReplicaPhase.READY, ReplicaPhase.WARMING)
        and isinstance(state := states.get(replica.uid), Present)
        and state.value.capacity is not None
        and state.value.capacity.kv_blocks > 0
    ]
    if not capacities:
        return Calibration()
    smallest = min(capacities, key=lambda capacity: capacity.kv_blocks)
    return Calibration(smallest.kv_blocks, smallest.predicted_kv_blocks)


def replica_capacity(
    spec: InferenceServiceSpec,
    assessment: Assessment,
    calibration: Calibration,
    states: States,
    now: float,
) -> Signal[ReplicaCapacity]:
    """What one replica holds and computes: predicted by the budget, corrected by reports."""
    budget = assessment.budget
    if budget is None:
        words = assessment.awaiting.message if assessment.awaiting else "no budget"
        return Absent(AbsenceReason.MISSING, "budget", words)
    observed = calibration.observed_blocks
    try:
        capacity = brain_capacity(
            budget,
            admission_policy(spec),
            () if observed is None else (observed,),
            _step_times(states),
        )
    except ValueError as error:
        return Absent(AbsenceReason.MISSING, "budget", str(error))
    source = "budget" if calibration.observed_blocks is None else "replicas"
    return Present(capacity, source, now)


def occupancies(replicas: Sequence[Replica], states: States) -> dict[str, Signal[OccupancyReport]]:
    """Occupancy of each Pod that may serve, by UID."""
    result: dict[str, Signal[OccupancyReport]] = {}
    for replica in replicas:
        signal = states.get(replica.uid, Absent(AbsenceReason.MISSING, "replicas", "no answer yet"))
        if isinstance(signal, Present) and signal.value.occupancy is None:
            words = f"{replica.name} has no block pool yet"
            signal = Absent(AbsenceReason.PARTIAL, signal.source, words, signal.time)
        result[replica.uid] = map_signal(signal, _occupancy)
    return result


def decide_fleet(
    decide: Decide,
    spec: InferenceServiceSpec,
    capacity: Signal[ReplicaCapacity],
    traffic: Signal[TrafficWindow],
    states: States,
    fleet: Fleet,
    view: FleetView,
    history: History,
    now: float,
) -> Decision:
    """The brain's answer for this service now."""
    occupancy = occupancies(fleet.replicas, states)
    return decide(scaling_spec(spec), capacity, traffic, occupancy, view, history, now)


def _occupancy(state: ReplicaState) -> OccupancyReport:
    assert state.occupancy is not None
    return state.occupancy


def _step_times(states: States) -> tuple[StepTimeModel, ...]:
    """What each replica measured, in one order."""
    return tuple(
        StepTimeModel.from_costs(state.value.step_costs)
        for _, state in sorted(states.items())
        if isinstance(state, Present) and state.value.step_costs is not None
    )
