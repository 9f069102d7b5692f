"""`ReplicaState` of a gate: its own books, and the engine's facts while they are fresh.

What is not known is left out. Occupancy is the engine's own; the gate only adds what waits here and
what it has promised. Facts that never change (allocation, budget, model) may be older.
"""

import time

from kvscaler.protocol.drain import DrainReport
from kvscaler.protocol.state import (
    ExecutorReport,
    InFlight,
    ModelReport,
    OccupancyReport,
    ReplicaState,
    TrafficCounters,
)

from kvscaler_sidecar.config import GateSettings
from kvscaler_sidecar.gate.desk import Desk
from kvscaler_sidecar.gate.watch import EngineWatch

UNKNOWN_EXECUTOR = ExecutorReport(
    type="unknown", device="unknown", compute_dtype="unknown", kv_dtype="unknown",
    reason="the engine has not reported yet",
)  # fmt: skip
UNKNOWN_MODEL = ModelReport(uri="", served_names=(), digest="")


def gate_state(
    settings: GateSettings,
    started_at: float,
    desk: Desk | None,
    watch: EngineWatch,
    ready: bool,
    drain: DrainReport,
    refused: dict[str, int],
) -> ReplicaState:
    """The state. `refused` are refusals at the door, which admission never saw."""
    last, fresh = watch.last, watch.fresh
    return ReplicaState(
        service_uid=settings.service_uid,
        service_name=settings.service_name,
        pod_uid=settings.pod_uid,
        pod_name=settings.pod_name,
        started_at=started_at,
        observed_at=time.time(),
        ready=ready,
        executor=last.executor if last is not None and last.executor else UNKNOWN_EXECUTOR,
        model=last.model if last is not None and last.model else UNKNOWN_MODEL,
        budget=last.budget if last is not None else (),
        capacity=last.allocated if last is not None else None,
        occupancy=_occupancy(fresh.occupancy if fresh is not None else None, desk),
        limits=desk.limits_report() if desk is not None else None,
        step_costs=fresh.step_costs if fresh is not None else None,
        traffic=_traffic(desk, watch, refused),
        in_flight=desk.engine.recorder.in_flight() if desk is not None else InFlight(),
        drain=drain,
    )


def _occupancy(seen: OccupancyReport | None, desk: Desk | None) -> OccupancyReport | None:
    if seen is None or desk is None:
        return None
    admission = desk.engine.admission
    return seen.model_copy(
        update={
            "reserved_blocks": max(seen.reserved_blocks, admission.projected_peak_blocks()),
            "waiting_requests": seen.waiting_requests + admission.queued_requests,
            "waiting_tokens": seen.waiting_tokens + admission.queued_tokens,
            "waiting_blocks": seen.waiting_blocks + admission.queued_blocks,
        }
    )


def _traffic(desk: Desk | None, watch: EngineWatch, refused: dict[str, int]) -> TrafficCounters:
    counted = desk.engine.recorder.counters() if desk is not None else TrafficCounters()
    merged = dict(counted.refused)
    for reason, count in refused.items():
        merged[reason] = merged.get(reason, 0) + count
    return counted.model_copy(update={"refused": merged, **watch.counters})
