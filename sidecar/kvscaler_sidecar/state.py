"""`ReplicaState` from its three parts: what never changes, the engine's last look, and the drain."""

import time
from dataclasses import dataclass

from kvscaler.budget import KVBudget
from kvscaler.protocol.drain import DrainReport
from kvscaler.protocol.limits import LimitsReport
from kvscaler.protocol.state import (
    BudgetLineReport,
    CapacityReport,
    ExecutorReport,
    InFlight,
    ModelReport,
    OccupancyReport,
    ReplicaState,
    StepCosts,
    TrafficCounters,
)

from kvscaler_sidecar.config import Settings
from kvscaler_sidecar.executors.seam import Executor
from kvscaler_sidecar.start import Plan

POOL_LINE = "kv pool"


@dataclass(frozen=True, slots=True)
class EngineLook:
    """The engine's numbers at one moment, made by its own thread between two steps."""

    observed_at: float
    """Unix seconds."""
    occupancy: OccupancyReport
    limits: LimitsReport
    traffic: TrafficCounters
    in_flight: InFlight
    step_costs: StepCosts | None


class StateBuilder:
    """Makes the state of this process. Used from the HTTP loop."""

    def __init__(self, settings: Settings, plan: Plan, started_at: float) -> None:
        self._settings = settings
        self._budget: KVBudget = plan.budget
        self._started_at = started_at
        self._capacity: CapacityReport | None = None
        self._executor = ExecutorReport(
            type=settings.executor,
            device=settings.accelerator,
            compute_dtype=plan.budget.compute_dtype,
            kv_dtype=plan.budget.kv_dtype,
            time_scale=settings.time_scale,
        )
        self._model = ModelReport(
            uri=settings.model_uri,
            served_names=settings.served_names,
            digest=plan.architecture.digest,
            facts=dict(plan.architecture.facts),
        )
        self._lines = (
            *(
                BudgetLineReport(name=line.name, bytes=line.bytes, basis=str(line.basis))
                for line in plan.budget.lines
            ),
            BudgetLineReport(name=POOL_LINE, bytes=plan.budget.pool_bytes, basis="computed"),
        )

    def loaded(self, executor: Executor) -> None:
        """From now on report what was allocated."""
        budget = self._budget
        self._executor = executor.report
        self._capacity = CapacityReport(
            kv_blocks=executor.kv_blocks,
            block_tokens=executor.block_tokens,
            block_bytes=executor.block_bytes,
            pool_bytes=executor.pool_bytes,
            predicted_kv_blocks=budget.blocks,
            predicted_pool_bytes=budget.pool_bytes,
            weight_bytes=executor.weight_bytes,
            predicted_weight_bytes=budget.line("weights").bytes,
            max_sequences=budget.max_sequences,
            max_context_tokens=budget.max_context_tokens,
        )

    def build(
        self, look: EngineLook | None, ready: bool, drain: DrainReport, refused: dict[str, int]
    ) -> ReplicaState:
        """The state. `refused` are refusals at the door, which the engine never saw."""
        settings = self._settings
        traffic = look.traffic if look is not None else TrafficCounters()
        if refused:
            merged = dict(traffic.refused)
            for reason, count in refused.items():
                merged[reason] = merged.get(reason, 0) + count
            traffic = traffic.model_copy(update={"refused": merged})
        return ReplicaState(
            service_uid=settings.service_uid,
            service_name=settings.service_name,
            pod_uid=settings.pod_uid,
            pod_name=settings.pod_name,
            started_at=self._started_at,
            observed_at=look.observed_at if look is not None else time.time(),
            ready=ready,
            executor=self._executor,
            model=self._model,
            budget=self._lines,
            capacity=self._capacity,
            occupancy=look.occupancy if look is not None else None,
            limits=look.limits if look is not None else None,
            step_costs=look.step_costs if look is not None else None,
            traffic=traffic,
            in_flight=look.in_flight if look is not None else InFlight(),
            drain=drain,
        )
