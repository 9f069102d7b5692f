"""Every reason that a condition or an Event can carry: stable words that alerts and scripts match.

One place, so that no two parts of the operator use two words for one cause. A reason is never
renamed; a new cause gets a new one.
"""

from enum import StrEnum


class Reason(StrEnum):
    """CamelCase causes, grouped by the condition that they explain."""

    # Any condition
    PROGRESSING = "Progressing"
    """Not looked at yet, or work is under way."""
    PAUSED = "Paused"
    """The annotation kvscaler.io/paused stops all writes for this object."""
    RECONCILE_ERROR = "ReconcileError"
    """An unexpected error; the message has it, and it is retried with backoff."""

    # Ready
    REPLICAS_READY = "ReplicasReady"
    REPLICAS_NOT_READY = "ReplicasNotReady"
    REPLICAS_UNSCHEDULABLE = "ReplicasUnschedulable"
    REPLICAS_CRASHING = "ReplicasCrashing"
    ROLLING_OUT = "RollingOut"
    SCALED_TO_ZERO = "ScaledToZero"
    NAME_TAKEN = "NameTaken"
    """A child's name belongs to an object that is not ours; it is never adopted."""
    CHILD_REFUSED = "ChildRefused"
    """The API server refused a child (admission, quota of objects, policy)."""
    TARGET_NOT_FOUND = "TargetNotFound"
    TARGET_NOT_ALLOWED = "TargetNotAllowed"
    """The target lacks the annotation kvscaler.io/allow with this service's name."""
    SPEC_INVALID = "SpecInvalid"
    BUDGET_DOES_NOT_FIT = "BudgetDoesNotFit"

    # SpecValid
    VALID = "Valid"
    INVALID = "Invalid"
    NOT_IMPLEMENTED = "NotImplemented"
    """A field asks for something that this version does not do; the message has its path."""
    ARG_CONFLICT = "ArgConflict"
    """engine.args or the template's env repeats a typed field, or names no executor."""
    TEMPLATE_CONFLICT = "TemplateConflict"
    """The template contradicts a typed field, such as another number of accelerators."""
    TEMPLATE_INVALID = "TemplateInvalid"
    """The API server refuses the template in a dry run."""
    TOO_LARGE = "TooLarge"
    CRD_OUTDATED = "CRDOutdated"
    """The installed CRD lacks fields of this operator: what a user wrote may have been pruned."""

    # BudgetFits
    FITS = "Fits"
    DOES_NOT_FIT = "DoesNotFit"
    AWAITING_MODEL_FACTS = "AwaitingModelFacts"
    UNKNOWN_MODEL = "UnknownModel"
    ARCHITECTURE_NOT_UNDERSTOOD = "ArchitectureNotUnderstood"
    UNKNOWN_ACCELERATOR = "UnknownAccelerator"
    ACCELERATOR_MISMATCH = "AcceleratorMismatch"
    MEMORY_LIMIT_MISSING = "MemoryLimitMissing"
    """On cpu the engine's container needs a memory limit: it is the device's memory."""

    # SignalsFresh
    FRESH = "Fresh"
    METRICS_MISSING = "MetricsMissing"
    METRICS_STALE = "MetricsStale"
    METRICS_NOT_A_NUMBER = "MetricsNotANumber"
    METRICS_MISMATCHED = "MetricsMismatched"
    METRICS_PARTIAL = "MetricsPartial"
    PROMETHEUS_UNREACHABLE = "PrometheusUnreachable"
    """Prometheus is down. True while the direct path carries on, False when nothing does."""
    PROMETHEUS_UNUSABLE = "PrometheusUnusable"
    """Prometheus answers, and has nothing usable of any replica; the direct path carries on."""
    REPLICAS_UNREACHABLE = "ReplicasUnreachable"
    """No replica answers directly. True while Prometheus carries on, False when nothing does."""
    NO_REPLICAS = "NoReplicas"

    # ScalingActive
    DECIDING = "Deciding"
    ADVISING = "Advising"
    EXTERNALLY_MANAGED = "ExternallyManaged"
    HOLDING = "Holding"
    """Signals are missing; the last decision is held for onMissingSignals.for."""
    HOLD_EXPIRED = "HoldExpired"
    DISABLED = "Disabled"
    QUOTA_EXCEEDED = "QuotaExceeded"

    # LimitsApplied
    APPLIED = "Applied"
    PENDING = "Pending"
    CLAMPED = "Clamped"
    NOT_ENFORCED = "NotEnforced"
    """admission.mode is Observe or Off."""
    NO_ENFORCEMENT_POINT = "NoEnforcementPoint"

    # ReplicasOwned
    OWNED = "Owned"
    NOT_OURS = "NotOurs"
    """scaling.mode gives the replicas to someone else, as intended."""
    CONFLICTING_AUTOSCALER = "ConflictingAutoscaler"
    CONFLICTING_WRITER = "ConflictingWriter"


class EventReason(StrEnum):
    """Reasons of Events that report something done, not a state."""

    SCALED_UP = "ScaledUp"
    SCALED_DOWN = "ScaledDown"
    DRAIN_STARTED = "DrainStarted"
    DRAIN_FINISHED = "DrainFinished"
    DRAIN_TIMED_OUT = "DrainTimedOut"
    DRAIN_CANCELLED = "DrainCancelled"
    LIMITS_CHANGED = "LimitsChanged"
    CHILD_CREATED = "ChildCreated"
    CHILD_RESTORED = "ChildRestored"
    CAPACITY_CALIBRATED = "CapacityCalibrated"
