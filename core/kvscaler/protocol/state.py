"""What a replica says about itself: the body of `GET /state` on the metrics port.

Counters are cumulative since the process started (`started_at` tells a restart apart); windows
are made by whoever reads them, by subtraction. What is not known is absent (`None`), never 0.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvscaler.protocol.drain import DrainReport
from kvscaler.protocol.limits import PROTOCOL_VERSION, Count, LimitsReport, Message

Seconds = Annotated[float, Field(ge=0)]

LATENCY_BUCKETS_SECONDS: tuple[float, ...] = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
"""Upper bounds of every latency histogram here and in `/metrics`; one more bucket is unbounded."""


class Histogram(Message):
    """Counts per bucket of `LATENCY_BUCKETS_SECONDS` (not cumulative), the last one unbounded."""

    counts: tuple[int, ...] = (0,) * (len(LATENCY_BUCKETS_SECONDS) + 1)
    sum_seconds: float = 0.0


class OccupancyReport(Message):
    """Use of the block pool now.

    `referenced + cached + free == capacity`. `reserved_blocks` is the projected peak of all
    admitted requests, what they already reference included.
    """

    capacity_blocks: Count
    referenced_blocks: Count
    reserved_blocks: Count
    cached_blocks: Count
    free_blocks: Count
    running_requests: Count
    waiting_requests: Count
    waiting_tokens: Count
    waiting_blocks: Count = 0
    """Charge in blocks of the requests that wait for admission."""


class CapacityReport(Message):
    """What the replica allocated, and what its budget had predicted before it did."""

    kv_blocks: Count
    block_tokens: Annotated[int, Field(ge=1)]
    block_bytes: Count
    """Bytes of one block over all layers, keys and values."""
    pool_bytes: Count
    """Counted from the allocated tensors; a modelled executor allocates none."""
    predicted_kv_blocks: Count
    predicted_pool_bytes: Count
    weight_bytes: Count
    """Counted from the loaded tensors; a modelled executor loads none."""
    predicted_weight_bytes: Count
    max_sequences: Count
    max_context_tokens: Count


class StepCosts(Message):
    """Linear step time, measured by the replica at start and kept up to date.

    `seconds = base + per_sequence * decodes + per_context_token * context
    + per_prefill_token * prefill + per_prefill_pair * pairs`; pairs of a query and a key in prefill.
    """

    base_seconds: Seconds
    per_sequence_seconds: Seconds
    per_context_token_seconds: Seconds
    per_prefill_token_seconds: Seconds
    per_prefill_pair_seconds: Seconds | None = None
    """Absent where it is not known: a pair then counts as a context token."""


class TrafficCounters(Message):
    """Cumulative counts. An arrival is every well-formed request, refused ones included."""

    arrivals: Count = 0
    arrival_prompt_tokens: float = 0
    arrival_prompt_tokens_squared: float = 0
    arrival_max_tokens: float = 0
    admitted: Count = 0
    refused: dict[str, int] = Field(default_factory=dict)
    finished: Count = 0
    cancelled: Count = 0
    failed: Count = 0
    finished_prompt_tokens: float = 0
    finished_prompt_tokens_squared: float = 0
    finished_output_tokens: float = 0
    finished_output_tokens_squared: float = 0
    finished_prompt_output_tokens: float = 0
    """Sum of prompt x output over finished requests."""
    finished_block_seconds: float = 0
    """Sum over finished requests of the integral of referenced blocks over their life."""
    finished_block_squared_seconds: float = 0
    preemptions: Count = 0
    prefix_queried_tokens: Count = 0
    prefix_hit_tokens: Count = 0
    steps: Count = 0
    step_seconds: float = 0
    prefill_tokens: Count = 0
    decode_tokens: Count = 0
    time_to_first_token: Histogram = Histogram()
    time_per_output_token: Histogram = Histogram()
    queue_wait: Histogram = Histogram()


class InFlight(Message):
    """Requests admitted and not finished: what length statistics must allow for."""

    requests: Count = 0
    prompt_tokens: Count = 0
    generated_tokens: Count = 0
    generated_tokens_squared: float = 0


class ExecutorType(StrEnum):
    """Executors of this version. A report may name another: that of a newer replica."""

    TORCH = "Torch"
    MODELLED = "Modelled"


class ExecutorReport(Message):
    """Which executor runs, so that a modelled replica is never mistaken for a real one."""

    type: str
    device: str
    compute_dtype: str
    kv_dtype: str
    time_scale: float = 1.0
    """Times of a modelled executor are stretched by this; 1 for every other."""
    threads: int | None = None
    reason: str = ""
    """Why this compute dtype was chosen; of a modelled executor, where its step times come from."""


class ModelReport(Message):
    """Facts that the replica read from the model's files, and a digest over them."""

    uri: str
    served_names: tuple[str, ...]
    digest: str
    facts: dict[str, int | float | str | bool | None] = Field(default_factory=dict)


class BudgetLineReport(Message):
    """One line of the replica's own KVBudget."""

    name: str
    bytes: int
    basis: str


class ReplicaState(Message):
    """Body of `/state`: at most 64 KiB, made from one consistent look at the engine."""

    version: int = PROTOCOL_VERSION
    service_uid: str
    service_name: str
    pod_uid: str
    pod_name: str
    started_at: float
    """Unix seconds at which the process started; changes with every restart."""
    observed_at: float
    """Unix seconds at which this state was taken, by the replica's clock."""
    ready: bool
    """Loaded and not draining; never a matter of load."""
    executor: ExecutorReport
    model: ModelReport
    budget: tuple[BudgetLineReport, ...] = ()
    capacity: CapacityReport | None = None
    occupancy: OccupancyReport | None = None
    limits: LimitsReport | None = None
    step_costs: StepCosts | None = None
    traffic: TrafficCounters = TrafficCounters()
    in_flight: InFlight = InFlight()
    drain: DrainReport = DrainReport()


def unreported(state: ReplicaState) -> tuple[str, ...]:
    """Numbers that a received state did not carry, dotted, and that its defaults read as 0.

    A message type has defaults so that whoever makes one need not name every counter. Whoever
    reads one must not take what was never sent for no load: a renamed or dropped series, or a
    sidecar that stopped reporting something. Reasons of refusal are a map and may be none.
    """
    missing: list[str] = []
    for name in ("traffic", "in_flight", "occupancy"):
        part: Message | None = getattr(state, name)
        if part is None:
            continue
        fields = type(part).model_fields.keys() - part.model_fields_set - {"refused"}
        missing += [f"{name}.{field}" for field in sorted(fields)]
    for name in ("time_to_first_token", "time_per_output_token", "queue_wait"):
        histogram: Histogram = getattr(state.traffic, name)
        fields = Histogram.model_fields.keys() - histogram.model_fields_set
        if f"traffic.{name}" not in missing:
            missing += [f"traffic.{name}.{field}" for field in sorted(fields)]
    return tuple(missing)
