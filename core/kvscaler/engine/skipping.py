"""Many steps at once, for simulators: what happens between two changes of the batch is arithmetic.

In a quiet stretch every running request decodes, so each step adds one token to each. All that a
step then does to the pool is to take a block when one is full and to make the full one findable.
`advance` replays just these events, in the order in which single steps would cause them.
"""

from typing import TYPE_CHECKING, Protocol

from kvscaler.engine.request import EngineRequest, FinishReason
from kvscaler.engine.step import Outcome

if TYPE_CHECKING:
    from kvscaler.engine.scheduler import Scheduler


class TokenSource(Protocol):
    """Where tokens come from when no model runs."""

    def tokens(self, request: EngineRequest, count: int) -> list[int]:
        """The next `count` token ids of a request."""

    def tokens_to_finish(self, request: EngineRequest) -> int:
        """Tokens that a request will still generate, at least 1; its `max_new_tokens` cuts too."""


class ToTheEnd:
    """Every request generates its `max_new_tokens`, all with id 0."""

    def tokens(self, request: EngineRequest, count: int) -> list[int]:
        """Zeros."""
        return [0] * count

    def tokens_to_finish(self, request: EngineRequest) -> int:
        """All that it may."""
        return request.max_new_tokens - request.generated_tokens


TO_THE_END = ToTheEnd()


def quiet_horizon(scheduler: "Scheduler", source: TokenSource) -> int:
    """Steps from now in which the same requests decode and nothing else happens."""
    if not scheduler.idle or scheduler.over_limit:
        return 0
    running = scheduler.running
    if not running or len(running) > scheduler.limits.step_tokens:
        return 0
    if any(request.uncomputed_tokens != 1 for request in running):
        return 0
    size = scheduler.block_tokens
    # The step that brings a request's last token is the first one that is not quiet.
    horizon = min(_left(request, source) for request in running) - 1
    if scheduler.head is not None and len(running) < scheduler.limits.step_tokens:
        if scheduler.startable() is not None:
            return 0
        if scheduler.cache.enabled:
            # A block that becomes findable may be what the waiting request needs.
            horizon = min(horizon, *(size - r.computed_tokens % size for r in running))
    return _steps_within_pool(scheduler, running, horizon)


def _left(request: EngineRequest, source: TokenSource) -> int:
    return min(source.tokens_to_finish(request), request.max_new_tokens - request.generated_tokens)


def _steps_within_pool(scheduler: "Scheduler", running: list[EngineRequest], horizon: int) -> int:
    """The most steps, up to `horizon`, whose new blocks are all available."""
    size, available = scheduler.block_tokens, scheduler.pool.available_blocks
    slots = [len(r.block_table) * size - r.computed_tokens for r in running]

    def needed(steps: int) -> int:
        return sum(-(-(steps - free) // size) for free in slots if steps > free)

    if horizon <= 0 or needed(horizon) <= available:
        return max(0, horizon)
    low, high = 0, horizon  # needed(low) fits, needed(high) does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= available else (low, middle)
    return low


def advance(scheduler: "Scheduler", steps: int, source: TokenSource) -> list[EngineRequest]:
    """`steps` steps, the quiet ones in bulk; the requests that finished, in order."""
    finished: list[EngineRequest] = []
    while steps > 0:
        quiet = min(steps, quiet_horizon(scheduler, source)) if steps > 1 else 0
        if quiet > 1:
            _advance_quiet(scheduler, quiet, source)
            steps -= quiet
        else:
            finished += _single_step(scheduler, source)
            steps -= 1
    return finished


def _single_step(scheduler: "Scheduler", source: TokenSource) -> list[EngineRequest]:
    plan = scheduler.plan()
    outcomes = []
    for chunk in plan.chunks:
        if chunk.samples:
            request = chunk.request
            last = source.tokens_to_finish(request) <= 1
            stops = last and request.generated_tokens + 1 < request.max_new_tokens
            finish = FinishReason.STOP if stops else None
            outcomes.append(Outcome(source.tokens(request, 1)[0], finish))
    return scheduler.commit(plan, outcomes)


def _advance_quiet(scheduler: "Scheduler", steps: int, source: TokenSource) -> None:
    size, pool, cache = scheduler.block_tokens, scheduler.pool, scheduler.cache
    running = scheduler.running
    before = [request.computed_tokens for request in running]
    batch = len(running)
    # Events as numbers that sort by step, then plan before commit, then place in the batch.
    gets: list[int] = []
    fulls: list[int] = []
    stride, end = 2 * batch * size, 2 * batch * (steps + 1)
    for place, request in enumerate(running):
        request.token_ids += source.tokens(request, steps)
        first_get = len(request.block_table) * size - before[place] + 1
        gets.extend(range(2 * batch * first_get + place, end, stride))
        if cache.enabled:
            first_full = size - before[place] % size
            fulls.extend(range(2 * batch * first_full + batch + place, end, stride))
    if fulls:
        for event in sorted(gets + fulls):
            step, place = divmod(event, 2 * batch)
            request = running[place % batch]
            if place < batch:
                request.block_table += pool.get(1)
            else:
                request.computed_tokens = before[place - batch] + step
                cache.publish(request, request.computed_tokens - 1)
    else:
        for event, block in zip(sorted(gets), pool.get(len(gets)), strict=True):
            running[event % batch].block_table.append(block)
    for place, request in enumerate(running):
        request.computed_tokens = before[place] + steps
