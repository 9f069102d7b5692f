"""What a gate decides for an engine that it can't look into: the books of `ReplicaEngine`, counted.

Admission, its projection and the counts are the same code as before our own engine. What differs
is where facts come from: a prompt's tokens are estimated until the answer's `usage` says them,
output is counted in chunks, and a step is the time between two tokens of a stream.

One HTTP request may want several sequences; they are forwarded together, once all are admitted.
All times are seconds of one monotonic clock of the caller's. Not thread-safe: one loop owns it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvscaler.engine.accounting import TrafficRecorder
from kvscaler.engine.admission import Admission, Refusal
from kvscaler.engine.block_pool import BlockPool
from kvscaler.engine.counted import CountedRequest
from kvscaler.engine.lengths import LengthEstimator, RunningMean
from kvscaler.engine.limits import BlocksOf, kv_limit_blocks
from kvscaler.engine.prefix_cache import PrefixCache
from kvscaler.engine.replica import STEP_SECONDS_WEIGHT
from kvscaler.engine.request import EngineRequest, FinishReason, RequestState
from kvscaler.protocol.limits import AdmissionLimits
from kvscaler.protocol.refusals import RefusalReason


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What the engine behind the gate says that it has."""

    kv_blocks: int
    block_tokens: int
    max_sequences: int
    step_tokens: int
    max_context_tokens: int


@dataclass(slots=True, eq=False)
class GatedRequest:
    """One HTTP request and its sequences."""

    sequences: tuple[CountedRequest, ...]
    choices: int
    """Sequences of each prompt."""
    waiting: int = 0
    """Sequences that are queued."""
    forwarded_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float = 0.0
    seen_tokens: int = 0
    """Output tokens of all sequences that were seen in the stream."""

    @property
    def admitted(self) -> bool:
        """Whether it may be forwarded."""
        return self.waiting == 0


