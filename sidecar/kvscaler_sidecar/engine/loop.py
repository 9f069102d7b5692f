"""The engine's thread: takes jobs, steps, and hands events to the HTTP loop.

The thread owns scheduler, admission and executor; nobody else touches them. What others want
comes through an inbox that is emptied between two steps, so an abort frees its blocks before the
next one. What the thread has to say goes to the HTTP loop once a step, in one call, and its
numbers are published as one immutable look. So neither loop ever waits for the other.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from kvscaler.budget import Footprint
from kvscaler.engine.admission import Refusal as AdmissionRefusal
from kvscaler.engine.replica import ReplicaEngine
from kvscaler.engine.request import EngineRequest, FinishReason
from kvscaler.engine.step import Outcome, StepPlan
from kvscaler.performance import StepCostTracker
from kvscaler.protocol.limits import AdmissionLimits, AdmissionMode, LimitsPut, LimitsReport
from kvscaler.protocol.refusals import RefusalReason
from kvscaler.protocol.state import StepCosts

from kvscaler_sidecar.admin.limits import LimitsInForce
from kvscaler_sidecar.engine.job import (
    Admitted,
    Event,
    Finished,
    Job,
    Mailbox,
    Queued,
    Rejected,
)
from kvscaler_sidecar.engine.output import OutputText
from kvscaler_sidecar.executors.seam import Executor, SampledToken, Tokenizer
from kvscaler_sidecar.metrics import Latencies
from kvscaler_sidecar.server.errors import Refusal, refusal_by_admission
from kvscaler_sidecar.state import EngineLook

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

IDLE_TURN_SECONDS = 0.2
"""How often an idle thread turns, for its heartbeat and its look."""
QUEUED_TURN_SECONDS = 0.05
STOP_SECONDS = 2.0
"""How long `stop` waits for a step; the thread is a daemon and ends with the process."""
LOOK_SECONDS = 0.05
"""While busy, a look is taken after the first step that ends this long after the last look."""


class EngineLoop:
    """A paged engine that serves. `start` once, `stop` once; all other methods are thread-safe."""

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        own_limits: AdmissionLimits,
        http_loop: asyncio.AbstractEventLoop,
        latencies: Latencies,
        *,
        prefix_caching: bool = True,
        step_costs: StepCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = ReplicaEngine(
            own_limits,
            executor.kv_blocks,
            executor.block_tokens,
            Footprint(executor.block_tokens).blocks,
            prefix_caching=prefix_caching,
        )
        self._executor = executor
        self._tokenizer = tokenizer
        self._http_loop = http_loop
        self._latencies = latencies
        self._clock = clock
        self._step_costs = None if step_costs is None else StepCostTracker(step_costs)
        self._limits = LimitsInForce(own_limits)
        self._jobs: dict[EngineRequest, Job] = {}
        """Offered and not ended, queued ones included."""
        self._outputs: dict[EngineRequest, OutputText] = {}
        """Admitted and not ended."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._events: list[tuple[Mailbox, int, Event]] = []
        self._beat = clock()
        self._step_ended: float | None = None
        """When the last step ended, while there is work: the next one's time counts from there."""
        self._looked_at = clock()
        self.failure: str | None = None
        """Why the thread ended, if an error ended it."""
        self.max_request_tokens = 0
        """Longest prompt plus output that the limits in force admit."""
        self._limits_changed()
        self.look = self._take_look()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # From the HTTP loop

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that is under way."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(STOP_SECONDS)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Offer jobs for admission; the answers come to their mailboxes."""
        self._post(lambda: self._offer(jobs))

    def abort(self, jobs: Sequence[Job]) -> None:
        """End jobs that nobody waits for; finished ones are left alone."""
        self._post(lambda: self._abort(jobs))

    def call(self, question: Callable[[], Answer]) -> "Future[Answer]":
        """Run `question` in the engine's thread between two steps."""
        future: Future[Answer] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(question())
            except Exception as error:
                future.set_exception(error)

        self._post(answer)
        return future

    @property
    def heartbeat_age_seconds(self) -> float:
        """Time since the thread last turned."""
        return max(0.0, self._clock() - self._beat)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    # In the engine's thread, for `call`

    def limits_report(self) -> LimitsReport:
        """The limits in force; only by `call`."""
        return self._limits.report(self._engine.pending_kv_blocks)

    def put_limits(self, message: LimitsPut) -> LimitsReport:
        """Apply other limits; raises `HashConflict`; only by `call`."""
        self._engine.set_limits(self._limits.put(message))
        self._limits_changed()
        return self.limits_report()

    def _limits_changed(self) -> None:
        applied = self._limits.applied
        most = applied.max_request_tokens
        if applied.mode is AdmissionMode.ENFORCE:
            most = min(most, applied.kv_blocks * self._executor.block_tokens)
        self.max_request_tokens = most

    # The thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            log.exception("the engine failed")
            self._fail(f"{type(error).__name__}: {error}")

    def _turn(self) -> bool:
        """One round: what came in, what waited too long, what fits, a step, what to tell."""
        self._beat = self._clock()
        with self._wake:
            if self._stopping:
                return False
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            command()
        self._admit_and_expire()
        now = self._clock()
        plan = self._engine.plan(now)
        self._flush()  # a refusal, or an admission, must not wait for a step
        if plan.chunks:
            self._look_if_due(
                bool(commands)
            )  # a step may take long: what it works on is told first
            self._step(plan)
            self._flush()
            self._look_if_due(False)
            return True
        self._step_ended = None
        self._engine.commit(plan, (), now, 0.0)
        self.look = self._take_look()
        self._sleep()
        return True

    def _look_if_due(self, changed: bool) -> None:
        if changed or self._clock() - self._looked_at >= LOOK_SECONDS:
            self.look = self._take_look()

    def _sleep(self) -> None:
        turn = QUEUED_TURN_SECONDS if self._engine.admission.queued_requests else IDLE_TURN_SECONDS
        with self._wake:
            if not self._inbox and not self._stopping:
                self._wake.wait(turn)

    def _offer(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            request = job.request
            offer = self._engine.offer(request, self._clock(), job.held_bytes)
            if offer.refusal is not None:
                self._reject(job, offer.refusal)
                continue
            self._jobs[request] = job
            if offer.admitted:
                self._start(job)
            else:
                self._tell(job, Queued())

    def _start(self, job: Job) -> None:
        request = job.request
        self._latencies.prompt_length.observe(request.prompt_tokens)
        self._outputs[request] = OutputText(job, self._tokenizer)
        self._executor.add(request, job.sampling)
        self._tell(job, Admitted())

    def _reject(self, job: Job, refusal: AdmissionRefusal) -> None:
        self._tell(job, Rejected(refusal_by_admission(refusal)))

    def _admit_and_expire(self) -> None:
        now = self._clock()
        for refusal in self._engine.expire(now):
            self._reject(self._jobs.pop(refusal.request), refusal)
        for request in self._engine.pump(now):
            self._start(self._jobs[request])

    def _abort(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            request = job.request
            if self._jobs.pop(request, None) is None:
                continue
            self._engine.abort(request)
            if self._outputs.pop(request, None) is not None:
                self._executor.remove(request)

    def _step(self, plan: StepPlan) -> None:
        """Run and book a step. Its time counts from the end of the one before, while there is
        work: what the thread does in between is a part of what a token takes."""
        began = self._clock() if self._step_ended is None else self._step_ended
        tokens = self._executor.execute(plan)
        now = self._step_ended = self._clock()
        outcomes: list[Outcome] = []
        sampled = iter(tokens)
        for chunk in plan.chunks:
            if chunk.samples:
                outcomes.append(self._take_token(chunk.request, next(sampled), now))
        for request in self._engine.commit(plan, outcomes, now, now - began):
            self._finish(request, now)
        if self._step_costs is not None:
            self._step_costs.observe(
                plan.decode_sequences,
                plan.context_tokens,
                plan.prefill_tokens,
                now - began,
                prefill_pairs=plan.prefill_pairs,
            )

    def _take_token(self, request: EngineRequest, token: SampledToken, now: float) -> Outcome:
        job = self._jobs[request]
        if job.first_token_seconds is None:
            job.first_token_seconds = now
        else:
            self._latencies.inter_token.observe(now - job.last_token_seconds)
        job.last_token_seconds = now
        outcome, produced = self._outputs[request].take(token)
        self._tell(job, produced)
        return outcome

    def _finish(self, request: EngineRequest, now: float) -> None:
        job = self._jobs.pop(request)
        output = self._outputs.pop(request)
        self._executor.remove(request)
        self._latencies.end_to_end.observe(now - request.arrival_seconds)
        self._latencies.output_length.observe(request.generated_tokens)
        self._tell(job, _ending(request, output.finish()))

    def _fail(self, message: str) -> None:
        """Tell everyone that the engine is gone; the process ends and is started again."""
        self.failure = message
        for request, job in list(self._jobs.items()):
            if request in self._outputs:
                self._engine.abort(request, FinishReason.ERROR)
                self._tell(job, _ending(request, "", f"The engine failed: {message}"))
            else:
                self._engine.abort(request, FinishReason.ERROR)
                self._tell(job, Rejected(_engine_failed(message)))
        self._jobs.clear()
        self._outputs.clear()
        self.look = self._take_look()
        self._flush()
        self._answer_after_failure()

    def _answer_after_failure(self) -> None:
        """Jobs that arrive until the process has ended are refused, not left waiting."""
        message = self.failure or ""

        def refuse(jobs: Sequence[Job]) -> None:
            for job in jobs:
                self._tell(job, Rejected(_engine_failed(message)))

        self._offer = refuse  # type: ignore[method-assign]
        while True:
            with self._wake:
                if self._stopping:
                    return
                commands = list(self._inbox)
                self._inbox.clear()
                if not commands:
                    self._wake.wait(IDLE_TURN_SECONDS)
            for command in commands:
                command()
            self._flush()

    # What it says

    def _tell(self, job: Job, event: Event) -> None:
        self._events.append((job.mailbox, job.index, event))

    def _flush(self) -> None:
        if not self._events:
            return
        events, self._events = self._events, []
        try:
            self._http_loop.call_soon_threadsafe(_deliver, events)
        except RuntimeError:
            # The HTTP loop is closed: the process is ending, and nobody waits for events.
            log.debug("events dropped: the HTTP loop is closed")

    def _take_look(self) -> EngineLook:
        self._looked_at = self._clock()
        return EngineLook(
            observed_at=time.time(),
            occupancy=self._engine.occupancy(),
            limits=self.limits_report(),
            traffic=self._engine.traffic(),
            in_flight=self._engine.in_flight(),
            step_costs=None if self._step_costs is None else self._step_costs.costs,
        )


def _deliver(events: list[tuple[Mailbox, int, Event]]) -> None:
    for mailbox, index, event in events:
        mailbox.put(index, event)


def _ending(request: EngineRequest, text: str, message: str = "") -> Finished:
    assert request.finish_reason is not None
    return Finished(
        reason=request.finish_reason,
        text=text,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        output_tokens=request.generated_tokens,
        message=message,
    )


def _engine_failed(message: str) -> Refusal:
    return Refusal(
        RefusalReason.ENGINE_FAILED,
        f"The engine failed and is being restarted: {message}",
        retry_after_seconds=5,
        counted=True,
    )
