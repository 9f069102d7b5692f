"""What the operator reports. Live values belong to metrics; status has rounded digests of them."""

from typing import Annotated

from pydantic import Field

from kvscaler_api.base import AS_ATOMIC, ApiModel, as_map
from kvscaler_api.conditions import Condition
from kvscaler_api.quantities import DecimalText, Percent, Time
from kvscaler_api.status_budget import BudgetStatus, Bytes, Count, ModelStatus, Text

Rate = Annotated[float, DecimalText()]
Name = Annotated[str, Field(max_length=63)]


class TrafficStatus(ApiModel):
    """The traffic of a recent window, rounded."""

    window_seconds: Count | None = Field(None, description="Length of the window.")
    coverage: Annotated[float, Percent()] | None = Field(
        None, description="Share of the window and of the replicas that was observed."
    )
    requests_per_second: Rate | None = Field(
        None, description="Arrivals per second, refused ones included."
    )
    prompt_tokens_mean: Count | None = Field(None, description="Mean prompt length.")
    output_tokens_mean: Count | None = Field(None, description="Mean output length.")
    prefix_hit: Annotated[float, Percent()] | None = Field(
        None, description="Share of prompt tokens found in the prefix cache."
    )
    refused: Annotated[float, Percent()] | None = Field(
        None, description="Share of arrivals that were refused."
    )
    attainment: Annotated[float, Percent()] | None = Field(
        None, description="Share of offered requests that met both objectives."
    )
    time_to_first_token_p99_milliseconds: Count | None = Field(
        None, description="99th percentile of the time to the first token."
    )
    time_per_output_token_p99_milliseconds: Count | None = Field(
        None, description="99th percentile of the time between output tokens."
    )


class ExecutorStatus(ApiModel):
    """What computes the steps of the replicas."""

    type: Name = Field(
        description=(
            "Torch runs the model. Modelled takes the step times of the accelerator, computes"
            " nothing and answers with synthetic tokens; while any replica is, it is named here."
        )
    )
    device: Annotated[str, Field(max_length=128)] = Field(
        description="The device that it runs on, or that it is the model of."
    )
    time_scale: Rate = Field(
        1.0, description="By what all times of a modelled executor are stretched; 1 for others."
    )


class OccupancyStatus(ApiModel):
    """Use of the KV cache over all replicas, rounded."""

    kv_percent: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Blocks referenced by live requests, in percent of the capacity."
    )
    capacity_blocks: Count | None = Field(None, description="KV blocks of all replicas.")
    referenced_blocks: Count | None = Field(None, description="Blocks that live requests hold now.")
    reserved_blocks: Count | None = Field(
        None, description="Blocks promised to admitted requests at their projected peak."
    )
    cached_blocks: Count | None = Field(
        None, description="Blocks kept for reuse; taken when memory is needed."
    )
    running_requests: Count | None = Field(None, description="Requests being computed.")
    waiting_requests: Count | None = Field(None, description="Requests waiting for admission.")


class LearnedStatus(ApiModel):
    """What was learned from observation. Losing it costs accuracy, never safety."""

    version: Annotated[int, Field(ge=1)] = Field(description="Version of the digest's format.")
    digest: Annotated[str, Field(max_length=4096)] = Field(description="The learned values.")
    time: Time | None = Field(None, description="When it was written.")


class Candidate(ApiModel):
    """The replicas that one constraint alone would ask for."""

    constraint: Name = Field(description="Name of the constraint, such as Memory.")
    replicas: Count = Field(description="Replicas that it asks for.")
    message: Text | None = Field(None, description="From which figures.")


class DecisionInput(ApiModel):
    """A figure that the decision was made from."""

    name: Name = Field(description="Name of the figure.")
    value: Annotated[str, Field(max_length=64)] = Field(description="Value with its unit.")
    age_seconds: Count | None = Field(None, description="Its age when the decision was made.")


