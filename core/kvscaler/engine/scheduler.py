"""What runs in the next step: one token budget for decodes and chunked prefills.

There are no phases. Each running request has known tokens and computed tokens, and a step gives
it some of the difference:

1. every decode gets its one token first, so that a long prompt never stalls a stream;
2. the rest of the budget goes to prefills, as chunks, in order;
3. then waiting requests start, each with blocks for its *whole* known prompt, so that a prefill
   never runs out of blocks half way. Nothing starts in a step that preempted.

Order is by priority, then by submission, for running and waiting alike; a preempted request keeps
its place and so stands at the front of its priority. Only a decode takes blocks while it runs; when
none is available the last request in the order is preempted: all its blocks are freed, and it is
computed again later, often from its own cached prefix. The first in the order is never preempted
and always advances, so every request finishes.

`plan` and `commit` alternate. A request that is aborted in between keeps its blocks until the
commit, because the executor may still write to them.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvscaler.engine import skipping
from kvscaler.engine.block_pool import BlockPool
from kvscaler.engine.limits import BlocksOf, headroom_blocks, kv_limit_blocks, sequence_limit
from kvscaler.engine.prefix_cache import PrefixCache, PrefixHit
from kvscaler.engine.request import EngineRequest, FinishReason, RequestState
from kvscaler.engine.step import Chunk, Outcome, StepPlan
from kvscaler.protocol.limits import AdmissionLimits

Entry = tuple[int, int, EngineRequest]
"""(−priority, order of submission, request): sorts without ever comparing requests."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Use of the pool now; `referenced + cached + free == capacity`."""

    capacity_blocks: int
    referenced_blocks: int
    cached_blocks: int
    free_blocks: int
    running_requests: int
    waiting_requests: int
    """Submitted and not running: preempted, or not started yet."""


