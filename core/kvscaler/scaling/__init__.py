"""From signals to a Decision: replicas, limits and the reasons for both."""

from kvscaler.scaling.capacity import ReplicaCapacity, replica_capacity
from kvscaler.scaling.decide import decide
from kvscaler.scaling.decision import (
    Candidate,
    Constraint,
    Decision,
    DecisionReason,
    Input,
    Unknown,
)
from kvscaler.scaling.fleet import DEFAULT_START_SECONDS, FleetView, ReplicaPhase, ReplicaView
from kvscaler.scaling.history import History
from kvscaler.scaling.spec import ScalingSpec

__all__ = [
    "DEFAULT_START_SECONDS",
    "Candidate",
    "Constraint",
    "Decision",
    "DecisionReason",
    "FleetView",
    "History",
    "Input",
    "ReplicaCapacity",
    "ReplicaPhase",
    "ReplicaView",
    "ScalingSpec",
    "Unknown",
    "decide",
    "replica_capacity",
]
