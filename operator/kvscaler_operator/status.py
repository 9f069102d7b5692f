"""Building status, and writing it rarely: at once when it matters, at most twice a minute else.

Status has two kinds of content. What a reader acts on (status and reason of conditions, replicas,
the decision, limits, the budget) is written when it changes, within a budget of writes so that
a flapping cause can't flood the API server. Figures that follow the traffic are rounded, and
written at most every 40 seconds. An idle service is never written at all.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from kvscaler.budget import KVBudget
from kvscaler.protocol.state import ExecutorType, ReplicaState
from kvscaler.scaling import Decision, ReplicaCapacity
from kvscaler.traffic import Present, Signal, TrafficWindow
from kvscaler_api.conditions import Condition, initial_conditions, set_condition
from kvscaler_api.objectives import ObjectivesSpec
from kvscaler_api.status import (
    Candidate,
    DecisionInput,
    DecisionStatus,
    ExecutorStatus,
    LimitsStatus,
    OccupancyStatus,
    TrafficStatus,
)
from kvscaler_api.status_budget import BudgetLine, BudgetStatus, ModelStatus

from kvscaler_operator.assess import Assessment
from kvscaler_operator.conditions import Verdicts
from kvscaler_operator.decision import Calibration
from kvscaler_operator.gateways.limiter import TokenBucket
from kvscaler_operator.limits import LimitsOutcome
from kvscaler_operator.resources import Object

COSMETIC_SECONDS = 40.0
"""Shortest time between two writes for figures alone: with one that matters in between, a service
under steady traffic still stays within two writes a minute."""
URGENT_BURST = 10
URGENT_SECONDS = 6.0
"""Writes for what matters: so many at once, then one in so many seconds."""
MESSAGE_CHARACTERS = 1024
POOL_LINE = "kv pool"


def condition_list(
    known: Sequence[Condition], verdicts: Verdicts, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """All conditions, those without a verdict as they were."""
    conditions = initial_conditions(known, generation=generation, now=now)
    for kind, verdict in verdicts.items():
        conditions = set_condition(
            conditions,
            kind,
            verdict.status,
            verdict.reason,
            verdict.message,
            generation=generation,
            now=now,
        )
    return conditions


def model_status(assessment: Assessment) -> ModelStatus | None:
    """Facts of the model, and where they came from."""
    model, budget = assessment.architecture, assessment.budget
    if model is None or assessment.source is None:
        return None
    return ModelStatus(
        source=assessment.source,
        digest=model.digest,
        name=assessment.model_name,
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        weight_bytes=model.weight_bytes(budget.compute_dtype if budget else model.native_dtype),
        kv_bytes_per_token=model.kv_bytes_per_token(budget.kv_dtype) if budget else None,
        max_context_tokens=budget.max_context_tokens if budget else model.max_context_tokens,
        facts=json.dumps(dict(model.facts), sort_keys=True)[:4096],
    )


def executor_status(states: Iterable[Signal[ReplicaState]]) -> ExecutorStatus | None:
    """What the replicas report; a modelled one is named before all others, never hidden."""
    reports = [s.value.executor for s in states if isinstance(s, Present)]
    if not reports:
        return None
    shown = max(reports, key=lambda r: (r.type == ExecutorType.MODELLED, r.device, r.time_scale))
    return ExecutorStatus(
        type=shown.type[:63], device=shown.device[:128], time_scale=shown.time_scale
    )


def budget_status(
    budget: KVBudget, calibration: Calibration, states: Mapping[str, Signal[ReplicaState]]
) -> BudgetStatus:
    """The budget line by line, predicted and observed."""
    capacity = next(
        (
            s.value.capacity
            for s in states.values()
            if isinstance(s, Present)
            and s.value.capacity is not None
            and s.value.executor.type != ExecutorType.MODELLED  # it allocates nothing to observe
            and s.value.capacity.kv_blocks == calibration.observed_blocks
        ),
        None,
    )
    observed: dict[str, int] = {}
    if capacity is not None:
        observed = {"weights": capacity.weight_bytes, POOL_LINE: capacity.pool_bytes}
    lines = [
        BudgetLine(
            name=line.name,
            predicted_bytes=line.bytes,
            observed_bytes=observed.get(line.name),
            basis=line.basis.value.capitalize(),
        )
        for line in budget.lines
    ]
    pool = BudgetLine(
        name=POOL_LINE,
        predicted_bytes=budget.pool_bytes,
        observed_bytes=observed.get(POOL_LINE),
        basis="Computed",
    )
    deviation = None
    if calibration.observed_blocks is not None and budget.blocks > 0:
        deviation = round(100.0 * (calibration.observed_blocks / budget.blocks - 1.0), 2)
    return BudgetStatus(
        lines=(*lines, pool),
        block_tokens=budget.block_tokens,
        block_bytes=budget.block_bytes,
        predicted_blocks=budget.blocks,
        observed_blocks=calibration.observed_blocks,
        deviation_percent=deviation,
        message=budget.fit.message[:MESSAGE_CHARACTERS],
    )


def occupancy_status(states: Sequence[Signal[ReplicaState]]) -> OccupancyStatus | None:
    """Use of all pools, rounded to what a person reads; nothing while a replica is unknown."""
    reports = [
        s.value.occupancy
        for s in states
        if isinstance(s, Present) and s.value.occupancy is not None
    ]
    if not reports or len(reports) < len(states):
        return None
    capacity = sum(r.capacity_blocks for r in reports)
    referenced = sum(r.referenced_blocks for r in reports)
    return OccupancyStatus(
        kv_percent=5 * round(20 * referenced / capacity) if capacity else None,
        capacity_blocks=capacity,
        referenced_blocks=two_digits(referenced),
        reserved_blocks=two_digits(sum(r.reserved_blocks for r in reports)),
        cached_blocks=two_digits(sum(r.cached_blocks for r in reports)),
        running_requests=two_digits(sum(r.running_requests for r in reports)),
        waiting_requests=two_digits(sum(r.waiting_requests for r in reports)),
    )


def traffic_status(
    signal: Signal[TrafficWindow], objectives: ObjectivesSpec
) -> TrafficStatus | None:
    """Recent traffic, rounded."""
    if not isinstance(signal, Present):
        return None
    window = signal.value
    arrivals = window.arrivals_level
    offered = window.admitted + sum(window.refused.values())
    attainment = window.attainment(
        objectives.time_to_first_token_seconds, objectives.time_per_output_token_seconds
    )
    first = window.time_to_first_token_seconds(0.99)
    token = window.time_per_output_token_seconds(0.99)
    lengths = window.lengths
    return TrafficStatus(
        window_seconds=60 * round(window.covered_seconds / 60),
        coverage=round(min(1.0, window.coverage), 2),
        requests_per_second=float(f"{arrivals.per_second:.2g}"),
        prompt_tokens_mean=None if lengths is None else two_digits(lengths.prompt_mean_tokens),
        output_tokens_mean=None if lengths is None else two_digits(lengths.output_mean_tokens),
        prefix_hit=None if window.prefix_hit_share is None else round(window.prefix_hit_share, 2),
        refused=round(sum(window.refused.values()) / offered, 2) if offered else None,
        attainment=None if attainment is None else round(attainment, 2),
        time_to_first_token_p99_milliseconds=None if first is None else two_digits(first * 1000),
        time_per_output_token_p99_milliseconds=None if token is None else two_digits(token * 1000),
    )


def decision_status(decision: Decision, before: DecisionStatus | None) -> DecisionStatus:
    """The decision with its reasons. Its time moves only when what was decided does."""
    same = before is not None and (
        before.desired_replicas,
        before.binding_constraint,
        before.reason,
    ) == (decision.desired_replicas, decision.binding_constraint.value, decision.reason.value)
    time = datetime.fromtimestamp(decision.time, UTC).replace(microsecond=0)
    return DecisionStatus(
        desired_replicas=decision.desired_replicas,
        binding_constraint=decision.binding_constraint.value,
        reason=decision.reason.value,
        message=decision.message[:MESSAGE_CHARACTERS],
        candidates=tuple(
            Candidate(
                constraint=c.constraint.value,
                replicas=c.replicas,
                message=c.explanation[:MESSAGE_CHARACTERS],
            )
            for c in decision.candidates[:16]
        ),
        inputs=tuple(
            DecisionInput(
                name=i.name[:63],
                value=f"{i.value:.3g} {i.unit}".strip()[:64],
                age_seconds=None if i.age_seconds is None else max(0, round(i.age_seconds)),
            )
            for i in decision.inputs[:32]
        ),
        time=before.time if same and before is not None else time,
    )


def limits_status(
    capacity: ReplicaCapacity, block_tokens: int, outcome: LimitsOutcome | None
) -> LimitsStatus:
    """The limits that each replica is given, and how many have them."""
    limits = capacity.limits
    return LimitsStatus(
        hash=limits.content_hash,
        max_sequences=limits.max_sequences,
        kv_blocks=limits.kv_blocks,
        kv_tokens=limits.kv_blocks * block_tokens,
        step_tokens=limits.step_tokens,
        max_request_tokens=limits.max_request_tokens,
        queue_requests=limits.queue_requests,
        queue_tokens=limits.queue_tokens,
        queue_bytes=limits.queue_bytes,
        watermark_blocks=limits.watermark_blocks,
        replicas_applied=len(outcome.applied) if outcome else 0,
        replicas_pending=len(outcome.pending) + len(outcome.clamped) if outcome else 0,
    )


def two_digits(value: float) -> int:
    """A count to two significant digits: status is read, not computed with."""
    return int(float(f"{value:.2g}"))


FIGURES = ("traffic", "occupancy", "learned")
"""Parts of status that follow the traffic, as do the reasons within the decision."""
DECIDED = ("desiredReplicas", "bindingConstraint", "reason")
"""The part of a decision that a reader acts on."""


def essence(status: Object) -> Object:
    """What a reader acts on: status without figures and words that follow the traffic."""
    result = without_figures(status)
    result["conditions"] = [
        {"type": c["type"], "status": c["status"], "reason": c["reason"]}
        for c in status.get("conditions") or ()
    ]
    return result


def without_figures(status: Object) -> Object:
    """Status without what moves with the traffic, and without times."""
    result = {k: v for k, v in comparable(status).items() if k not in FIGURES}
    if "decision" in status:
        result["decision"] = {key: status["decision"].get(key) for key in DECIDED}
    return result


def comparable(status: Object) -> Object:
    """Status without times and ages, which would make every pass a change."""
    result = dict(status)
    result["conditions"] = [
        {k: v for k, v in c.items() if k != "lastTransitionTime"}
        for c in status.get("conditions") or ()
    ]
    if "decision" in result:
        decision = {k: v for k, v in result["decision"].items() if k != "time"}
        decision["inputs"] = [
            {k: v for k, v in i.items() if k != "ageSeconds"} for i in decision.get("inputs") or ()
        ]
        result["decision"] = decision
    return result


@dataclass(slots=True)
class StatusPacer:
    """Says when a changed status may be written."""

    urgent: TokenBucket
    written_at: float = float("-inf")
    settled: bool = False
    """Figures were written once since the traffic ended."""

    @classmethod
    def fresh(cls) -> "StatusPacer":
        """For a service that was not written to yet."""
        return cls(TokenBucket(1.0 / URGENT_SECONDS, URGENT_BURST))

    def wait_seconds(self, before: Object, after: Object, *, quiet: bool) -> float | None:
        """Seconds until `after` may replace `before`: 0 is now, `None` is never.

        `quiet` says that no traffic arrives: figures that still decay are then written once more
        and never again.
        """
        self.settled = self.settled and quiet
        view = without_figures if self.settled else comparable
        if view(before) == view(after):
            return None
        now = asyncio.get_running_loop().time()
        wait = self.written_at + COSMETIC_SECONDS - now
        if essence(before) != essence(after):
            # What matters waits for its turn, and never longer than figures would.
            wait = min(wait, self.urgent.wait_seconds)
            if wait <= 0:
                self.urgent.try_take()
        if wait > 0:
            return wait
        self.written_at = now
        self.settled = quiet
        return 0.0
