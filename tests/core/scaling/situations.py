"""Short ways to say what a service looks like, for table tests of `decide`."""

from dataclasses import replace

from kvscaler.performance import LLAMA_3_1_8B_H100, StepTimeModel
from kvscaler.protocol.state import Histogram, OccupancyReport
from kvscaler.scaling import (
    Decision,
    FleetView,
    History,
    ReplicaCapacity,
    ReplicaPhase,
    ReplicaView,
    ScalingSpec,
    decide,
)
from kvscaler.traffic import (
    LengthBasis,
    LengthStatistics,
    Present,
    Rate,
    Signal,
    TrafficWindow,
)
from kvscaler.traffic.window import RECENT_SECONDS

from tests.core.scaling.small_fleet import limits

NOW = 10_000.0
SPEC = ScalingSpec(min_replicas=1, max_replicas=10)
READY, WARMING = ReplicaPhase.READY, ReplicaPhase.WARMING

LENGTHS = LengthStatistics(
    prompt_mean_tokens=100.0,
    prompt_second_moment=12_000.0,
    output_mean_tokens=80.0,
    output_second_moment=7_000.0,
    prompt_output_mean=8_000.0,
    block_seconds=80.0,
    block_squared_seconds=800.0,
    finished=100,
    basis=LengthBasis.FINISHED,
    output_correction=1.0,
)
"""10 blocks for 8 seconds each."""


def capacity(
    blocks: int = 100, sequences: int = 256, step_time: StepTimeModel | None = None
) -> Present[ReplicaCapacity]:
    bounds = limits(blocks, watermark=0, sequences=sequences)
    times = () if step_time is None else (step_time,)
    return Present(ReplicaCapacity(blocks, blocks, bounds, times), "test", NOW)


def traffic(
    level: float = 0.0,
    short: float | None = None,
    *,
    burst: float | None = None,
    refused: float = 0.0,
    coverage: float = 1.0,
    lengths: LengthStatistics | None = LENGTHS,
    now: float = NOW,
) -> Present[TrafficWindow]:
    """A window with that many requests per second over 45 s, over 12 s and over 4 s."""
    recent = level if short is None else short
    newest = recent if burst is None else burst

    def last(seconds: float) -> Rate:
        oldest = max(0.0, seconds - 12.0)
        middle = max(0.0, min(seconds, 12.0) - 4.0)
        count = oldest * level + middle * recent + min(seconds, 4.0) * newest
        return Rate(count, seconds)

    window = TrafficWindow(
        time=now,
        coverage=coverage,
        covered_seconds=600.0,
        arrivals_short=last(12.0),
        arrivals_level=last(45.0),
        arrivals_recent=tuple(last(seconds) for seconds in RECENT_SECONDS),
        arrival_buckets=(),
        arrival_prompt_mean_tokens=100.0,
        arrival_max_tokens_mean=128.0,
        lengths=lengths,
        refused_short=Rate(12.0 * refused, 12.0),
        refused_level=Rate(45.0 * refused, 45.0),
        refused={},
        admitted=0,
        finished=0,
        cancelled=0,
        failed=0,
        preemptions=0,
        prefix_hit_share=None,
        time_to_first_token=Histogram(),
        time_per_output_token=Histogram(),
        queue_wait=Histogram(),
    )
    return Present(window, "replicas", now)


def use(
    reserved: int = 0,
    waiting: int = 0,
    requests: int | None = None,
    *,
    cached: int = 0,
    blocks: int = 100,
    now: float = NOW,
) -> Present[OccupancyReport]:
    """Occupancy of a replica; waiting requests ask for 10 blocks each unless told."""
    report = OccupancyReport(
        capacity_blocks=blocks,
        referenced_blocks=reserved // 2,
        reserved_blocks=reserved,
        cached_blocks=cached,
        free_blocks=max(0, blocks - reserved // 2 - cached),
        running_requests=reserved // 10,
        waiting_requests=waiting // 10 if requests is None else requests,
        waiting_tokens=waiting * 16,
        waiting_blocks=waiting,
    )
    return Present(report, "direct", now)


def fleet(
    *phases: ReplicaPhase, target: int | None = None, since: float = 0.0, rollout: bool = False
) -> FleetView:
    views = tuple(ReplicaView(f"p{i}", f"chat-{i}", phase, since) for i, phase in enumerate(phases))
    return FleetView(len(views) if target is None else target, views, rollout)


def old(replicas: int) -> History:
    """A history that has seen that many wanted long ago and nothing since."""
    fresh = History.fresh(NOW - 3600.0, replicas)
    return replace(fresh, wants=())


def settle(
    spec: ScalingSpec = SPEC,
    *,
    room: Signal[ReplicaCapacity] | None = None,
    seen: Signal[TrafficWindow] | None = None,
    live: list[Signal[OccupancyReport]] | None = None,
    pods: FleetView | None = None,
    history: History | None = None,
    now: float = NOW,
) -> Decision:
    """One decision; what is not said is calm and complete."""
    pods = fleet(READY) if pods is None else pods
    states = [use(now=now) for _ in pods.replicas] if live is None else live
    occupancy = {f"p{i}": state for i, state in enumerate(states)}
    return decide(
        spec,
        capacity() if room is None else room,
        traffic(now=now) if seen is None else seen,
        occupancy,
        pods,
        old(pods.target_replicas) if history is None else history,
        now,
    )


H100 = LLAMA_3_1_8B_H100
