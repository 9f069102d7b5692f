"""Admission: who is admitted, who waits, who is refused and for how long."""

from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvscaler.budget import Footprint
from kvscaler.engine.lengths import RunningMean
from kvscaler.engine.replica import ReplicaEngine
from kvscaler.engine.request import EngineRequest, FinishReason
from kvscaler.engine.step import Outcome
from kvscaler.protocol.limits import AdmissionLimits, AdmissionMode, ChargePolicy
from kvscaler.protocol.refusals import RefusalReason

BLOCK = 4


def limits(**changes: object) -> AdmissionLimits:
    fields: dict[str, object] = {
        "max_sequences": 8,
        "kv_blocks": 20,
        "step_tokens": 64,
        "queue_requests": 3,
        "queue_tokens": 100,
        "queue_bytes": 1_000,
        "max_wait_seconds": 10.0,
        "max_request_tokens": 200,
        "watermark_blocks": 0,
        "charge": ChargePolicy.WORST_CASE,
    }
    return AdmissionLimits.model_validate(fields | changes)


def replica(blocks: int = 20, caching: bool = True, **changes: object) -> ReplicaEngine:
    return ReplicaEngine(
        limits(**changes), blocks, BLOCK, Footprint(BLOCK).blocks, prefix_caching=caching
    )


NAMES = count()


def request(prompt: int | list[int], new: int, arrival: float = 0.0, priority: int = 0):
    name = f"r{next(NAMES)}"
    tokens = [next(NAMES) + 10] * prompt if isinstance(prompt, int) else prompt
    made = EngineRequest.from_prompt(name, tokens, new, arrival)
    made.priority = priority
    return made


def run_step(engine: ReplicaEngine, now: float = 0.0, seconds: float = 0.5) -> list[EngineRequest]:
    plan = engine.plan(now)
    outcomes = [Outcome(0) for chunk in plan.chunks if chunk.samples]
    finished = engine.commit(plan, outcomes, now + seconds, seconds)
    engine.scheduler.check()
    return finished


def drain(engine: ReplicaEngine, now: float = 0.0) -> None:
    for _ in range(10_000):
        if not engine.busy:
            return
        run_step(engine, now)
        now += 0.5
    raise AssertionError("the engine never became idle")


def test_a_request_waits_until_the_projected_peak_leaves_room():
    engine = replica()
    first, second, third = request(8, 40), request(8, 20), request(8, 12)
    assert engine.offer(first, 0.0).admitted  # 12 blocks at its end
    assert engine.admission.projected_peak_blocks() == 12
    assert engine.offer(second, 0.0).admitted  # both have 7 when the second ends
    assert engine.admission.projected_peak_blocks() == 14
    assert engine.offer(third, 0.0).admitted  # 5 + 5 + 5 at its end, then 14, then 12
    assert engine.admission.projected_peak_blocks() == 15
    assert engine.offer(request(8, 30), 0.0).queued
    assert engine.occupancy().reserved_blocks == 15
    assert engine.occupancy().waiting_requests == 3 + 1
    drain(engine)
    assert engine.scheduler.preemptions == 0
    assert engine.traffic().finished == 4


@pytest.mark.parametrize(("step_tokens", "admitted"), [(64, True), (4, False)])
def test_a_prefill_in_many_chunks_is_charged_for_as_long_as_it_lasts(step_tokens, admitted):
    engine = replica(13, kv_blocks=13, step_tokens=step_tokens)
    grows, brief = request(4, 41), request(40, 1)
    assert engine.offer(grows, 0.0).admitted
    run_step(engine)
    # 11 blocks beside 2: free after one large step, or only when the other has 5 after 14 steps.
    assert engine.offer(brief, 0.0).admitted is admitted
    drain(engine)
    assert engine.traffic().finished == 2
    assert engine.scheduler.preemptions == 0


