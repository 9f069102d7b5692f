"""The small service with replicas whose steps cost time, so that full ones are slower.

The figures are those of a 135M model on 0.3 of a processor core: 35 blocks, 0.16 s a step, 0.033 s
more for each sequence and 0.0065 s for each prompt token. A full replica then serves 0.83 requests
a second, as measured, so that the spike is one of 2.5 full replicas.
"""

from dataclasses import dataclass, field, replace

from kvscaler.performance import StepTimeModel
from kvscaler.protocol.state import LATENCY_BUCKETS_SECONDS, Histogram
from kvscaler.scaling import ReplicaCapacity, ScalingSpec
from kvscaler.traffic import Present, TrafficSample

from tests.core.scaling.small_fleet import TICK_SECONDS, Replica, Request, SmallFleet, limits

COSTS = StepTimeModel(0.16, 0.033, 0.0, 0.0065, "test")
CALM, SPIKE = 0.29, 2.08
"""Requests per second."""


@dataclass
class SteppingReplica(Replica):
    """Prefills what was admitted and decodes the rest, step by step."""

    clock: float | None = None
    step: list[tuple[Request, bool]] = field(default_factory=list)
    ends: float = 0.0
    first_token: dict[int, float] = field(default_factory=dict)
    token_times: list[float] = field(default_factory=list)
    busy_block_seconds: float = 0.0

    def tick(self) -> list[Request]:
        begin = self.started if self.clock is None else self.clock
        self.clock = end = begin + TICK_SECONDS
        done: list[Request] = []
        while True:
            if not self.step:
                self.admit()
                if not self.running:
                    return done
                self.step = [(r, r.generated == 0) for r in self.running]
                prefill = sum(r.prompt for r, first in self.step if first)
                decodes = sum(1 for _, first in self.step if not first)
                self.ends = begin + COSTS.step_seconds(decodes, 0, prefill)
            until = min(self.ends, end)
            for r, _ in self.step:
                r.block_seconds += r.blocks * (until - begin)
                r.block_squared_seconds += r.blocks**2 * (until - begin)
                self.busy_block_seconds += r.blocks * (until - begin)
            begin = until
            if self.ends > end:
                return done
            for r, first in self.step:
                r.generated += 1
                if first:
                    self.first_token[id(r)] = self.ends
                if r.generated >= r.output:
                    done.append(r)
                    self.finish(r)
            self.step = []

    def finish(self, r: Request) -> None:
        super().finish(r)
        self.token_times.append((self.ends - self.first_token.pop(id(r))) / (r.output - 1))

    def sample(self, now: float) -> TrafficSample:
        sample = super().sample(now)
        counts = [0] * (len(LATENCY_BUCKETS_SECONDS) + 1)
        for seconds in self.token_times:
            counts[sum(1 for bound in LATENCY_BUCKETS_SECONDS if bound < seconds)] += 1
        times = Histogram(counts=tuple(counts), sum_seconds=sum(self.token_times))
        counters = sample.counters.model_copy(update={"time_per_output_token": times})
        return replace(sample, counters=counters)


class SteppingFleet(SmallFleet):
    """Replicas of 35 blocks, prompts of about 40 tokens and outputs of about 18."""

    replica_type = SteppingReplica

    def __init__(
        self, seed: int, spec: ScalingSpec, *, replicas: int = 1, costs_known: bool = True
    ) -> None:
        super().__init__(
            seed,
            spec,
            usable_blocks=33,
            prompt=(28, 52),
            output=(12, 24),
            start_seconds=20.0,
            replicas=replicas,
        )
        bounds = limits(35, watermark=2)
        self.watermark = 2
        self.capacity = Present(
            ReplicaCapacity(35, 35, bounds, (COSTS,) if costs_known else ()), "test", self.now
        )

    def asked_at_least(self, replicas: int, since: float) -> float | None:
        """Seconds after `since` at which that many were first asked for."""
        return next(
            (
                d.time - since
                for d in self.decisions
                if d.time >= since and d.desired_replicas >= replicas
            ),
            None,
        )
