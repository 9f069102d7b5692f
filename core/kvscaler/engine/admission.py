"""Who may run: requests whose projected peak of blocks stays within the limit; the rest queues.

A request is charged what it will hold, by policy: its worst case (`max_tokens`), what is expected
(by a `LengthEstimator`), or its prompt only. It is admitted when the projected peak of all admitted
requests and itself, plus headroom, is within the KV limit in force; under `WorstCase` no admitted
request is then ever preempted by an engine whose steps serve all that run, as ours do; another's
may outgrow the projection, which then admits nothing until it is back. What does not fit waits, in order of priority and arrival, in a
queue that is bounded in requests, tokens, bytes and time; nobody overtakes the first. Beyond that
it is refused, with a reason and the time after which, by the same projection, it would fit.

A request that could not finish even alone, or exceeds the model's context, is refused in every
mode. `Observe` otherwise admits everything at once and counts what it would have done.

Blocks that several requests hold are charged once, to the one of them that ends last.
"""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from kvscaler.engine.lengths import LengthEstimator
from kvscaler.engine.limits import BlocksOf, headroom_blocks, kv_limit_blocks, sequence_limit
from kvscaler.engine.prefix_cache import PrefixCache
from kvscaler.engine.projection import Holding, projected_peak_blocks, steps_until_fit
from kvscaler.engine.request import EngineRequest, FinishReason, RequestState
from kvscaler.protocol.limits import AdmissionLimits, AdmissionMode, ChargePolicy
from kvscaler.protocol.refusals import RefusalReason


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not served, in words, and when trying again would help."""

    request: EngineRequest
    reason: RefusalReason
    message: str
    retry_after_seconds: float | None = None
    """`None` where waiting does not help, or while no step time is known."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Answer to an offered request: admitted, queued (neither field set), or refused."""

    admitted: bool = False
    refusal: Refusal | None = None

    @property
    def queued(self) -> bool:
        """It waits; `pump` or `expire` will name it."""
        return not self.admitted and self.refusal is None


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """A request that waits for admission."""

    request: EngineRequest
    since_seconds: float
    body_bytes: int
    charge_blocks: int
    """Blocks at its expected end."""
    block_steps: float
    """Sum over its expected life of the blocks that it holds in each step."""