class DecisionStatus(ApiModel):
    """The last decision, with its reasons."""

    desired_replicas: Count = Field(description="Replicas that are wanted.")
    binding_constraint: Name = Field(
        description=(
            "The constraint that set the number: Memory, PrefillCompute, DecodeCompute, Queue,"
            " Objective, MinReplicas, MaxReplicas, Quota, Behaviour or SignalHold."
        )
    )
    reason: Annotated[str, Field(max_length=128)] = Field(description="Stable CamelCase cause.")
    message: Text = Field("", description="The decision in words.")
    candidates: tuple[Candidate, ...] = Field(
        (),
        max_length=16,
        json_schema_extra=as_map("constraint"),
        description="What each constraint alone would ask for.",
    )
    inputs: tuple[DecisionInput, ...] = Field(
        (),
        max_length=32,
        json_schema_extra=as_map("name"),
        description="The figures that it was made from.",
    )
    time: Time = Field(description="When the decision last changed.")


class LimitsStatus(ApiModel):
    """The admission limits of each replica."""

    hash: Annotated[str, Field(max_length=64)] = Field(
        description="Hash of the limits' content, by which replicas and operator agree."
    )
    max_sequences: Count | None = Field(None, description="Most requests computed at once.")
    kv_blocks: Count | None = Field(None, description="Most KV blocks in use.")
    kv_tokens: Count | None = Field(None, description="The same in tokens, for display.")
    step_tokens: Count | None = Field(None, description="Most tokens computed in one step.")
    max_request_tokens: Count | None = Field(
        None, description="Longest request, prompt and output together."
    )
    queue_requests: Count | None = Field(None, description="Most requests waiting.")
    queue_tokens: Count | None = Field(None, description="Most prompt tokens waiting.")
    queue_bytes: Bytes | None = Field(None, description="Most bytes of memory of requests waiting.")
    watermark_blocks: Count | None = Field(None, description="Blocks that admission leaves free.")
    replicas_applied: Count | None = Field(
        None, description="Replicas that enforce exactly these limits."
    )
    replicas_pending: Count | None = Field(
        None, description="Replicas that do not yet, or that clamped them."
    )


class RecommendationStatus(ApiModel):
    """Something to turn on instead of adding replicas."""

    type: Name = Field(description="The optimization.")
    gain: Annotated[str, Field(max_length=256)] = Field(
        description="What it saves, as a lower bound, such as 2 of 7 replicas."
    )
    evidence: Text = Field("", description="The figures of this service's traffic behind it.")
    risk: Text | None = Field(None, description="What it may cost in quality or latency.")
    patch: Annotated[str, Field(max_length=2048)] | None = Field(
        None, description="JSON merge patch of the spec that applies it."
    )


class InferenceServiceStatus(ApiModel):
    """The observed state of a service."""

    observed_generation: Annotated[int, Field(ge=0)] = Field(
        0, description="metadata.generation of the spec that this status is about."
    )
    selector: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="Label selector of the serving Pods, for the scale subresource."
    )
    replicas: Count | None = Field(None, description="Serving Pods that exist.")
    ready_replicas: Count | None = Field(None, description="Serving Pods that are ready.")
    desired_replicas: Count | None = Field(
        None, description="Replicas that the last decision wants."
    )
    sidecar_image: Annotated[str, Field(max_length=512)] | None = Field(
        None,
        description=(
            "Image of the sidecar unless spec.engine.image names another; pinned so that an upgrade"
            " restarts no Pod."
        ),
    )
    conditions: tuple[Condition, ...] = Field(
        (),
        max_length=32,
        json_schema_extra=as_map("type"),
        description="What is well and what is not, by type; Ready is the summary.",
    )
    model: ModelStatus | None = Field(None, description="Facts of the model, and their source.")
    budget: BudgetStatus | None = Field(
        None, description="Memory of one replica, predicted and observed."
    )
    executor: ExecutorStatus | None = Field(
        None, description="What computes the steps, as the replicas report it."
    )
    traffic: TrafficStatus | None = Field(None, description="Recent traffic, rounded.")
    occupancy: OccupancyStatus | None = Field(
        None, description="Use of the KV cache over all replicas, rounded."
    )
    learned: LearnedStatus | None = Field(
        None, description="What was learned from observation, for the next start of the operator."
    )
    decision: DecisionStatus | None = Field(
        None, description="The last decision on replicas, with its reasons."
    )
    limits: LimitsStatus | None = Field(
        None, description="Admission limits that each replica is given."
    )
    recommendations: tuple[RecommendationStatus, ...] = Field(
        (),
        max_length=16,
        json_schema_extra=AS_ATOMIC,
        description="Optimizations that would save replicas, best first.",
    )
