"""One replica's decisions in one object: admission, scheduler and counts, wired once.

The engine loop of a sidecar and a simulated replica call the same methods in the same order:

    offer*  abort*  expire  plan ─► (an executor runs it) ─► commit  …

All times are seconds of one monotonic clock of the caller's; requests carry their arrival in it.
Not thread-safe: one loop owns it.
"""

from collections.abc import Sequence

from kvscaler.engine.accounting import TrafficRecorder
from kvscaler.engine.admission import Admission, Offer, Refusal
from kvscaler.engine.block_pool import BlockPool
from kvscaler.engine.lengths import LengthEstimator, RunningMean
from kvscaler.engine.limits import BlocksOf
from kvscaler.engine.prefix_cache import PrefixCache
from kvscaler.engine.request import EngineRequest, FinishReason
from kvscaler.engine.scheduler import Scheduler
from kvscaler.engine.step import Outcome, StepPlan
from kvscaler.protocol.limits import AdmissionLimits
from kvscaler.protocol.state import InFlight, OccupancyReport, TrafficCounters

STEP_SECONDS_WEIGHT = 0.1
"""Weight of the newest step in the smoothed step time that a Retry-After is computed with."""


class ReplicaEngine:
    """Admission in front of a scheduler over one block pool."""

    def __init__(
        self,
        limits: AdmissionLimits,
        capacity_blocks: int,
        block_tokens: int,
        footprint: BlocksOf,
        *,
        prefix_caching: bool = True,
        estimator: LengthEstimator | None = None,
    ) -> None:
        self.pool = BlockPool(capacity_blocks)
        self.cache = PrefixCache(self.pool, block_tokens, prefix_caching)
        self.scheduler = Scheduler(self.pool, self.cache, limits, footprint)
        self.admission = Admission(
            limits, self.cache, footprint, RunningMean() if estimator is None else estimator
        )
        self.recorder = TrafficRecorder()

    # Requests

    def offer(self, request: EngineRequest, now_seconds: float, body_bytes: int = 0) -> Offer:
        """Admit, queue or refuse a well-formed request."""
        answer = self.admission.offer(request, now_seconds, body_bytes)
        self.recorder.arrived(request)
        if answer.admitted:
            self._start(request, now_seconds)
        elif answer.refusal is not None:
            self.recorder.refuse(answer.refusal.reason)
        return answer

    def expire(self, now_seconds: float) -> list[Refusal]:
        """Refuse what waited too long; call it at least as often as clients should learn of it."""
        refusals = self.admission.expire(now_seconds)
        for refusal in refusals:
            self.recorder.refuse(refusal.reason)
        return refusals

    def abort(self, request: EngineRequest, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a queued or admitted request; its blocks are free now or after the running step.

        `ABORT` is a client that went away, `ERROR` our own failure. False if it is not here.
        """
        if not self.admission.cancel(request):
            return False
        self.scheduler.abort(request, reason)
        if reason is FinishReason.ERROR:
            self.recorder.fail(request)
        else:
            self.recorder.cancel(request)
        return True

    # Steps

    def pump(self, now_seconds: float) -> list[EngineRequest]:
        """Admit from the queue what fits now; `plan` does it too, for callers that need no names."""
        admitted = self.admission.pump()
        for request in admitted:
            self._start(request, now_seconds)
        return admitted

    def plan(self, now_seconds: float) -> StepPlan:
        """Admit what fits now and decide the next step. No chunks: there is nothing to do."""
        self.pump(now_seconds)
        plan = self.scheduler.plan()
        self.recorder.observe(plan.preempted, now_seconds)
        self.recorder.observe((chunk.request for chunk in plan.chunks), now_seconds)
        return plan

    def commit(
        self,
        plan: StepPlan,
        outcomes: Sequence[Outcome],
        now_seconds: float,
        step_seconds: float,
    ) -> list[EngineRequest]:
        """Book a step that took `step_seconds`; the requests that finished with it."""
        finished = self.scheduler.commit(plan, outcomes)
        if plan.chunks:
            before = self.admission.step_seconds
            self.admission.step_seconds = (
                step_seconds
                if before is None
                else before + STEP_SECONDS_WEIGHT * (step_seconds - before)
            )
            self.recorder.step(plan, step_seconds)
        for request in finished:
            self.admission.finished(request)
            if request.finish_reason is FinishReason.ERROR:
                self.recorder.fail(request)
            else:
                self.recorder.finish(request, now_seconds)
        self.recorder.observe((chunk.request for chunk in plan.chunks), now_seconds)
        return finished

    @property
    def busy(self) -> bool:
        """Whether a plan would have something to do."""
        return self.admission.queued_requests > 0 or self.admission.admitted_requests > 0

    # Limits and reports

    @property
    def limits(self) -> AdmissionLimits:
        """The limits in force."""
        return self.scheduler.limits

    def set_limits(self, limits: AdmissionLimits) -> None:
        """Enforce other limits from now on; nothing that was accepted is dropped."""
        self.admission.limits = limits
        self.scheduler.set_limits(limits)

    @property
    def pending_kv_blocks(self) -> int | None:
        """Referenced blocks while they exceed an enforced `kv_blocks`; `None` once within it."""
        return self.scheduler.pending_kv_blocks

    def occupancy(self) -> OccupancyReport:
        """Use of the pool and of the queue, exact at every step."""
        use, admission = self.scheduler.occupancy(), self.admission
        return OccupancyReport(
            capacity_blocks=use.capacity_blocks,
            referenced_blocks=use.referenced_blocks,
            reserved_blocks=max(use.referenced_blocks, admission.projected_peak_blocks()),
            cached_blocks=use.cached_blocks,
            free_blocks=use.free_blocks,
            running_requests=use.running_requests,
            waiting_requests=use.waiting_requests + admission.queued_requests,
            waiting_tokens=admission.queued_tokens,
            waiting_blocks=admission.queued_blocks,
        )

    def traffic(self) -> TrafficCounters:
        """Cumulative counts since this object was made."""
        return self.recorder.counters(
            preemptions=self.scheduler.preemptions,
            prefix_queried_tokens=self.cache.queried_tokens,
            prefix_hit_tokens=self.cache.hit_tokens,
        )

    def in_flight(self) -> InFlight:
        """Admitted requests that have not ended."""
        return self.recorder.in_flight()

    def _start(self, request: EngineRequest, now_seconds: float) -> None:
        self.recorder.admit(request, now_seconds)
        self.scheduler.submit(request)