class GatedEngine:
    """Admission and books of one engine behind a gate."""

    def __init__(
        self,
        limits: AdmissionLimits,
        capacity_blocks: int,
        footprint: BlocksOf,
        estimator: LengthEstimator | None = None,
    ) -> None:
        # Nobody takes blocks from this pool: it only says how many there are.
        self._pool = BlockPool(1)
        self._footprint = footprint
        self._pool.capacity_blocks = capacity_blocks
        self.admission = Admission(
            limits,
            PrefixCache(self._pool, 1, enabled=False),
            self.blocks_of,
            RunningMean() if estimator is None else estimator,
        )
        self.recorder = TrafficRecorder()
        self._live: dict[EngineRequest, GatedRequest] = {}
        """By sequence, queued ones included."""
        self._step_from_streams = False

    def blocks_of(self, prompt_tokens: int, generated_tokens: int) -> int:
        """Blocks of the engine that so many tokens need."""
        return self._footprint(prompt_tokens, generated_tokens)

    # Requests

    def request(
        self,
        request_id: str,
        prompts: Sequence[int],
        max_new_tokens: Sequence[int],
        choices: int,
        now_seconds: float,
        *,
        streams: bool,
    ) -> GatedRequest:
        """A request with `choices` sequences for each prompt, given in tokens; not offered yet."""
        return GatedRequest(
            tuple(
                CountedRequest(
                    request_id=f"{request_id}-{index}",
                    token_ids=[],
                    prompt_tokens=prompt,
                    max_new_tokens=most,
                    arrival_seconds=now_seconds,
                    blocks_of=self.blocks_of,
                    streams=streams,
                )
                for index, (prompt, most) in enumerate(zip(prompts, max_new_tokens, strict=True))
                for _ in range(choices)
            ),
            choices,
        )

    @property
    def worst_case_tokens(self) -> int:
        """Tokens of the longest sequence that the limits in force admit: at least 1."""
        limits = self.admission.limits
        blocks = kv_limit_blocks(limits, self._pool.capacity_blocks, ())
        return max(1, min(limits.max_request_tokens, self._tokens_in(blocks)))

    def _tokens_in(self, blocks: int) -> int:
        """Most tokens that `blocks` hold, by bisection of a footprint that never falls."""
        low, high = 0, self.admission.limits.max_request_tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_of(middle, 0) <= blocks else (low, middle - 1)
        return low

    def offer(self, gated: GatedRequest, now_seconds: float, body_bytes: int = 0) -> Refusal | None:
        """Admit, queue or refuse all sequences; `gated.admitted` tells the first two apart."""
        share = body_bytes // len(gated.sequences)
        for position, sequence in enumerate(gated.sequences):
            answer = self.admission.offer(sequence, now_seconds, share)
            self.recorder.arrived(sequence)
            if answer.refusal is not None:
                self.recorder.refuse(answer.refusal.reason)
                self._drop(gated.sequences[:position])
                return answer.refusal
            self._live[sequence] = gated
            if answer.admitted:
                self._start(sequence, now_seconds)
            else:
                gated.waiting += 1
        return None

    def pump(self, now_seconds: float) -> list[GatedRequest]:
        """Admit from the queue what fits now; the requests that may be forwarded with it."""
        ready: list[GatedRequest] = []
        while True:
            fitting = self.admission.pump()
            if not fitting:
                fitting = self._rest_of_first()
            if not fitting:
                return ready
            for sequence in fitting:
                gated = self._live[sequence]
                self._start(sequence, now_seconds)
                gated.waiting -= 1
                if gated.admitted:
                    ready.append(gated)

    def _rest_of_first(self) -> list[EngineRequest]:
        for gated in self._live.values():
            if 0 < gated.waiting < len(gated.sequences):
                return self.admission.admit_rest(gated.sequences)
        return []

    def expire(self, now_seconds: float) -> list[tuple[GatedRequest, Refusal]]:
        """Refuse what waited too long, with all its sequences."""
        refused: dict[GatedRequest, Refusal] = {}
        for refusal in self.admission.expire(now_seconds):
            self.recorder.refuse(refusal.reason)
            refused.setdefault(self._live.pop(refusal.request), refusal)
        for gated in refused:
            self._drop(gated.sequences)
        return list(refused.items())

    def abort(self, gated: GatedRequest, reason: FinishReason = FinishReason.ABORT) -> None:
        """End it: `ABORT` is a client that left, `ERROR` an engine that broke. Twice is once."""
        self._drop(gated.sequences, reason)

    def turn_away(self, gated: GatedRequest, reason: RefusalReason) -> None:
        """The engine refused it, for `reason`."""
        for sequence in self._ended(gated.sequences):
            self.admission.cancel(sequence)
            self.recorder.turn_away(sequence, reason)
            sequence.state = RequestState.FINISHED

    def forwarded(self, gated: GatedRequest, now_seconds: float) -> None:
        """It is on its way to the engine."""
        gated.forwarded_seconds = now_seconds

    def progress(self, gated: GatedRequest, output_tokens: int, now_seconds: float) -> None:
        """So many output tokens of all sequences together have come by now."""
        if gated.first_token_seconds is None:
            gated.first_token_seconds = now_seconds
        gated.last_token_seconds = now_seconds
        gated.seen_tokens = output_tokens
        self._count(gated, output_tokens, now_seconds)

    def tick(self, now_seconds: float) -> None:
        """Let answers grow that can't be watched, by the time that a step takes."""
        step = self.admission.step_seconds
        if step is None or step <= 0:
            return
        for gated in dict.fromkeys(self._live.values()):
            if gated.forwarded_seconds is not None and not gated.sequences[0].streams:
                steps = int((now_seconds - gated.forwarded_seconds) / step)
                self._count(gated, steps * len(gated.sequences), now_seconds)

    def _count(self, gated: GatedRequest, output_tokens: int, now_seconds: float) -> None:
        each = -(-output_tokens // len(gated.sequences))
        for sequence in gated.sequences:
            # As long as it runs there is a token to come.
            most = max(0, sequence.max_new_tokens - 1)
            sequence.counted_tokens = max(sequence.counted_tokens, min(each, most))
        self.recorder.observe(gated.sequences, now_seconds)

    def correct_prompt(self, gated: GatedRequest, prompt_tokens: int) -> None:
        """The engine counted so many prompt tokens, each prompt once for all its choices."""
        estimated = sum(s.prompt_tokens for s in gated.sequences) / gated.choices
        for sequence in gated.sequences:
            share = sequence.prompt_tokens / estimated if estimated else 0.0
            sequence.prompt_tokens = max(1, round(prompt_tokens * share))

    def finish(
        self, gated: GatedRequest, now_seconds: float, output_tokens: int | None = None
    ) -> bool:
        """It was answered in full, with so many output tokens in all its sequences.

        Where nobody said how many (`None`), those of a stream stand as counted. False if its
        lengths are not known: it then counts in no statistics.
        """
        if output_tokens is None:
            if gated.first_token_seconds is not None:
                output_tokens = gated.seen_tokens
            elif all(s.max_new_tokens == 0 for s in gated.sequences):
                output_tokens = 0
        if output_tokens is None:
            self.forget(gated)
            return False
        sequences = self._ended(gated.sequences)
        self._learn_step(gated, output_tokens / len(gated.sequences), now_seconds)
        each, more = divmod(output_tokens, len(gated.sequences))
        for position, sequence in enumerate(sequences):
            sequence.counted_tokens = each + (position < more)
            # A request that makes no output says nothing about how long outputs are.
            sequence.finish_reason = FinishReason.STOP if sequence.max_new_tokens else None
            self.admission.finished(sequence)
            self.recorder.finish(sequence, now_seconds)
            sequence.state = RequestState.FINISHED
        return True

    def forget(self, gated: GatedRequest) -> None:
        """It was answered in full, and nobody knows how long it was."""
        for sequence in self._ended(gated.sequences):
            self.admission.cancel(sequence)
            self.recorder.forget(sequence)
            sequence.state = RequestState.FINISHED

    def _learn_step(self, gated: GatedRequest, output_tokens: float, now_seconds: float) -> None:
        before = self.admission.step_seconds
        if gated.first_token_seconds is not None and output_tokens > 1:
            took = gated.last_token_seconds - gated.first_token_seconds
            step = took / (output_tokens - 1)
            if not self._step_from_streams:
                before, self._step_from_streams = None, True
        elif gated.forwarded_seconds is not None and output_tokens >= 1:
            if self._step_from_streams:
                return
            step = (now_seconds - gated.forwarded_seconds) / output_tokens
        else:
            return
        self.admission.step_seconds = (
            step if before is None else before + STEP_SECONDS_WEIGHT * (step - before)
        )

    # Limits and reports

    @property
    def limits(self) -> AdmissionLimits:
        """The limits in force."""
        return self.admission.limits

    def set_limits(self, limits: AdmissionLimits) -> None:
        """Enforce other limits from now on; nothing that was accepted is dropped."""
        self.admission.limits = limits

    def set_capacity(self, capacity_blocks: int, footprint: BlocksOf) -> None:
        """The engine came back with another pool."""
        self._pool.capacity_blocks, self._footprint = capacity_blocks, footprint

    @property
    def held_blocks(self) -> int:
        """Blocks that the admitted requests hold, as counted here."""
        return sum(sequence.held_blocks for sequence in self._live)

    @property
    def pending_kv_blocks(self) -> int | None:
        """Held blocks while they exceed an enforced `kv_blocks`; `None` once within it."""
        held = self.held_blocks
        return held if held > kv_limit_blocks(self.limits, self._pool.capacity_blocks, ()) else None

    @property
    def busy(self) -> bool:
        """Whether any request is queued or admitted."""
        return bool(self._live)

    # Sequences

    def _start(self, sequence: EngineRequest, now_seconds: float) -> None:
        self.recorder.admit(sequence, now_seconds)
        sequence.state = RequestState.RUNNING
        self.recorder.observe([sequence], now_seconds)

    def _ended(self, sequences: Iterable[CountedRequest]) -> list[CountedRequest]:
        """Those of `sequences` that had not ended, which have now."""
        return [s for s in sequences if self._live.pop(s, None) is not None]

    def _drop(
        self, sequences: Iterable[CountedRequest], reason: FinishReason = FinishReason.ABORT
    ) -> None:
        for sequence in self._ended(sequences):
            self.admission.cancel(sequence)
            if reason is FinishReason.ERROR:
                self.recorder.fail(sequence)
            else:
                self.recorder.cancel(sequence)
            sequence.state = RequestState.FINISHED