def test_nobody_overtakes_the_head_of_the_queue_but_higher_priority():
    engine = replica()
    assert engine.offer(request(8, 64), 0.0).admitted
    large, small, urgent = request(30, 40), request(1, 1), request(2, 2, priority=5)
    assert engine.offer(large, 0.0).queued
    assert engine.offer(small, 0.0).queued, "it would fit, but it came later"
    assert engine.offer(urgent, 0.0).admitted
    order = []
    for _ in range(300):
        order += [r for r in run_step(engine) if r in (large, small)]
    assert order == [small, large] or large.finish_reason is not None
    assert engine.admission.queued_requests == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"queue_requests": 0}, RefusalReason.QUEUE_FULL),
        ({"queue_tokens": 7}, RefusalReason.QUEUE_TOKENS_FULL),
        ({"queue_bytes": 10}, RefusalReason.QUEUE_BYTES_FULL),
    ],
)
def test_a_full_queue_refuses_with_the_time_after_which_it_would_fit(changes, reason):
    engine = replica(**changes)
    assert engine.offer(request(8, 64), 0.0).admitted
    refusal = engine.offer(request(8, 40), 0.0, body_bytes=50).refusal
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_seconds) == (reason, None), "no step time is known"
    run_step(engine, seconds=0.5)
    refusal = engine.offer(request(8, 40), 0.0, body_bytes=50).refusal
    assert refusal is not None
    assert refusal.retry_after_seconds == pytest.approx(63 * 0.5), "when the first request ends"
    assert engine.traffic().refused == {reason.value: 2}
    assert engine.traffic().arrivals == 3
    assert engine.offer(request(1, 2), 0.0).admitted, "what fits needs no queue"


def test_what_waits_ahead_lengthens_retry_after():
    engine = replica(queue_requests=1)
    engine.offer(request(8, 64), 0.0)
    run_step(engine, seconds=0.5)
    assert engine.offer(request(8, 40), 0.0).queued
    refusal = engine.offer(request(8, 40), 0.0).refusal
    assert refusal is not None and refusal.retry_after_seconds is not None
    ahead = (1 * 2 + 40 * (2 + 12) / 2) / 20
    assert refusal.retry_after_seconds == pytest.approx((63 + ahead) * 0.5)


@pytest.mark.parametrize("mode", list(AdmissionMode))
def test_what_never_fits_is_refused_at_the_door_in_every_mode(mode):
    engine = replica(mode=mode)
    too_large = engine.offer(request(8, 80), 0.0).refusal
    assert too_large is not None
    assert too_large.reason is RefusalReason.NEVER_FITS
    assert too_large.retry_after_seconds is None
    assert "need 22 KV blocks, but this replica admits 20" in too_large.message
    too_long = engine.offer(request(150, 51), 0.0).refusal
    assert too_long is not None
    assert too_long.reason is RefusalReason.CONTEXT_TOO_LONG
    assert "201; at most 200 fit" in too_long.message
    assert not engine.busy


def test_a_queued_request_is_given_up_after_its_longest_wait():
    engine = replica()
    assert engine.offer(request(8, 64), 0.0).admitted
    waits = request(8, 40)
    assert engine.offer(waits, 1.0).queued
    assert engine.expire(11.0) == []
    (refusal,) = engine.expire(11.1)
    assert (refusal.request, refusal.reason) == (waits, RefusalReason.QUEUE_TIMEOUT)
    assert engine.admission.queued_tokens == 0
    assert not engine.abort(waits)


def test_observe_admits_everything_and_counts_what_it_would_have_done():
    engine = replica(mode=AdmissionMode.OBSERVE, kv_blocks=10)
    for prompt, new in ((8, 14), (8, 30), (8, 60)):  # 6 + 6 and 17 blocks
        assert engine.offer(request(prompt, new), 0.0).admitted
    assert engine.admission.would_queue == 1
    assert engine.admission.would_refuse == {RefusalReason.NEVER_FITS: 1}
    drain(engine)
    assert engine.traffic().finished == 3


