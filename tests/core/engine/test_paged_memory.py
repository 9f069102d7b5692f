"""Whether block tables are right: a pretended memory, in which each slot knows its whole prefix.

An executor writes the slots of a chunk and reads all slots before it. Here a slot's content is the
tokens up to it, so a read that finds anything else is a block that was shared wrongly, evicted too
early or handed to two requests. With two token ids and tiny blocks, prefixes collide all the time.
"""

import json
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvscaler.engine.block_pool import BlockPool
from kvscaler.engine.prefix_cache import PrefixCache, block_hash, root_hash
from kvscaler.engine.request import EngineRequest, FinishReason
from kvscaler.engine.scheduler import Scheduler
from kvscaler.engine.step import Outcome, StepPlan
from kvscaler.protocol.limits import AdmissionLimits, ChargePolicy

BLOCK, BLOCKS = 2, 9


class PagedMemory(RuleBasedStateMachine):
    """Submit, step, abort in and between steps, tighten and widen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        limits = AdmissionLimits(
            max_sequences=4,
            kv_blocks=BLOCKS,
            step_tokens=5,
            queue_requests=0,
            queue_tokens=0,
            queue_bytes=0,
            max_wait_seconds=0,
            max_request_tokens=100,
            watermark_blocks=1,
            charge=ChargePolicy.PROMPT_ONLY,
        )
        self.scheduler = Scheduler(
            self.pool, PrefixCache(self.pool, BLOCK), limits, lambda p, g: -(-(p + g) // BLOCK)
        )
        self.memory: dict[tuple[int, int], tuple[str, ...]] = {}
        self.live: list[EngineRequest] = []
        self.under_way: StepPlan | None = None

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        new=st.integers(1, 8),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "", "", "tenant"]),
    )
    def submit(self, prompt: list[int], new: int, priority: int, salt: str) -> None:
        made = EngineRequest.from_prompt(f"r{len(self.memory)}", prompt, new, 0.0)
        made.priority, made.cache_salt = priority, salt
        self.scheduler.submit(made)
        self.live.append(made)

    @staticmethod
    def content(request: EngineRequest, position: int) -> tuple[str, ...]:
        return (request.cache_salt, *map(str, request.token_ids[: position + 1]))

    @precondition(lambda self: self.under_way is None)
    @rule()
    def plan(self) -> None:
        self.under_way = self.scheduler.plan()
        for request, start, length, samples in self.under_way.chunks:
            table = request.block_table
            for position in range(start):
                slot = (table[position // BLOCK], position % BLOCK)
                assert self.memory[slot] == self.content(request, position)
            for position in range(start, start + length):
                slot = (table[position // BLOCK], position % BLOCK)
                self.memory[slot] = self.content(request, position)
            assert samples == (start + length == len(request.token_ids))

    @precondition(lambda self: self.under_way is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.under_way is not None
        outcome = st.builds(
            Outcome, st.integers(0, 1), st.sampled_from([None, None, FinishReason.STOP])
        )
        sampling = sum(chunk.samples for chunk in self.under_way.chunks)
        outcomes = data.draw(st.lists(outcome, min_size=sampling, max_size=sampling))
        finished = self.scheduler.commit(self.under_way, outcomes)
        self.under_way = None
        self.live = [request for request in self.live if request not in finished]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        assert self.scheduler.abort(request)
        self.live.remove(request)

    @rule(kv_blocks=st.integers(1, BLOCKS))
    def change_limit(self, kv_blocks: int) -> None:
        changed = self.scheduler.limits.model_copy(update={"kv_blocks": kv_blocks})
        self.scheduler.set_limits(changed)

    @invariant()
    def books_agree(self) -> None:
        self.scheduler.check()
        use = self.scheduler.occupancy()
        assert use.referenced_blocks + use.cached_blocks + use.free_blocks == BLOCKS
        assert use.running_requests + use.waiting_requests == len(self.live)

    def teardown(self) -> None:
        if self.under_way is not None:
            self.scheduler.commit(
                self.under_way, [Outcome(0)] * sum(c.samples for c in self.under_way.chunks)
            )
        self.scheduler.advance(2_000)
        assert self.scheduler.occupancy().referenced_blocks == 0
        assert all(request.finish_reason is not None for request in self.live)


TestPagedMemory = PagedMemory.TestCase
TestPagedMemory.settings = settings(max_examples=150, stateful_step_count=50)


def cache_with(prompt: list[int], blocks: int = 8) -> tuple[BlockPool, PrefixCache, EngineRequest]:
    pool = BlockPool(blocks)
    cache = PrefixCache(pool, BLOCK)
    request = EngineRequest.from_prompt("first", prompt, 4, 0.0)
    request.block_table = pool.get(-(-len(prompt) // BLOCK))
    request.computed_tokens = len(prompt)
    cache.publish(request, 0)
    return pool, cache, request


@pytest.mark.parametrize(
    ("prompt", "blocks"),
    [
        ([1, 2, 3, 4, 5], 2),
        ([1, 2, 3, 4], 1),  # the last token is always computed again, and costs its block
        ([1, 2, 3, 9, 5], 1),
        ([9, 2, 3, 4, 5], 0),
        ([1], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8], 2),  # the third block was not full
    ],
)
def test_only_full_blocks_are_found_and_never_the_last_token(prompt, blocks):
    _, cache, first = cache_with([1, 2, 3, 4, 5])
    hit = cache.lookup(EngineRequest.from_prompt("second", prompt, 4, 0.0))
    assert hit.blocks == tuple(first.block_table[:blocks])
    assert hit.tokens == blocks * BLOCK


def test_a_hit_tells_what_is_charged_from_what_is_shared():
    pool, cache, first = cache_with([1, 2, 3, 4, 5])
    second = EngineRequest.from_prompt("second", [1, 2, 3, 4, 5], 4, 0.0)
    assert (cache.lookup(second).live_blocks, cache.lookup(second).evictable_blocks) == (2, 0)
    pool.free(reversed(first.block_table))
    before = pool.free_order()
    hit = cache.lookup(second)
    assert (hit.live_blocks, hit.evictable_blocks) == (0, 2)
    assert pool.free_order() == before, "looking moves nothing"
    cache.take(second, hit)
    assert (second.computed_tokens, second.cached_tokens) == (4, 4)
    assert (cache.queried_tokens, cache.hit_tokens) == (5, 4)


def test_a_disabled_cache_finds_and_keeps_nothing():
    pool = BlockPool(4)
    cache = PrefixCache(pool, BLOCK, enabled=False)
    request = EngineRequest.from_prompt("r", [1, 2, 3], 4, 0.0)
    request.block_table, request.computed_tokens = pool.get(2), 3
    cache.publish(request, 0)
    pool.free(request.block_table)
    assert (pool.cached_blocks, cache.queried_tokens) == (0, 0)


def test_hashes_agree_between_processes_and_differ_by_everything_that_matters():
    code = (
        "import json; from kvscaler.engine.prefix_cache import *;"
        "print(json.dumps([root_hash(16, 'salt', ['a']).hex(),"
        " block_hash(root_hash(16), range(16)).hex()]))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    plain = block_hash(root_hash(16), range(16))
    assert json.loads(printed) == [root_hash(16, "salt", ["a"]).hex(), plain.hex()]
    others = {
        block_hash(root_hash(32), range(16)),
        block_hash(root_hash(16, "salt"), range(16)),
        block_hash(root_hash(16, "", ["salt"]), range(16)),
        block_hash(plain, range(16)),
        block_hash(root_hash(16), range(1, 17)),
    }
    assert len(others | {plain}) == 6
    with pytest.raises(OverflowError):
        block_hash(plain, [2**32])