class Scheduler:
    """Runs submitted requests within the pool and the limits. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        limits: AdmissionLimits,
        footprint: BlocksOf,
    ) -> None:
        self.pool = pool
        self.cache = cache
        self.block_tokens = cache.block_tokens
        self.preemptions = 0
        self._footprint = footprint
        self._limits = limits
        self._running: list[Entry] = []
        self._waiting: list[Entry] = []
        self._entries: dict[EngineRequest, Entry] = {}
        self._accepted: dict[EngineRequest, int] = {}
        """Footprint at its longest, of every request here."""
        self._submitted = 0
        self._plan: StepPlan | None = None
        self._aborted_in_flight: list[EngineRequest] = []
        self._apply_kv_limit()

    # Requests come and go

    def submit(self, request: EngineRequest) -> None:
        """Take a request over; it starts as soon as blocks and limits allow."""
        if request in self._entries or request.state is not RequestState.WAITING:
            raise ValueError(f"request {request.request_id} was submitted before")
        if request.prompt_tokens < 1 or request.max_new_tokens < 1:
            raise ValueError(
                f"request {request.request_id} has {request.prompt_tokens} prompt tokens and "
                f"may generate {request.max_new_tokens}: both must be at least 1"
            )
        blocks = max(
            self._footprint(request.prompt_tokens, request.max_new_tokens),
            self._blocks_for(request.prompt_tokens + request.max_new_tokens - 1),
        )
        if blocks > self.pool.capacity_blocks:
            raise ValueError(
                f"request {request.request_id} may need {blocks} blocks, but the pool has "
                f"{self.pool.capacity_blocks}: admission must refuse it"
            )
        entry = (-request.priority, self._submitted, request)
        self._submitted += 1
        self._entries[request] = entry
        self._accepted[request] = blocks
        insort(self._waiting, entry)

    def abort(self, request: EngineRequest, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request at any point; false if it is not here (any more).

        Its blocks are free on return, or after the commit of the step that is under way.
        """
        if request not in self._entries:
            return False
        in_flight = self._plan is not None and request.state is RequestState.RUNNING
        self._leave(request, reason)
        if in_flight:
            self._aborted_in_flight.append(request)
        else:
            self._release(request)
        return True

    @property
    def running(self) -> list[EngineRequest]:
        """Requests that hold blocks, in order."""
        return [entry[2] for entry in self._running]

    @property
    def head(self) -> EngineRequest | None:
        """The request that starts next."""
        return self._waiting[0][2] if self._waiting else None

    @property
    def waiting(self) -> list[EngineRequest]:
        """Submitted requests that hold no blocks, in order."""
        return [entry[2] for entry in self._waiting]

    # Limits

    @property
    def limits(self) -> AdmissionLimits:
        """The limits that were set."""
        return self._limits

    def set_limits(self, limits: AdmissionLimits) -> None:
        """Enforce other limits from now on: start less, evict cache at once, preempt in a plan."""
        self._limits = limits
        self._apply_kv_limit()

    @property
    def pending_kv_blocks(self) -> int | None:
        """Referenced blocks while they exceed an enforced `kv_blocks`; `None` once within it."""
        asked = kv_limit_blocks(self._limits, self.pool.capacity_blocks, ())
        used = self.pool.referenced_blocks
        return used if used > asked else None

    def _apply_kv_limit(self) -> None:
        limit = kv_limit_blocks(self._limits, self.pool.capacity_blocks, self._accepted.values())
        if limit != self.pool.limit_blocks:
            self.pool.limit(limit)

    # A step

    def plan(self) -> StepPlan:
        """Decide the next step and reserve its blocks. No chunks: there is nothing to do."""
        if self._plan is not None:
            raise RuntimeError("the last plan was not committed")
        self._apply_kv_limit()
        chunks: list[Chunk] = []
        preempted: list[EngineRequest] = []
        while self.over_limit:
            preempted.append(self._preempt_last())
        budget = self._plan_decodes(chunks, preempted, self._limits.step_tokens)
        prefilling = [e[2] for e in self._running if e[2].uncomputed_tokens > 1]
        budget = self._plan_prefills(prefilling, chunks, budget)
        while budget > 0 and not preempted and (hit := self.startable()) is not None:
            budget = self._plan_prefills([self._start_next(hit)], chunks, budget)
        self._plan = StepPlan(tuple(chunks), tuple(preempted))
        return self._plan

    def _plan_decodes(
        self, chunks: list[Chunk], preempted: list[EngineRequest], budget: int
    ) -> int:
        size, pool, running = self.block_tokens, self.pool, self._running
        index = 0
        while index < len(running) and budget > 0:
            request = running[index][2]
            index += 1
            computed = request.computed_tokens
            if len(request.token_ids) - computed != 1:
                continue
            if computed == len(request.block_table) * size:
                while pool.available_blocks == 0:
                    # The victim is this request or one behind it: none that has a chunk.
                    victim = self._preempt_last()
                    preempted.append(victim)
                    if victim is request:
                        return budget
                request.block_table += pool.get(1)
            chunks.append(Chunk(request, computed, 1, True))
            budget -= 1
        return budget

    def _plan_prefills(
        self, requests: Iterable[EngineRequest], chunks: list[Chunk], budget: int
    ) -> int:
        for request in requests:
            if budget == 0:
                break
            missing = request.uncomputed_tokens
            length = min(missing, budget)
            chunks.append(Chunk(request, request.computed_tokens, length, length == missing))
            budget -= length
        return budget

    def startable(self) -> PrefixHit | None:
        """The prefix hit with which the first waiting request can start now, else `None`."""
        if not self._waiting or len(self._running) >= sequence_limit(self._limits):
            return None
        request = self._waiting[0][2]
        hit = self.cache.lookup(request)
        charge = self._blocks_for(len(request.token_ids)) - hit.live_blocks
        headroom = headroom_blocks(self._limits, len(self._running))
        return hit if charge + headroom <= self.pool.available_blocks else None

    def _start_next(self, hit: PrefixHit) -> EngineRequest:
        entry = self._waiting.pop(0)
        request = entry[2]
        self.cache.take(request, hit)
        missing = self._blocks_for(len(request.token_ids)) - len(request.block_table)
        request.block_table += self.pool.get(missing)
        request.state = RequestState.RUNNING
        insort(self._running, entry)
        return request

    def _preempt_last(self) -> EngineRequest:
        entry = self._running.pop()
        request = entry[2]
        self._release(request)
        request.state = RequestState.WAITING
        request.preemptions += 1
        self.preemptions += 1
        insort(self._waiting, entry)
        return request

    def commit(self, plan: StepPlan, outcomes: Sequence[Outcome]) -> list[EngineRequest]:
        """Book what the step computed; the requests that finished with it.

        `outcomes` holds one for each sampling chunk, in order, those of requests that were
        aborted meanwhile included (they are ignored).
        """
        if plan is not self._plan:
            raise RuntimeError("this is not the plan that is under way")
        expected = sum(chunk.samples for chunk in plan.chunks)
        if len(outcomes) != expected:
            raise ValueError(f"{len(outcomes)} outcomes for {expected} sampling chunks")
        self._plan = None
        size, publish = self.block_tokens, self.cache.publish
        finished: list[EngineRequest] = []
        next_outcome = iter(outcomes)
        for request, start, length, samples in plan.chunks:
            outcome = next(next_outcome) if samples else None
            if request.state is not RequestState.RUNNING:
                continue
            request.computed_tokens = start + length
            if start % size + length >= size:
                publish(request, start)
            if outcome is None:
                continue
            request.token_ids.append(outcome.token_id)
            finish = outcome.finish
            if finish is None and request.generated_tokens >= request.max_new_tokens:
                finish = FinishReason.LENGTH
            if finish is not None:
                self._leave(request, finish)
                self._release(request)
                finished.append(request)
        for request in self._aborted_in_flight:
            self._release(request)
        self._aborted_in_flight.clear()
        return finished

    # Many steps at once

    def quiet_horizon(self, source: skipping.TokenSource = skipping.TO_THE_END) -> int:
        """Steps for which the batch can't change: no start, finish, chunk or full pool in them."""
        return skipping.quiet_horizon(self, source)

    def advance(
        self, steps: int, source: skipping.TokenSource = skipping.TO_THE_END
    ) -> list[EngineRequest]:
        """Plan and commit `steps` steps with tokens from `source`; the requests that finished.

        Equal to `steps` times `advance(1)` in everything that can be observed, down to the order
        of free blocks; quiet stretches cost their block events only.
        """
        return skipping.advance(self, steps, source)

    # Shared by the above

    @property
    def idle(self) -> bool:
        """No plan is under way."""
        return self._plan is None

    @property
    def over_limit(self) -> bool:
        """Referenced blocks exceed the limit in force and somebody can be preempted for it."""
        return self.pool.referenced_blocks > self.pool.limit_blocks and len(self._running) > 1

    def occupancy(self) -> PoolUse:
        """Use of the pool, exact at every step."""
        return PoolUse(
            self.pool.capacity_blocks,
            self.pool.referenced_blocks,
            self.pool.cached_blocks,
            self.pool.free_blocks,
            len(self._running),
            len(self._waiting),
        )

    def check(self) -> None:
        """Raise unless the pool's references are exactly those of the requests' block tables."""
        self.pool.check()
        holders = [e[2] for e in self._running] + self._aborted_in_flight
        counted = [0] * self.pool.capacity_blocks
        for request in holders:
            for block in request.block_table:
                counted[block] += 1
        if counted != [self.pool.references(b) for b in range(self.pool.capacity_blocks)]:
            raise AssertionError("references differ from what the block tables hold")
        if any(e[2].block_table for e in self._waiting):
            raise AssertionError("a waiting request holds blocks")

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _release(self, request: EngineRequest) -> None:
        self.pool.free(reversed(request.block_table))
        request.block_table.clear()
        request.computed_tokens = 0

    def _leave(self, request: EngineRequest, reason: FinishReason) -> None:
        entry = self._entries.pop(request)
        del self._accepted[request]
        queue = self._running if request.state is RequestState.RUNNING else self._waiting
        del queue[bisect_left(queue, entry)]
        request.state = RequestState.FINISHED
        request.finish_reason = reason