def test_expected_charges_the_worst_case_until_a_request_has_finished():
    engine = replica(charge=ChargePolicy.EXPECTED, caching=False)
    first = request(8, 64)
    assert engine.offer(first, 0.0).admitted
    assert engine.admission.projected_peak_blocks() == 18
    plan = engine.plan(0.0)
    engine.commit(plan, [Outcome(0, FinishReason.STOP)], 1.0, 1.0)
    assert [engine.offer(request(8, 64), 0.0).admitted for _ in range(6)] == [True] * 6
    assert engine.admission.projected_peak_blocks() == 18, "3 blocks each for 9 tokens"
    assert engine.offer(request(8, 64), 0.0).queued
    drain(engine)
    assert engine.traffic().finished == 8, "estimates were wrong, and nobody was dropped"


def test_a_request_that_outlives_its_estimate_is_estimated_again():
    mean = RunningMean()
    assert mean.expected_output_tokens(5, 0) is None
    mean.observe(5, 10)
    mean.observe(5, 20)
    assert [mean.expected_output_tokens(5, g) for g in (0, 14, 15, 29, 30)] == [15, 15, 30, 30, 45]


def test_the_running_mean_follows_a_change():
    mean = RunningMean(memory_requests=10)
    for _ in range(100):
        mean.observe(1, 10)
    for _ in range(100):
        mean.observe(1, 50)
    assert mean.mean_tokens == pytest.approx(50, abs=0.1)


def test_a_live_shared_prefix_is_charged_once():
    prompt = [1] * 33
    engine = replica(blocks=30, kv_blocks=30)
    assert engine.offer(request(prompt, 10), 0.0).admitted
    run_step(engine)
    peak = engine.admission.projected_peak_blocks()
    assert engine.offer(request(prompt, 10), 0.0).admitted
    grown = engine.admission.projected_peak_blocks() - peak
    assert grown == 11 - 8, "8 full blocks of the prompt are held already"
    run_step(engine)
    assert engine.occupancy().referenced_blocks == 9 + 1
    drain(engine)
    assert engine.scheduler.preemptions == 0


def test_limits_that_tighten_hold_back_new_requests_and_drop_none():
    engine = replica()
    admitted, queued = request(8, 40), request(8, 60)
    assert engine.offer(admitted, 0.0).admitted
    assert engine.offer(queued, 0.0).queued
    engine.set_limits(limits(kv_blocks=5))
    refusal = engine.offer(request(8, 20), 0.0).refusal
    assert refusal is not None and refusal.reason is RefusalReason.NEVER_FITS
    assert engine.offer(request(4, 4), 0.0).queued
    drain(engine)
    assert admitted.finish_reason is queued.finish_reason is FinishReason.LENGTH
    assert engine.pending_kv_blocks is None
    assert engine.traffic().preemptions == 0


def test_abort_leaves_no_trace_wherever_the_request_is():
    engine = replica()
    running, queued = request(8, 64), request(8, 64)
    engine.offer(running, 0.0)
    engine.offer(queued, 0.0)
    plan = engine.plan(0.0)
    assert engine.abort(running)
    assert engine.abort(queued)
    assert not engine.abort(running)
    engine.commit(plan, [Outcome(0)], 1.0, 1.0)
    assert not engine.busy
    use = engine.occupancy()
    assert (use.referenced_blocks, use.reserved_blocks, use.waiting_blocks) == (0, 0, 0)
    assert engine.traffic().cancelled == 2
    assert engine.in_flight().requests == 0


def test_blocks_are_integrated_over_the_life_of_a_request():
    engine = replica()
    one = request(4, 6, arrival=-2.0)
    engine.offer(one, 0.0)
    for step in range(6):
        run_step(engine, now=float(step), seconds=1.0)
    assert one.finish_reason is FinishReason.LENGTH
    # 4 prompt tokens fill a block, tokens 5 to 8 the second one, the last token needs no slot:
    # step 0 holds one block, steps 1 to 4 two, and step 5 three.
    traffic = engine.traffic()
    assert traffic.finished_block_seconds == 1 * 1 + 4 * 2 + 1 * 3
    assert traffic.finished_block_squared_seconds == 1 * 1 + 4 * 4 + 1 * 9
    assert (traffic.finished_prompt_tokens, traffic.finished_output_tokens) == (4, 6)
    assert traffic.finished_prompt_output_tokens == 24
    assert (traffic.prefill_tokens, traffic.decode_tokens, traffic.steps) == (4, 5, 6)
    assert traffic.step_seconds == 6.0
    assert traffic.time_to_first_token.sum_seconds == 3.0
    assert traffic.time_per_output_token.sum_seconds == 1.0
    assert traffic.queue_wait.sum_seconds == 2.0


