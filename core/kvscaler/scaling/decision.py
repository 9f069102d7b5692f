"""A decision with everything that it rests on: candidates, inputs and their age, words, victims."""

from dataclasses import dataclass
from enum import StrEnum

from kvscaler.protocol.limits import AdmissionLimits
from kvscaler.scaling.history import History


class Constraint(StrEnum):
    """What can set the number of replicas."""

    MEMORY = "Memory"
    PREFILL_COMPUTE = "PrefillCompute"
    DECODE_COMPUTE = "DecodeCompute"
    QUEUE = "Queue"
    OBJECTIVE = "Objective"
    MIN_REPLICAS = "MinReplicas"
    MAX_REPLICAS = "MaxReplicas"
    QUOTA = "Quota"
    BEHAVIOUR = "Behaviour"
    SIGNAL_HOLD = "SignalHold"


class DecisionReason(StrEnum):
    """Stable cause of a decision, for status, events and metrics."""

    SCALE_UP = "ScaleUp"
    SCALE_DOWN = "ScaleDown"
    STEADY = "Steady"
    AT_MINIMUM = "AtMinimum"
    AT_MAXIMUM = "AtMaximum"
    STABILIZING = "Stabilizing"
    """Fewer would do now, but not over the whole stabilization window."""
    KV_DOES_NOT_FIT = "KVDoesNotFit"
    """Fewer would do for the traffic, but live KV would not fit into them."""
    ROLLOUT_IN_PROGRESS = "RolloutInProgress"
    REPLICAS_UNSCHEDULABLE = "ReplicasUnschedulable"
    REPLICAS_CRASH_LOOPING = "ReplicasCrashLooping"
    STARTING = "Starting"
    """No replica is ready yet, so there is nothing to measure."""
    HOLDING = "Holding"
    HOLD_EXPIRED = "HoldExpired"


@dataclass(frozen=True, slots=True)
class Input:
    """A figure that a constraint used, with its unit and its age when it was used."""

    name: str
    value: float
    unit: str
    age_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one constraint alone would ask for; `needed` before rounding up."""

    constraint: Constraint
    replicas: int
    needed: float
    explanation: str
    inputs: tuple[Input, ...] = ()


@dataclass(frozen=True, slots=True)
class Unknown:
    """A constraint that can't be computed, and why: it takes no part in the decision."""

    constraint: Constraint
    why: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Desired replicas and per-replica limits, and why.

    `candidates` are sorted, the largest first. `runner_up` is what would bind next. `victims` are
    Pod UIDs in the order in which to drain them, exactly as many as ready or warming replicas are
    above `desired_replicas`. `active` is false when nothing is being decided any more (signals are
    gone for longer than they may be held). `history` is to be passed to the next call.
    """

    desired_replicas: int
    binding_constraint: Constraint
    reason: DecisionReason
    message: str
    candidates: tuple[Candidate, ...]
    runner_up: Candidate | None
    unknown: tuple[Unknown, ...]
    inputs: tuple[Input, ...]
    limits: AdmissionLimits | None
    victims: tuple[str, ...]
    active: bool
    time: float
    history: History