class Admission:
    """Admits, queues and refuses for one replica. Not thread-safe: the engine's loop owns it.

    Each admitted request must be reported by `finished` or `cancel`.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        cache: PrefixCache,
        footprint: BlocksOf,
        estimator: LengthEstimator,
    ) -> None:
        self.limits = limits
        self.step_seconds: float | None = None
        """Seconds a step takes now, kept by the caller; without it no Retry-After is named."""
        self.would_refuse: Counter[RefusalReason] = Counter()
        """Refusals that `Observe` did not make."""
        self.would_queue = 0
        """Requests that `Observe` admitted although they did not fit."""
        self._cache = cache
        self._pool = cache.pool
        self._footprint = footprint
        self._estimator = estimator
        self._admitted: dict[EngineRequest, int] = {}
        """With its footprint at its longest."""
        self._queue: list[tuple[int, int, Queued]] = []
        self._queued: dict[EngineRequest, tuple[int, int, Queued]] = {}
        self._offered = 0
        self._queue_tokens = 0
        self._queue_bytes = 0
        self._queue_block_steps = 0.0

    # Requests come and go

    def offer(self, request: EngineRequest, now_seconds: float, body_bytes: int = 0) -> Offer:
        """Admit, queue or refuse. An admitted request goes to the scheduler before its next plan."""
        if request in self._admitted or request in self._queued:
            raise ValueError(f"request {request.request_id} was offered before")
        refusal = self._never(request)
        if refusal is not None:
            return Offer(refusal=refusal)
        longest = self._longest(request)
        if self.limits.mode is not AdmissionMode.ENFORCE:
            if self.limits.mode is AdmissionMode.OBSERVE:
                self._observe(request)
            self._admitted[request] = longest
            return Offer(admitted=True)
        first = not self._queue or -request.priority < self._queue[0][0]
        if first and self._fits(request):
            self._admitted[request] = longest
            return Offer(admitted=True)
        reason = self._queue_bound(request, body_bytes)
        if reason is not None:
            return Offer(refusal=self._refuse(request, reason))
        self._enqueue(request, now_seconds, body_bytes)
        return Offer()

    def pump(self) -> list[EngineRequest]:
        """Admit from the head of the queue what fits now; submit these before the next plan."""
        admitted = []
        while self._queue and (
            self.limits.mode is not AdmissionMode.ENFORCE or self._fits(self._queue[0][2].request)
        ):
            request = self._queue[0][2].request
            self._dequeue(request)
            self._admitted[request] = self._longest(request)
            admitted.append(request)
        return admitted

    def admit_rest(self, siblings: Collection[EngineRequest]) -> list[EngineRequest]:
        """Admit the queued ones of `siblings` if nothing but siblings is admitted.

        Sequences that start only together would wait for each other for ever when they don't fit
        together. Alone in the engine they run one after the other, as the engine finds room.
        """
        if not self._admitted or not all(request in siblings for request in self._admitted):
            return []
        rest = [request for request in siblings if request in self._queued]
        for request in rest:
            self._dequeue(request)
            self._admitted[request] = self._longest(request)
        return rest

    def expire(self, now_seconds: float) -> list[Refusal]:
        """Give up on requests that waited longer than `max_wait_seconds`."""
        latest = now_seconds - self.limits.max_wait_seconds
        late = [queued.request for _, _, queued in self._queue if queued.since_seconds < latest]
        for request in late:
            self._dequeue(request)
        return [self._refuse(request, RefusalReason.QUEUE_TIMEOUT) for request in late]

    def cancel(self, request: EngineRequest) -> bool:
        """Forget a request whose client went away; false if it is not (any more) known."""
        if request in self._queued:
            self._dequeue(request)
            return True
        return self._admitted.pop(request, None) is not None

    def finished(self, request: EngineRequest) -> None:
        """Forget an admitted request that ended, and learn its length if it ended by itself."""
        del self._admitted[request]
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._estimator.observe(request.prompt_tokens, request.generated_tokens)

    # What there is

    @property
    def admitted_requests(self) -> int:
        """Admitted and not ended."""
        return len(self._admitted)

    @property
    def queued_requests(self) -> int:
        """Waiting for admission."""
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait for admission."""
        return self._queue_tokens

    @property
    def queued_blocks(self) -> int:
        """Blocks that the queue will need, each request at its expected end."""
        return sum(queued.charge_blocks for _, _, queued in self._queue)

    @property
    def limit_blocks(self) -> int:
        """The KV limit in force: the asked one, lifted to the largest accepted request."""
        accepted = [*self._admitted.values(), *(self._longest(r) for r in self._queued)]
        return kv_limit_blocks(self.limits, self._pool.capacity_blocks, accepted)

    def projected_peak_blocks(self) -> int:
        """Most blocks that the admitted requests are expected to hold at once."""
        return projected_peak_blocks(self._holdings(), self._footprint)

    # Whether a request fits

    def _fits(self, request: EngineRequest) -> bool:
        others = len(self._admitted)
        if others == 0:
            return True  # the limit in force is never below what one accepted request needs
        if others >= sequence_limit(self.limits):
            return False
        limit = self.limit_blocks - headroom_blocks(self.limits, others)
        return projected_peak_blocks(self._holdings(request), self._footprint, limit) <= limit

    def _holdings(self, candidate: EngineRequest | None = None) -> list[Holding]:
        """What the admitted requests and `candidate` hold, in order of their ends, last first."""
        requests = [*self._admitted, *([candidate] if candidate is not None else [])]
        late = [r for r in requests if r.uncomputed_tokens > 1 or r.state is RequestState.WAITING]
        backlog = sum(request.uncomputed_tokens for request in late)
        # Decodes go first and take one token each; at least one of these requests prefills.
        prefill_tokens = max(1, self.limits.step_tokens - len(requests) + 1)
        # The step that ends a prefill gives the first token already.
        delay = max(0, -(-backlog // prefill_tokens) - 1)
        behind = set(late)
        pairs = [(r, self._holding(r, delay if r in behind else 0)) for r in requests]
        pairs.sort(key=lambda pair: pair[1].end_steps, reverse=True)
        return self._share(pairs)

    def _holding(self, request: EngineRequest, delay_steps: int = 0) -> Holding:
        """What a request is charged for. Under `PromptOnly` it lasts as long, but never grows."""
        generated = request.generated_tokens
        remaining = self._expected(request) - generated
        growth = 0 if self.limits.charge is ChargePolicy.PROMPT_ONLY else remaining
        return Holding(request.prompt_tokens, generated, growth, remaining + delay_steps)

    def _share(self, pairs: list[tuple[EngineRequest, Holding]]) -> list[Holding]:
        """Count a block that several hold with the one that ends last, not with the others."""
        hits = {
            request: [b for b in self._cache.lookup(request).blocks if self._pool.references(b)]
            for request, _ in pairs
            if not request.block_table
        }
        wanted = {block for blocks in hits.values() for block in blocks}
        if not wanted and not self._pool.shared_blocks:
            return [holding for _, holding in pairs]
        seen: set[int] = set()
        result = []
        for request, holding in pairs:
            shared = 0
            for block in hits.get(request, request.block_table):
                # Sharing is of prefixes: behind the first block of its own a request has only such.
                if self._pool.references(block) < 2 and block not in wanted:
                    break
                shared += block in seen
                seen.add(block)
            result.append(holding._replace(shared_blocks=shared))
        return result

    def _expected(self, request: EngineRequest) -> int:
        """Output tokens that a request is expected to end with."""
        generated, most = request.generated_tokens, request.max_new_tokens
        if self.limits.charge is ChargePolicy.WORST_CASE:
            return most
        expected = self._estimator.expected_output_tokens(request.prompt_tokens, generated)
        return most if expected is None else min(most, max(expected, generated + 1))

    def _longest(self, request: EngineRequest) -> int:
        return self._footprint(request.prompt_tokens, request.max_new_tokens)

    # The queue

    def _enqueue(self, request: EngineRequest, now_seconds: float, body_bytes: int) -> None:
        prompt, held = request.prompt_tokens, self._holding(request)
        first = self._footprint(prompt, 0)
        last = self._footprint(prompt, held.remaining_tokens)
        prefill_steps = math.ceil(prompt / self.limits.step_tokens)
        block_steps = prefill_steps * first + held.end_steps * (first + last) / 2
        queued = Queued(request, now_seconds, body_bytes, last, block_steps)
        entry = (-request.priority, self._offered, queued)
        self._offered += 1
        insort(self._queue, entry)
        self._queued[request] = entry
        self._queue_tokens += prompt
        self._queue_bytes += body_bytes
        self._queue_block_steps += block_steps

    def _dequeue(self, request: EngineRequest) -> None:
        entry = self._queued.pop(request)
        del self._queue[bisect_left(self._queue, entry)]
        queued = entry[2]
        self._queue_tokens -= request.prompt_tokens
        self._queue_bytes -= queued.body_bytes
        self._queue_block_steps -= queued.block_steps

    def _queue_bound(self, request: EngineRequest, body_bytes: int) -> RefusalReason | None:
        limits = self.limits
        if len(self._queue) >= limits.queue_requests:
            return RefusalReason.QUEUE_FULL
        if self._queue_tokens + request.prompt_tokens > limits.queue_tokens:
            return RefusalReason.QUEUE_TOKENS_FULL
        if self._queue_bytes + body_bytes > limits.queue_bytes:
            return RefusalReason.QUEUE_BYTES_FULL
        return None

    def _observe(self, request: EngineRequest) -> None:
        enforced = self.limits.model_copy(update={"mode": AdmissionMode.ENFORCE})
        limit = kv_limit_blocks(enforced, self._pool.capacity_blocks, ())
        if self._longest(request) > limit:
            self.would_refuse[RefusalReason.NEVER_FITS] += 1
            return
        limit -= headroom_blocks(enforced, len(self._admitted))
        peak = projected_peak_blocks(self._holdings(request), self._footprint, limit)
        full = len(self._admitted) >= sequence_limit(enforced)
        self.would_queue += full or (peak > limit and len(self._admitted) > 0)

    # Refusals

    def _never(self, request: EngineRequest) -> Refusal | None:
        prompt, output = request.prompt_tokens, request.max_new_tokens
        if prompt + output > self.limits.max_request_tokens:
            return Refusal(
                request,
                RefusalReason.CONTEXT_TOO_LONG,
                f"the prompt has {prompt} tokens and max_tokens is {output}, together "
                f"{prompt + output}; at most {self.limits.max_request_tokens} fit the context",
            )
        longest = self._longest(request)
        limit = kv_limit_blocks(self.limits, self._pool.capacity_blocks, ())
        if longest > limit:
            return Refusal(
                request,
                RefusalReason.NEVER_FITS,
                f"{prompt} prompt tokens and {output} output tokens need {longest} KV blocks, but "
                f"this replica admits {limit}; shorten the prompt or lower max_tokens",
            )
        return None

    def _refuse(self, request: EngineRequest, reason: RefusalReason) -> Refusal:
        limits = self.limits
        messages = {
            RefusalReason.QUEUE_FULL: f"{len(self._queue)} requests wait already",
            RefusalReason.QUEUE_TOKENS_FULL: f"{self._queue_tokens} prompt tokens wait already, "
            f"and {limits.queue_tokens} may",
            RefusalReason.QUEUE_BYTES_FULL: f"{self._queue_bytes} bytes of requests wait already, "
            f"and {limits.queue_bytes} may",
            RefusalReason.QUEUE_TIMEOUT: f"no room was found within {limits.max_wait_seconds:g} s",
        }
        return Refusal(request, reason, messages[reason], self._retry_after_seconds(request))

    def _retry_after_seconds(self, request: EngineRequest) -> float | None:
        """When the request would fit behind everything that is admitted and queued before it."""
        if self.step_seconds is None:
            return None
        limit = self.limit_blocks
        steps = steps_until_fit(
            self._holdings(),
            self._holding(request),
            self._footprint,
            limit - headroom_blocks(self.limits, 1),
            sequence_limit(self.limits),
        )
        # The queue drains as a fluid: `limit` blocks are at work in every step.
        return (steps + self._queue_block_steps / limit) * self.step_seconds
