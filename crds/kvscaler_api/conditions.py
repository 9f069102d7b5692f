"""Conditions of an InferenceService, and the one way to set them.

`lastTransitionTime` moves only when the status does; a helper that forgets this makes every pass
a write, and every write a pass.
"""

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvscaler_api.base import ApiModel
from kvscaler_api.quantities import Time
from kvscaler_api.reasons import Reason

MAX_MESSAGE_LENGTH = 4096


class ConditionType(StrEnum):
    """All conditions, in the order in which they are shown. True is always the good state."""

    READY = "Ready"
    """Replicas serve as the spec asks: the summary of the others."""
    SPEC_VALID = "SpecValid"
    """The spec makes sense and asks for nothing that this version does not do."""
    BUDGET_FITS = "BudgetFits"
    """Weights, activations and at least one full-length request fit the accelerator."""
    SIGNALS_FRESH = "SignalsFresh"
    """Load and memory are observed now."""
    SCALING_ACTIVE = "ScalingActive"
    """Replicas are being decided on from fresh signals."""
    LIMITS_APPLIED = "LimitsApplied"
    """Every replica enforces the admission limits of the decision."""
    REPLICAS_OWNED = "ReplicasOwned"
    """Nobody else writes the replicas that scaling.mode gives to us."""


class ConditionStatus(StrEnum):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One observation, in the form that all Kubernetes tools read."""

    type: Annotated[str, Field(min_length=1, max_length=63)] = Field(
        description="Name of the condition."
    )
    status: ConditionStatus = Field(description="True, False or Unknown.")
    observed_generation: Annotated[int, Field(ge=0)] = Field(
        0, description="metadata.generation of the spec that this was found for."
    )
    last_transition_time: Time = Field(description="When the status last changed.")
    reason: Annotated[str, Field(min_length=1, max_length=128)] = Field(
        description="Stable CamelCase cause."
    )
    message: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH)] = Field(
        "", description="What it means here: object, cause, next step."
    )


def set_condition(
    conditions: Iterable[Condition],
    type_: ConditionType,
    status: ConditionStatus | bool | None,
    reason: Reason,
    message: str,
    *,
    generation: int,
    now: datetime,
) -> tuple[Condition, ...]:
    """The conditions with one set, in canonical order; unknown types of others are kept last.

    `status` may be a bool, or None for Unknown. `now` becomes the transition time only when the
    status changes; an equal condition comes back unchanged. A message over 4096 characters is cut.
    """
    if status is None:
        status = ConditionStatus.UNKNOWN
    elif isinstance(status, bool):
        status = ConditionStatus.TRUE if status else ConditionStatus.FALSE
    by_type = {condition.type: condition for condition in conditions}
    before = by_type.get(type_)
    unmoved = before is not None and before.status == status
    by_type[type_.value] = Condition(
        type=type_.value,
        status=status,
        observed_generation=generation,
        last_transition_time=before.last_transition_time if before and unmoved else now,
        reason=reason.value,
        message=message[:MAX_MESSAGE_LENGTH],
    )
    return in_order(by_type.values())


def initial_conditions(
    conditions: Iterable[Condition], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The conditions with every missing type added as Unknown/Progressing."""
    result = tuple(conditions)
    known = {condition.type for condition in result}
    for type_ in ConditionType:
        if type_.value not in known:
            result = set_condition(
                result,
                type_,
                None,
                Reason.PROGRESSING,
                "not looked at yet",
                generation=generation,
                now=now,
            )
    return in_order(result)


def find_condition(conditions: Iterable[Condition], type_: ConditionType) -> Condition | None:
    """The condition of a type, if there is one."""
    return next((c for c in conditions if c.type == type_.value), None)


def in_order(conditions: Iterable[Condition]) -> tuple[Condition, ...]:
    """Known types in the order of `ConditionType`, then others by name."""
    order = {type_.value: index for index, type_ in enumerate(ConditionType)}
    return tuple(sorted(conditions, key=lambda c: (order.get(c.type, len(order)), c.type)))
