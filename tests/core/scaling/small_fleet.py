"""A service of small replicas, simulated request by request, that `decide` steers in tests.

Each replica admits first in, first out while the projected peaks of admitted requests fit into its
usable blocks, gives every running request a token each `token_seconds`, and refuses beyond a
bounded queue. Requests go to a random ready replica, as through a Kubernetes Service.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from kvscaler.protocol.limits import AdmissionLimits
from kvscaler.protocol.refusals import RefusalReason
from kvscaler.protocol.state import InFlight, OccupancyReport, TrafficCounters
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
from kvscaler.traffic import Present, SampleHistory, Signal, TrafficSample

BLOCK_TOKENS = 16
TICK_SECONDS = 0.25


def limits(blocks: int, watermark: int = 3, sequences: int = 256) -> AdmissionLimits:
    """Limits of a replica with that many blocks."""
    return AdmissionLimits(
        max_sequences=sequences,
        kv_blocks=blocks,
        step_tokens=512,
        queue_requests=64,
        queue_tokens=100_000,
        queue_bytes=1 << 20,
        max_wait_seconds=30,
        max_request_tokens=4096,
        watermark_blocks=watermark,
    )


@dataclass
class Request:
    arrival: float
    prompt: int
    output: int
    generated: float = 0.0
    block_seconds: float = 0.0
    block_squared_seconds: float = 0.0

    @property
    def blocks(self) -> int:
        return -(-(self.prompt + int(self.generated)) // BLOCK_TOKENS)

    @property
    def peak(self) -> int:
        return -(-(self.prompt + self.output) // BLOCK_TOKENS)


@dataclass
class Replica:
    name: str
    started: float
    usable: int
    queue_requests: int
    token_seconds: float
    ready_at: float
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    draining: bool = False
    sums: dict[str, float] = field(default_factory=dict)
    refused: int = 0

    def count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.sums[name] = self.sums.get(name, 0) + amount

    def offer(self, request: Request) -> bool:
        p = request.prompt
        self.count(arrivals=1, arrival_prompt_tokens=p, arrival_prompt_tokens_squared=p * p)
        self.admit()
        if len(self.waiting) >= self.queue_requests:
            self.refused += 1
            return False
        self.waiting.append(request)
        self.admit()
        return True

    def admit(self) -> None:
        reserved = sum(r.peak for r in self.running)
        while self.waiting and reserved + self.waiting[0].peak <= self.usable:
            request = self.waiting.popleft()
            reserved += request.peak
            self.running.append(request)
            self.count(admitted=1)

    def tick(self) -> list[Request]:
        done = []
        for request in self.running:
            s = request.blocks
            request.block_seconds += s * TICK_SECONDS
            request.block_squared_seconds += s * s * TICK_SECONDS
            request.generated += TICK_SECONDS / self.token_seconds
            if request.generated >= request.output:
                done.append(request)
        for r in done:
            self.finish(r)
        self.admit()
        return done

    def finish(self, r: Request) -> None:
        self.running.remove(r)
        self.count(
            finished=1,
            finished_prompt_tokens=r.prompt,
            finished_prompt_tokens_squared=r.prompt**2,
            finished_output_tokens=r.output,
            finished_output_tokens_squared=r.output**2,
            finished_prompt_output_tokens=r.prompt * r.output,
            finished_block_seconds=r.block_seconds,
            finished_block_squared_seconds=r.block_squared_seconds,
        )

    def sample(self, now: float) -> TrafficSample:
        refused = {RefusalReason.QUEUE_FULL.value: self.refused} if self.refused else {}
        generated = [int(r.generated) for r in self.running]
        return TrafficSample(
            pod_uid=self.name,
            started_at=self.started,
            process_seconds=now - self.started,
            time=now,
            counters=TrafficCounters.model_validate({**self.sums, "refused": refused}),
            in_flight=InFlight(requests=len(self.running), generated_tokens=sum(generated)),
            source="direct",
        )

    def occupancy(self, watermark: int) -> OccupancyReport:
        referenced = sum(r.blocks for r in self.running)
        return OccupancyReport(
            capacity_blocks=self.usable + watermark,
            referenced_blocks=referenced,
            reserved_blocks=sum(r.peak for r in self.running),
            cached_blocks=0,
            free_blocks=self.usable + watermark - referenced,
            running_requests=len(self.running),
            waiting_requests=len(self.waiting),
            waiting_tokens=sum(r.prompt for r in self.waiting),
            waiting_blocks=sum(r.peak for r in self.waiting),
        )


class SmallFleet:
    """The service, its observer and its decisions."""

    replica_type: type[Replica] = Replica

    def __init__(
        self,
        seed: int,
        spec: ScalingSpec,
        *,
        usable_blocks: int = 61,
        prompt: tuple[int, int] = (60, 140),
        output: tuple[int, int] = (40, 120),
        token_seconds: float = 0.1,
        start_seconds: float = 30.0,
        poll_seconds: float = 1.0,
        queue_requests: int = 32,
        replicas: int = 1,
    ) -> None:
        self.random = random.Random(seed)
        self.spec = spec
        self.usable, self.watermark = usable_blocks, 3
        self.prompt, self.output = prompt, output
        self.token_seconds, self.start_seconds = token_seconds, start_seconds
        self.poll_seconds, self.queue_requests = poll_seconds, queue_requests
        self.now = 1000.0
        self.target = replicas
        self.names = 0
        self.replicas: list[Replica] = []
        for _ in range(replicas):
            self.start(ready_in=0.0)
        self.samples = SampleHistory()
        self.history = History.fresh(self.now, replicas)
        self.decisions: list[Decision] = []
        self.offered = self.refused = 0
        self.waits: list[tuple[float, float]] = []
        bounds = limits(usable_blocks + self.watermark, self.watermark)
        self.capacity = Present(
            ReplicaCapacity(bounds.kv_blocks, bounds.kv_blocks, bounds), "test", self.now
        )

    @property
    def mean_block_seconds(self) -> float:
        """E∫s dt of the requests that are drawn, by the midpoint."""
        prompt, output = sum(self.prompt) / 2, sum(self.output) / 2
        return (prompt + output / 2 + BLOCK_TOKENS / 2) / BLOCK_TOKENS * output * self.token_seconds

    def rate_for(self, replicas: float) -> float:
        """Requests per second that use the blocks of that many replicas on average."""
        return replicas * self.usable / self.mean_block_seconds

    def start(self, ready_in: float) -> None:
        self.names += 1
        self.replicas.append(
            self.replica_type(
                f"pod-{self.names}",
                self.now,
                self.usable,
                self.queue_requests,
                self.token_seconds,
                self.now + ready_in,
            )
        )

    def fleet(self) -> FleetView:
        views = []
        for r in self.replicas:
            phase = ReplicaPhase.READY if self.now >= r.ready_at else ReplicaPhase.WARMING
            if r.draining:
                phase = ReplicaPhase.DRAINING
            views.append(ReplicaView(r.name, r.name, phase, r.ready_at))
        return FleetView(self.target, tuple(views), start_seconds=self.start_seconds)

    def run(self, seconds: float, requests_per_second: float) -> None:
        end = self.now + seconds
        next_poll = self.now
        while self.now < end:
            ready = [r for r in self.replicas if self.now >= r.ready_at and not r.draining]
            for _ in range(self._poisson(requests_per_second * TICK_SECONDS)):
                self.offered += 1
                request = Request(
                    self.now, self.random.randint(*self.prompt), self.random.randint(*self.output)
                )
                if not self.random.choice(ready).offer(request):
                    self.refused += 1
            for replica in self.replicas:
                replica.tick()
            self.replicas = [
                r for r in self.replicas if not (r.draining and not r.running and not r.waiting)
            ]
            if self.now >= next_poll:
                next_poll += self.poll_seconds
                self.observe_and_decide()
            self.now += TICK_SECONDS

    def observe(self) -> dict[str, Signal[OccupancyReport]]:
        occupancy: dict[str, Signal[OccupancyReport]] = {}
        for r in self.replicas:
            if self.now >= r.ready_at:
                self.samples.observe(r.sample(self.now))
                occupancy[r.name] = Present(r.occupancy(self.watermark), "direct", self.now)
        return occupancy

    def observe_and_decide(self) -> Decision:
        occupancy = self.observe()
        fleet = self.fleet()
        traffic = self.samples.window(self.now, fleet.uids(ReplicaPhase.READY))
        decision = decide(
            self.spec, self.capacity, traffic, occupancy, fleet, self.history, self.now
        )
        self.decisions.append(decision)
        self.history = decision.history
        self.apply(decision)
        return decision

    def apply(self, decision: Decision) -> None:
        self.target = decision.desired_replicas
        by_name = {r.name: r for r in self.replicas}
        for victim in decision.victims:
            by_name[victim].draining = True
        serving = sum(1 for r in self.replicas if not r.draining)
        for _ in range(self.target - serving):
            self.start(ready_in=self.start_seconds)

    def _poisson(self, mean: float) -> int:
        count, left = 0, self.random.expovariate(1.0)
        while left < mean:
            count += 1
            left += self.random.expovariate(1.0)
        return count

    def changes(self) -> list[tuple[float, int]]:
        """`(time, replicas)` of every change of the desired number."""
        found: list[tuple[float, int]] = []
        for d in self.decisions:
            if not found or found[-1][1] != d.desired_replicas:
                found.append((d.time, d.desired_replicas))
        return found
