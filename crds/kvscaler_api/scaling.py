"""Who owns the number of replicas, and how it moves."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvscaler_api.base import ApiModel, Rule
from kvscaler_api.quantities import Duration


class ScalingMode(StrEnum):
    """The one owner of `spec.replicas`."""

    MANAGED = "Managed"
    ADVISORY = "Advisory"
    EXTERNAL = "External"


class MissingSignalsPolicy(StrEnum):
    """What to do with replicas while their signals are missing or stale."""

    HOLD = "Hold"


class ScaleDownSpec(ApiModel):
    """How replicas are taken away without breaking a stream."""

    stabilization_window_seconds: Annotated[float, Duration("0s", "1h")] = Field(
        300.0,
        alias="stabilizationWindow",
        description=(
            "Replicas shrink only to the largest number wanted within this time, such as 5m. A"
            " longer window rides out pauses between bursts and holds accelerators longer."
        ),
    )
    drain_timeout_seconds: Annotated[float, Duration("1s", "24h")] = Field(
        600.0,
        alias="drainTimeout",
        description=(
            "Longest time that a replica chosen for removal may take to finish its requests, such"
            " as 10m. The Pods' grace period is this plus 30 s. Streams longer than this are cut."
        ),
    )
    to_zero_after_seconds: Annotated[float, Duration("1s", "168h")] = Field(
        900.0,
        alias="toZeroAfter",
        description=(
            "Time without a request after which the last replica goes, such as 15m. Has an effect"
            " only with minReplicas 0, which needs a router to hold what arrives."
        ),
    )


class MissingSignalsSpec(ApiModel):
    """What happens when a service cannot be observed."""

    policy: MissingSignalsPolicy = Field(
        MissingSignalsPolicy.HOLD,
        description="Hold keeps the last decision: a missing signal is never read as no load.",
    )
    for_seconds: Annotated[float, Duration("10s", "24h")] = Field(
        600.0,
        alias="for",
        description=(
            "How long the last decision is held, such as 10m. After it the number of replicas"
            " still stays, and ScalingActive=False says that nothing is being decided."
        ),
    )


class ScalingSpec(ApiModel):
    """Bounds and behaviour of the number of replicas."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas must not be greater than maxReplicas",
            lambda scaling: scaling.min_replicas <= scaling.max_replicas,
        ),
    )

    mode: ScalingMode = Field(
        description=(
            "Who writes spec.replicas. Managed: the operator does. Advisory: a person does; the"
            " operator computes and exports what it would do. External: an HPA or KEDA on this"
            " object does."
        )
    )
    min_replicas: int = Field(
        1,
        ge=0,
        le=10_000,
        description=(
            "Fewest replicas. 0 lets an idle service go to none and needs routing.mode Router,"
            " which holds requests until a replica has started."
        ),
    )
    max_replicas: int = Field(
        ge=1,
        le=10_000,
        description=(
            "Most replicas. At this bound requests that do not fit are refused with a computed"
            " Retry-After instead."
        ),
    )
    scale_down: ScaleDownSpec = Field(
        ScaleDownSpec(), description="When and how replicas are taken away."
    )
    on_missing_signals: MissingSignalsSpec = Field(
        MissingSignalsSpec(),
        description="What happens to replicas while load or memory cannot be observed.",
    )
