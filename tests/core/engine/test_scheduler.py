"""The scheduler as a whole: steps, preemption, limits that move, and skipping."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvscaler.engine.block_pool import BlockPool
from kvscaler.engine.prefix_cache import PrefixCache
from kvscaler.engine.request import EngineRequest, FinishReason, RequestState
from kvscaler.engine.scheduler import Scheduler
from kvscaler.engine.step import Outcome, StepPlan
from kvscaler.protocol.limits import AdmissionLimits, ChargePolicy

BLOCK = 4


def footprint(prompt: int, generated: int) -> int:
    return -(-(prompt + generated) // BLOCK)


def limits(**changes: object) -> AdmissionLimits:
    fields: dict[str, object] = {
        "max_sequences": 8,
        "kv_blocks": 1_000,
        "step_tokens": 16,
        "queue_requests": 8,
        "queue_tokens": 10_000,
        "queue_bytes": 1_000_000,
        "max_wait_seconds": 10.0,
        "max_request_tokens": 1_000,
        "watermark_blocks": 0,
        "charge": ChargePolicy.PROMPT_ONLY,
    }
    return AdmissionLimits.model_validate(fields | changes)


def scheduler(blocks: int = 100, caching: bool = True, **changes: object) -> Scheduler:
    pool = BlockPool(blocks)
    return Scheduler(pool, PrefixCache(pool, BLOCK, caching), limits(**changes), footprint)


def request(name: str, prompt: list[int], new: int, priority: int = 0) -> EngineRequest:
    made = EngineRequest.from_prompt(name, prompt, new, 0.0)
    made.priority = priority
    return made


def run_step(s: Scheduler, token: int = 0) -> StepPlan:
    plan = s.plan()
    s.commit(plan, [Outcome(token) for chunk in plan.chunks if chunk.samples])
    s.check()
    return plan


def shapes(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(c.request.request_id, c.start, c.length, c.samples) for c in plan.chunks]


def test_a_long_prompt_is_cut_into_chunks_beside_decodes_which_go_first():
    s = scheduler(step_tokens=10)
    s.submit(request("short", [1] * 3, 5))
    s.submit(request("long", [2] * 20, 2))
    assert shapes(run_step(s)) == [("short", 0, 3, True), ("long", 0, 7, False)]
    assert shapes(run_step(s)) == [("short", 3, 1, True), ("long", 7, 9, False)]
    assert shapes(run_step(s)) == [("short", 4, 1, True), ("long", 16, 4, True)]
    assert shapes(run_step(s)) == [("short", 5, 1, True), ("long", 20, 1, True)]
    assert [r.request_id for r in s.running] == ["short"]


def test_a_request_starts_only_when_its_whole_prompt_fits():
    s = scheduler(blocks=6, step_tokens=4)
    s.submit(request("a", [1] * 12, 1))
    s.submit(request("b", [2] * 16, 1))
    run_step(s)
    assert s.occupancy().referenced_blocks == 3, "blocks of the whole prompt, not of a chunk"
    run_step(s)
    assert s.waiting[0].request_id == "b"
    run_step(s)  # a's last chunk samples its only token
    assert shapes(run_step(s)) == [("b", 0, 4, False)]


def test_the_youngest_is_preempted_goes_to_the_front_and_hits_its_own_cache():
    s = scheduler(blocks=6)
    old, young = request("old", [1] * 7, 9), request("young", [2] * 7, 9)
    third = request("c", [3] * 9, 9)
    s.submit(old)
    s.submit(young)
    run_step(s)
    s.submit(third)
    while not (plan := run_step(s)).preempted:
        assert third.state is RequestState.WAITING
    assert plan.preempted == (young,)
    assert [r.request_id for r in s.waiting] == ["young", "c"]
    assert all(c.request is old for c in plan.chunks), "nothing starts in a step that preempted"
    assert young.preemptions == s.preemptions == 1
    while old.finish_reason is None:
        run_step(s)
    run_step(s)
    assert young.state is RequestState.RUNNING
    assert young.cached_tokens >= BLOCK


def test_lower_priority_is_preempted_before_younger():
    s = scheduler(blocks=6, caching=False)
    low, high = request("low", [1] * 7, 9, priority=-1), request("high", [2] * 7, 9, priority=1)
    s.submit(low)
    s.submit(high)
    while not (plan := run_step(s)).preempted:
        pass
    assert plan.preempted == (low,)


def test_a_shared_prefix_is_computed_once_and_charged_once():
    s = scheduler(blocks=10, step_tokens=100)
    first = request("first", [5] * 9, 4)
    s.submit(first)
    run_step(s)
    second = request("second", [5] * 9, 4)
    s.submit(second)
    assert shapes(run_step(s)) == [("first", 9, 1, True), ("second", 8, 1, True)]
    assert second.cached_tokens == 8
    assert second.block_table[:2] == first.block_table[:2]
    assert s.occupancy().referenced_blocks == 4


def test_other_salts_and_adapters_share_nothing():
    s = scheduler(step_tokens=100)
    s.submit(request("a", [5] * 9, 4))
    run_step(s)
    salted = replace(request("b", [5] * 9, 4), cache_salt="tenant")
    adapted = replace(request("c", [5] * 9, 4), cache_keys=("adapter",))
    s.submit(salted)
    s.submit(adapted)
    run_step(s)
    assert (salted.cached_tokens, adapted.cached_tokens) == (0, 0)


def test_an_evictable_hit_is_charged_as_new_use():
    s = scheduler(blocks=5, step_tokens=100)
    s.submit(request("a", [5] * 9, 1))
    run_step(s)
    assert s.occupancy().cached_blocks == 2
    s.submit(request("hog", [9] * 9, 9))
    run_step(s)
    assert s.occupancy().referenced_blocks == 3
    s.submit(request("b", [5] * 9, 1))
    assert s.startable() is None, "two cached and one new block are three, and two are left"


def test_abort_frees_at_once_or_with_the_commit_of_the_step_under_way():
    s = scheduler()
    waiting, running = request("w", [1] * 8, 4), request("r", [2] * 8, 4)
    s.submit(waiting)
    assert s.abort(waiting)
    assert not s.abort(waiting)
    s.submit(running)
    plan = s.plan()
    assert s.abort(running)
    assert s.occupancy().referenced_blocks == 2, "the executor may still write to them"
    assert s.commit(plan, [Outcome(1)]) == []
    assert s.occupancy().referenced_blocks == 0
    assert running.finish_reason is FinishReason.ABORT
    assert running.generated_tokens == 0
    again = request("r2", [2] * 8, 4)
    s.submit(again)
    run_step(s)
    assert s.abort(again)
    assert s.occupancy().referenced_blocks == 0
    s.check()


def test_a_lower_limit_first_stops_starts_then_evicts_then_preempts_down_to_the_floor():
    s = scheduler(blocks=20, step_tokens=100)
    s.submit(request("gone", [1] * 9, 1))
    run_step(s)
    a, b, c = (request(n, [t] * 13, 7) for n, t in (("a", 2), ("b", 3), ("c", 4)))
    for each in (a, b, c):
        s.submit(each)
    run_step(s)
    use = s.occupancy()
    assert (use.referenced_blocks, use.cached_blocks) == (12, 2)
    s.set_limits(limits(kv_blocks=12, step_tokens=100))
    use = s.occupancy()
    assert (use.referenced_blocks, use.cached_blocks) == (12, 0), "cache goes at once"
    assert s.pending_kv_blocks is None
    s.set_limits(limits(kv_blocks=2, step_tokens=100))
    assert s.pending_kv_blocks == 12
    plan = run_step(s)
    assert plan.preempted == (c, b)
    assert s.pending_kv_blocks == 4, "the floor is one accepted request"
    while a.finish_reason is None:
        run_step(s)
        assert s.occupancy().referenced_blocks <= 5
    finished = []
    for _ in range(100):
        run_step(s)
        finished = [r for r in (a, b, c) if r.finish_reason is FinishReason.LENGTH]
    assert len(finished) == 3, "accepted requests finish under a limit that is too low for them"
    assert s.pending_kv_blocks is None


def test_bad_use_is_refused_with_its_cause():
    s = scheduler(blocks=3)
    with pytest.raises(ValueError, match="may need 4 blocks, but the pool has 3"):
        s.submit(request("big", [1] * 9, 5))
    with pytest.raises(ValueError, match="at least 1"):
        s.submit(request("empty", [], 5))
    with pytest.raises(ValueError, match="at least 1"):
        s.submit(request("mute", [1], 0))
    fine = request("fine", [1], 1)
    s.submit(fine)
    with pytest.raises(ValueError, match="submitted before"):
        s.submit(fine)
    plan = s.plan()
    with pytest.raises(RuntimeError, match="not committed"):
        s.plan()
    with pytest.raises(ValueError, match="0 outcomes for 1"):
        s.commit(plan, [])
    with pytest.raises(RuntimeError, match="not the plan"):
        s.commit(StepPlan(), [])


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=14),  # a tiny vocabulary: prefixes collide
        st.integers(1, 14),
        st.integers(-1, 1),
    ),
    min_size=1,
    max_size=10,
)
WORLD = st.fixed_dictionaries(
    {
        "blocks": st.integers(7, 16),
        "caching": st.booleans(),
        "max_sequences": st.integers(1, 5),
        "step_tokens": st.integers(1, 20),
        "watermark_blocks": st.integers(0, 3),
    }
)


def submit_all(s: Scheduler, wanted: list[tuple[list[int], int, int]]) -> list[EngineRequest]:
    made = [request(f"r{i}", p, n, priority) for i, (p, n, priority) in enumerate(wanted)]
    for each in made:
        s.submit(each)
    return made


@settings(max_examples=200)
@given(REQUESTS, WORLD, st.data())
def test_every_request_finishes_whatever_happens_around_it(wanted, world, data):
    s = scheduler(**world)
    made = submit_all(s, wanted)
    doomed = data.draw(st.sets(st.sampled_from(range(len(made)))))
    for step in range(5_000):
        action = data.draw(st.integers(0, 9)) if step < 40 else 9
        if action == 0:
            s.set_limits(s.limits.model_copy(update={"kv_blocks": data.draw(st.integers(1, 16))}))
        plan = s.plan()
        assert len({id(c.request) for c in plan.chunks}) == len(plan.chunks)
        assert sum(c.length for c in plan.chunks) <= s.limits.step_tokens
        for chunk in plan.chunks:
            assert chunk.start == chunk.request.computed_tokens
            assert len(chunk.request.block_table) * BLOCK >= chunk.start + chunk.length
        if action == 1 and doomed:
            s.abort(made[doomed.pop()])
        token = step % 2
        s.commit(plan, [Outcome(token) for chunk in plan.chunks if chunk.samples])
        s.check()
        use = s.occupancy()
        assert use.referenced_blocks + use.cached_blocks + use.free_blocks == world["blocks"]
        if not s.running and not s.waiting:
            break
    for each, (prompt, new, _) in zip(made, wanted, strict=True):
        assert each.token_ids[: len(prompt)] == prompt
        if each.finish_reason is not FinishReason.ABORT:
            assert each.finish_reason is FinishReason.LENGTH
            assert each.generated_tokens == new
    assert s.occupancy().referenced_blocks == 0


class Lengths:
    """Tokens that depend on place, and ends before `max_new_tokens`."""

    def tokens(self, request: EngineRequest, count: int) -> list[int]:
        first = len(request.token_ids)
        return [(first + i) % 3 % 2 for i in range(count)]

    def tokens_to_finish(self, request: EngineRequest) -> int:
        return max(1, request.prompt_tokens % 5 + 6 - request.generated_tokens)


def everything(s: Scheduler, made: list[EngineRequest]) -> object:
    requests = [
        (r.token_ids, r.state, r.computed_tokens, r.cached_tokens, r.block_table, r.preemptions,
         r.finish_reason, r.block_hashes)
        for r in made
    ]  # fmt: skip
    pool = s.pool
    return (
        requests,
        [r.request_id for r in s.running],
        [r.request_id for r in s.waiting],
        pool.free_order(),
        [pool.references(b) for b in range(pool.capacity_blocks)],
        [pool.find(h) for r in made for h in r.block_hashes],
        (pool.evictions, pool.shared_blocks, s.preemptions),
        (s.cache.hit_tokens, s.cache.queried_tokens),
        s.occupancy(),
    )


@settings(max_examples=150)
@given(REQUESTS, WORLD, st.lists(st.integers(1, 25), min_size=1, max_size=8), st.booleans())
def test_advancing_k_steps_equals_k_times_one_step(wanted, world, strides, to_the_end):
    whole, single = scheduler(**world), scheduler(**world)
    made_whole, made_single = submit_all(whole, wanted), submit_all(single, wanted)
    source = () if to_the_end else (Lengths(),)
    for stride in strides:
        quiet = whole.quiet_horizon(*source)
        batch = [r.request_id for r in whole.running]
        finished = [r.request_id for r in whole.advance(stride, *source)]
        one_by_one = []
        for step in range(stride):
            one_by_one += [r.request_id for r in single.advance(1, *source)]
            if step < quiet:
                assert [r.request_id for r in single.running] == batch
                assert not one_by_one
        assert finished == one_by_one
        assert everything(whole, made_whole) == everything(single, made_single)
    whole.check()