PLAYERS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=30),
        st.integers(1, 30),  # max_tokens
        st.integers(1, 30),  # true length
        st.integers(0, 12),  # steps before it arrives
        st.integers(0, 2),  # priority
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150)
@given(
    PLAYERS,
    st.integers(16, 30),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 8),
    st.sets(st.integers(0, 13)),
)
@example(
    players=[
        ([0], 1, 1, 0, 0),
        ([0], 11, 11, 10, 0),
        ([0, 0], 1, 1, 6, 2),
        ([1, 0] + [1] * 9, 27, 27, 12, 2),
        ([1, 1, 0] + [1] * 9, 25, 10, 9, 2),
        ([1, 0] + [1] * 8 + [0] * 4, 19, 12, 9, 1),
    ],  # a prompt of one token waits for its start behind long prefills
    blocks=18,
    caching=False,
    step_tokens=3,
    sequences=4,
    leavers=set(),
)
def test_under_worst_case_no_admitted_request_is_ever_preempted(
    players, blocks, caching, step_tokens, sequences, leavers
):
    engine = replica(
        blocks,
        caching,
        kv_blocks=blocks,
        step_tokens=step_tokens,
        max_sequences=sequences,
        queue_requests=100,
        queue_tokens=10_000,
    )
    arrivals = [
        (after, request(prompt, new, priority=priority), length)
        for prompt, new, length, after, priority in players
    ]
    lengths = {made: length for _, made, length in arrivals}
    for step in range(5_000):
        for place, (after, made, _) in enumerate(arrivals):
            if after == step:
                assert engine.offer(made, float(step)).refusal is None
            if place in leavers and after + 9 == step:
                engine.abort(made)
        plan = engine.plan(float(step))
        assert plan.preempted == ()
        assert engine.occupancy().referenced_blocks <= blocks
        outcomes = [
            Outcome(
                step % 2,
                FinishReason.STOP if c.request.generated_tokens + 1 >= lengths[c.request] else None,
            )
            for c in plan.chunks
            if c.samples
        ]
        engine.commit(plan, outcomes, float(step), 1.0)
        engine.scheduler.check()
        if step > 12 and not engine.busy:
            break
    assert engine.scheduler.preemptions == 0
    assert all(
        made.finish_reason is not None or i in leavers for i, (_, made, _) in enumerate(arrivals)
    )


@settings(max_examples=150)
@given(
    PLAYERS,
    st.integers(16, 30),
    st.sampled_from(list(ChargePolicy)),
    st.sampled_from(list(AdmissionMode)),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=4),
)
def test_whatever_is_accepted_finishes_under_every_policy_mode_and_change(
    players, blocks, charge, mode, changes
):
    engine = replica(blocks, charge=charge, mode=mode, kv_blocks=blocks, watermark_blocks=2)
    accepted = []
    for step in range(5_000):
        for at, kv_blocks in changes:
            if at == step:
                engine.set_limits(engine.limits.model_copy(update={"kv_blocks": kv_blocks}))
        for prompt, new, _, after, priority in players:
            if after == step:
                made = request(prompt, new, priority=priority)
                if engine.offer(made, float(step)).refusal is None:
                    accepted.append(made)
        run_step(engine, float(step))
        if step > 40 and not engine.busy:
            break
    assert all(r.finish_reason is FinishReason.LENGTH for r in accepted)
    assert engine.occupancy().referenced_blocks == 0
    traffic = engine.traffic()
    assert traffic.arrivals == len(players)
    assert traffic.admitted == traffic.finished == len(accepted)
    assert traffic.admitted + sum(traffic.refused.values()) == traffic.arrivals
