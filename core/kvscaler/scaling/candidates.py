"""All constraints asked in turn: who answers what, who can't answer and why."""

from kvscaler.scaling.capacity import ReplicaCapacity
from kvscaler.scaling.compute import decode_compute
from kvscaler.scaling.decision import Candidate, Constraint, Unknown
from kvscaler.scaling.demand import Demand
from kvscaler.scaling.fleet import FleetView
from kvscaler.scaling.memory import memory
from kvscaler.scaling.queueing import queue
from kvscaler.scaling.spec import ScalingSpec
from kvscaler.traffic.signal import Absent, Signal

_PRECEDENCE = (
    Constraint.MEMORY,
    Constraint.DECODE_COMPUTE,
    Constraint.QUEUE,
    Constraint.MIN_REPLICAS,
)
"""Among equal answers the cause goes before its symptom, and a measurement before a bound."""


def candidates_for(
    spec: ScalingSpec,
    capacity: Signal[ReplicaCapacity],
    look: Demand,
    fleet: FleetView,
    now: float,
) -> tuple[tuple[Candidate, ...], tuple[Unknown, ...]]:
    """Answers of all constraints, the largest first, and the constraints without one."""
    least = spec.min_replicas
    found = [
        Candidate(Constraint.MIN_REPLICAS, least, float(least), f"minReplicas is {least}"),
    ]
    if isinstance(capacity, Absent):
        why = f"capacity is {capacity}"
        return tuple(found), tuple(Unknown(c, why) for c in _PRECEDENCE[:3])
    why = look.why_unknown or "no ready replica has reported its occupancy"
    unknown: list[Unknown] = []
    for constraint, answer in (
        (Constraint.MEMORY, memory(capacity.value, look, fleet, now)),
        (Constraint.DECODE_COMPUTE, decode_compute(spec, capacity.value, look, now)),
        (Constraint.QUEUE, queue(capacity.value, look, fleet, now)),
    ):
        if answer is not None:
            found.append(answer)
        elif constraint is Constraint.DECODE_COMPUTE and not capacity.value.step_times:
            unknown.append(Unknown(constraint, "step times of a replica are not known"))
        else:
            unknown.append(Unknown(constraint, why))
    found.sort(key=lambda c: (-c.replicas, _PRECEDENCE.index(c.constraint)))
    return tuple(found), tuple(unknown)
