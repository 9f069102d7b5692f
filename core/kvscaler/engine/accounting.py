"""What a replica counts about its requests, so that sidecar and simulator report the same.

Counts are cumulative; whoever reads them subtracts. How many blocks a request holds over its life
is integrated here, per request, because demand is `arrival rate x E[integral of blocks dt]`: a
sample of the pool now and then would miss what short requests hold.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from kvscaler.engine.request import EngineRequest
from kvscaler.engine.step import StepPlan
from kvscaler.protocol.refusals import RefusalReason
from kvscaler.protocol.state import (
    LATENCY_BUCKETS_SECONDS,
    Histogram,
    InFlight,
    TrafficCounters,
)


class LatencyCounts:
    """Counts by `LATENCY_BUCKETS_SECONDS`; a value on a bound belongs to the bucket it ends."""

    __slots__ = ("counts", "sum_seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one latency; a clock that stepped back counts as no time."""
        seconds = max(0.0, seconds)
        self.counts[bisect_left(LATENCY_BUCKETS_SECONDS, seconds)] += 1
        self.sum_seconds += seconds

    def report(self) -> Histogram:
        """The counts as a message."""
        return Histogram(counts=tuple(self.counts), sum_seconds=self.sum_seconds)


class _Life:
    """What is known of one admitted request, and its two integrals up to `seen_seconds`."""

    __slots__ = (
        "block_seconds",
        "block_squared_seconds",
        "blocks",
        "first_token_seconds",
        "seen_seconds",
    )

    def __init__(self, now_seconds: float) -> None:
        self.seen_seconds = now_seconds
        self.blocks = 0
        self.block_seconds = 0.0
        self.block_squared_seconds = 0.0
        self.first_token_seconds: float | None = None

    def hold(self, blocks: int, now_seconds: float) -> None:
        """Integrate up to now, with the blocks held so far, and hold `blocks` from now on.

        Blocks that came one by one over several steps (a stretch that a simulator skipped) grew
        evenly, so the integrals are those of a ramp.
        """
        seconds = max(0.0, now_seconds - self.seen_seconds)
        old, self.blocks, self.seen_seconds = self.blocks, blocks, now_seconds
        if 0 < old < blocks - 1:
            self.block_seconds += seconds * (old + blocks) / 2
            self.block_squared_seconds += seconds * (old * old + old * blocks + blocks * blocks) / 3
        else:
            self.block_seconds += seconds * old
            self.block_squared_seconds += seconds * old * old


class TrafficRecorder:
    """Turns what happens to requests into `TrafficCounters` and `InFlight`."""

    def __init__(self) -> None:
        self.refused: Counter[RefusalReason] = Counter()
        self.time_to_first_token = LatencyCounts()
        self.time_per_output_token = LatencyCounts()
        self.queue_wait = LatencyCounts()
        self._sums: Counter[str] = Counter()
        self._seconds: dict[str, float] = dict.fromkeys(
            ("finished_block_seconds", "finished_block_squared_seconds", "step_seconds"), 0.0
        )
        self._live: dict[EngineRequest, _Life] = {}

    # A request's life

    def arrived(self, request: EngineRequest) -> None:
        """Every well-formed request once, before it is admitted, queued or refused."""
        prompt = request.prompt_tokens
        self._sums["arrivals"] += 1
        self._sums["arrival_prompt_tokens"] += prompt
        self._sums["arrival_prompt_tokens_squared"] += prompt * prompt
        self._sums["arrival_max_tokens"] += request.max_new_tokens

    def refuse(self, reason: RefusalReason) -> None:
        """A request is refused: at the door, by a bound of the queue or after waiting in it."""
        self.refused[reason] += 1

    def admit(self, request: EngineRequest, now_seconds: float) -> None:
        """A request leaves the queue, or passes it."""
        self._sums["admitted"] += 1
        self.queue_wait.add(now_seconds - request.arrival_seconds)
        self._live[request] = _Life(now_seconds)

    def step(self, plan: StepPlan, seconds: float) -> None:
        """A step of the engine that took `seconds`."""
        decodes = plan.decode_sequences
        self._sums["steps"] += 1
        self._sums["decode_tokens"] += decodes
        self._sums["prefill_tokens"] += sum(c.length for c in plan.chunks) - decodes
        self._seconds["step_seconds"] += seconds

    def observe(self, requests: Iterable[EngineRequest], now_seconds: float) -> None:
        """Look at requests whose blocks or tokens may have changed; after each plan and commit."""
        for request in requests:
            life = self._live.get(request)
            if life is None:
                continue
            blocks = request.held_blocks
            if blocks != life.blocks:
                life.hold(blocks, now_seconds)
            if life.first_token_seconds is None and request.has_first_token:
                life.first_token_seconds = now_seconds
                self.time_to_first_token.add(now_seconds - request.arrival_seconds)

    def finish(self, request: EngineRequest, now_seconds: float) -> None:
        """A request ended by itself: it counts for lengths and for the blocks that it held."""
        self.observe([request], now_seconds)
        life = self._live.pop(request)
        life.hold(0, now_seconds)
        prompt, output = request.prompt_tokens, request.generated_tokens
        for name, amount in (
            ("finished", 1),
            ("finished_prompt_tokens", prompt),
            ("finished_prompt_tokens_squared", prompt * prompt),
            ("finished_output_tokens", output),
            ("finished_output_tokens_squared", output * output),
            ("finished_prompt_output_tokens", prompt * output),
        ):
            self._sums[name] += amount
        self._seconds["finished_block_seconds"] += life.block_seconds
        self._seconds["finished_block_squared_seconds"] += life.block_squared_seconds
        if output > 1 and life.first_token_seconds is not None:
            self.time_per_output_token.add((now_seconds - life.first_token_seconds) / (output - 1))

    def cancel(self, request: EngineRequest) -> None:
        """A client went away from a request, queued or admitted."""
        self._live.pop(request, None)
        self._sums["cancelled"] += 1

    def turn_away(self, request: EngineRequest, reason: RefusalReason) -> None:
        """The engine behind a gate refused a request that the gate had admitted."""
        self._live.pop(request, None)
        self.refused[reason] += 1

    def forget(self, request: EngineRequest) -> None:
        """A request was answered, and nobody knows how long the answer was.

        It counts in no sum, as a length that is not known would count as 0.
        """
        self._live.pop(request, None)

    def fail(self, request: EngineRequest) -> None:
        """The engine could not finish a request that it had accepted."""
        self._live.pop(request, None)
        self._sums["failed"] += 1

    # Reports

    def counters(
        self, *, preemptions: int = 0, prefix_queried_tokens: int = 0, prefix_hit_tokens: int = 0
    ) -> TrafficCounters:
        """All counts so far, with those that scheduler and prefix cache keep."""
        return TrafficCounters(
            **self._sums,
            **self._seconds,
            refused={reason.value: count for reason, count in self.refused.items()},
            preemptions=preemptions,
            prefix_queried_tokens=prefix_queried_tokens,
            prefix_hit_tokens=prefix_hit_tokens,
            time_to_first_token=self.time_to_first_token.report(),
            time_per_output_token=self.time_per_output_token.report(),
            queue_wait=self.queue_wait.report(),
        )

    def in_flight(self) -> InFlight:
        """Admitted requests that have not ended."""
        generated = [request.generated_tokens for request in self._live]
        return InFlight(
            requests=len(generated),
            prompt_tokens=sum(request.prompt_tokens for request in self._live),
            generated_tokens=sum(generated),
            generated_tokens_squared=sum(tokens * tokens for tokens in generated),
        )
