"""The books of an engine that can't be looked into: what is charged, corrected, counted, learned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.budget import AdmissionPolicy, Footprint, limits_over_pool
from kvscaler.engine.gated import GatedEngine, GatedRequest
from kvscaler.engine.request import FinishReason
from kvscaler.protocol.limits import AdmissionMode, ChargePolicy
from kvscaler.protocol.refusals import RefusalReason

BLOCK_TOKENS = 4


def engine(blocks: int = 16, **policy: object) -> GatedEngine:
    limits = limits_over_pool(
        AdmissionPolicy(
            **{"charge": ChargePolicy.WORST_CASE, "watermark_percent": 0, **policy}  # type: ignore[arg-type]
        ),
        kv_blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        max_sequences=16,
        step_tokens=512,
        max_context_tokens=64,
    )
    return GatedEngine(limits, blocks, Footprint(BLOCK_TOKENS).blocks)


def request(
    gate: GatedEngine, prompt: int, output: int, choices: int = 1, streams: bool = True
) -> GatedRequest:
    return gate.request("r", [prompt], [output], choices, 0.0, streams=streams)


def test_a_stream_grows_by_what_is_seen_and_ends_as_it_is_told() -> None:
    gate = engine()
    gated = request(gate, 8, 20)
    assert gate.offer(gated, 0.0) is None and gated.admitted
    gate.forwarded(gated, 0.0)
    assert gate.held_blocks == 2
    assert gate.admission.projected_peak_blocks() == 7
    gate.progress(gated, 1, 1.0)
    gate.progress(gated, 9, 5.0)
    assert gate.held_blocks == 5
    gate.correct_prompt(gated, 12)
    assert gate.held_blocks == 6
    assert gate.finish(gated, 6.0, 10)
    counters = gate.recorder.counters()
    assert (counters.finished_prompt_tokens, counters.finished_output_tokens) == (12, 10)
    assert counters.time_to_first_token.sum_seconds == 1.0
    assert gate.held_blocks == 0 and not gate.busy
    assert gate.admission.step_seconds == pytest.approx(4 / 9)
    assert counters.finished_block_seconds > 0


def test_a_whole_answer_grows_by_time_and_shows_no_first_token() -> None:
    gate = engine()
    first = request(gate, 4, 20, streams=False)
    gate.offer(first, 0.0)
    gate.forwarded(first, 0.0)
    gate.tick(5.0)
    assert gate.held_blocks == 1, "no step was timed yet"
    gate.finish(first, 10.0, 10)
    assert gate.admission.step_seconds == 1.0
    second = request(gate, 4, 20, streams=False)
    gate.offer(second, 10.0)
    gate.forwarded(second, 10.0)
    gate.tick(18.0)
    assert gate.held_blocks == 3
    gate.finish(second, 20.0, 10)
    counters = gate.recorder.counters()
    assert counters.finished == 2
    assert sum(counters.time_to_first_token.counts) == 0


def test_a_length_that_nobody_told_counts_in_no_statistics() -> None:
    gate = engine()
    gated = request(gate, 4, 20, streams=False)
    gate.offer(gated, 0.0)
    assert not gate.finish(gated, 1.0)
    counters = gate.recorder.counters()
    assert (counters.admitted, counters.finished, counters.cancelled) == (1, 0, 0)
    assert not gate.busy
    assert gate.admission.step_seconds is None


def test_sequences_that_fit_only_one_after_the_other_are_let_in_alone() -> None:
    gate = engine(blocks=8)
    other = request(gate, 4, 4)
    big = request(gate, 4, 20, choices=4)  # 24 blocks of 8
    late = request(gate, 4, 4)
    for gated in (other, big, late):
        assert gate.offer(gated, 0.0) is None
    assert other.admitted and not big.admitted
    assert gate.pump(1.0) == []
    gate.finish(other, 2.0, 4)
    assert gate.pump(2.0) == [big]
    assert not late.admitted, "nobody overtakes, and the engine is full"
    gate.finish(big, 9.0, 80)
    assert gate.pump(9.0) == [late]
    counters = gate.recorder.counters()
    assert counters.finished_output_tokens == 84


def test_one_refused_sequence_refuses_all() -> None:
    gate = engine(blocks=4, queue_requests=1)
    gate.offer(request(gate, 4, 12), 0.0)
    refused = gate.offer(request(gate, 4, 12, choices=3), 0.0)
    assert refused is not None and refused.reason is RefusalReason.QUEUE_FULL
    assert gate.admission.queued_requests == 0
    assert gate.recorder.counters().cancelled == 1


def test_limits_bound_the_worst_case_and_only_while_they_are_enforced() -> None:
    gate = engine(blocks=16)
    assert gate.worst_case_tokens == 64
    gate.set_limits(gate.limits.model_copy(update={"kv_blocks": 3}))
    assert gate.worst_case_tokens == 12
    gate.set_limits(gate.limits.model_copy(update={"mode": AdmissionMode.OFF}))
    assert gate.worst_case_tokens == 64


def test_use_above_a_lowered_limit_is_pending_and_nothing_is_dropped() -> None:
    gate = engine()
    gated = request(gate, 32, 8)
    gate.offer(gated, 0.0)
    gate.set_limits(gate.limits.model_copy(update={"kv_blocks": 2}))
    assert gate.pending_kv_blocks == 8
    gate.finish(gated, 1.0, 8)
    assert gate.pending_kv_blocks is None


def test_a_wait_that_is_too_long_ends_with_all_its_sequences() -> None:
    gate = engine(blocks=4, max_wait_seconds=5)
    gate.offer(request(gate, 4, 12), 0.0)
    late = request(gate, 4, 4, choices=2)
    assert gate.offer(late, 1.0) is None
    assert gate.expire(6.0) == []
    ((gated, refusal),) = gate.expire(6.5)
    assert gated is late and refusal.reason is RefusalReason.QUEUE_TIMEOUT
    assert gate.admission.queued_requests == 0


def test_an_engine_that_serves_one_before_another_is_let_finish_before_more_comes() -> None:
    """The projection takes all to advance together; what another engine does instead shows later."""
    gate = engine(blocks=12)
    long, short = request(gate, 13, 16), request(gate, 16, 1)
    for gated in (long, short):
        assert gate.offer(gated, 0.0) is None and gated.admitted
        gate.forwarded(gated, 0.0)
    assert gate.admission.projected_peak_blocks() == 9, "the short one ends after a step"
    gate.progress(long, 15, 15.0)
    assert gate.admission.projected_peak_blocks() == 8 + 5, "but it has not even begun"
    late = request(gate, 1, 0)
    assert gate.offer(late, 15.0) is None and not late.admitted
    gate.finish(short, 16.0, 1)
    assert gate.pump(16.0) == [late]


def admitted_requests(live: list[GatedRequest]) -> list[GatedRequest]:
    return [gated for gated in live if gated.admitted]


def check_admissions(gate: GatedEngine, live: list[GatedRequest], before: int) -> None:
    """Whoever was let in beside others fits with them, as far as is known at that time."""
    after = len(admitted_requests(live))
    if after > before:
        assert after == 1 or gate.admission.projected_peak_blocks() <= 12


@given(st.data())
def test_whatever_happens_only_what_fits_is_let_in_and_nothing_is_left(
    data: st.DataObject,
) -> None:
    """Whatever an engine does, in whatever order: nobody is admitted beyond the limit, and in the
    end every request is accounted for once."""
    gate = engine(blocks=12)
    live: list[GatedRequest] = []
    offered = 0
    for now in range(data.draw(st.integers(1, 25))):
        before = len(admitted_requests(live))
        for gated in gate.pump(float(now)):
            gate.forwarded(gated, float(now))
        check_admissions(gate, live, before)
        match data.draw(st.sampled_from(["offer", "progress", "finish", "abort", "break", "away"])):
            case "offer":
                prompt, output = data.draw(st.integers(1, 30)), data.draw(st.integers(0, 18))
                gated = request(gate, prompt, output, streams=data.draw(st.booleans()))
                offered += 1
                before = len(admitted_requests(live))
                if gate.offer(gated, float(now)) is None:
                    live.append(gated)
                    check_admissions(gate, live, before)
                    if gated.admitted:
                        gate.forwarded(gated, float(now))
            case action:
                if not live:
                    continue
                gated = live[data.draw(st.integers(0, len(live) - 1))]
                if action in ("abort", "break") or not gated.admitted:
                    reason = FinishReason.ERROR if action == "break" else FinishReason.ABORT
                    gate.abort(gated, reason)
                    live.remove(gated)
                elif action == "progress":
                    gate.progress(gated, data.draw(st.integers(1, 40)), float(now))
                elif action == "finish":
                    most = gated.sequences[0].max_new_tokens
                    gate.finish(gated, float(now), data.draw(st.none() | st.integers(0, most)))
                    live.remove(gated)
                else:
                    gate.turn_away(gated, RefusalReason.ENGINE_REFUSED)
                    live.remove(gated)
        gate.tick(float(now))
    for gated in live:
        gate.abort(gated)
    counters = gate.recorder.counters()
    assert not gate.busy
    assert gate.recorder.in_flight().requests == 0
    assert counters.arrivals == offered
    ended = counters.finished + counters.cancelled + counters.failed
    assert ended + sum(counters.refused.values()) <= offered


@given(st.data())
def test_the_limit_holds_in_each_step_of_an_engine_that_serves_all_it_runs(
    data: st.DataObject,
) -> None:
    """Under the worst case, while each step gives each running sequence a token, what is promised
    and what is held never exceed the pool."""
    gate = engine(blocks=12)
    gate.admission.step_seconds = 1.0
    live: list[GatedRequest] = []
    produced: dict[GatedRequest, int] = {}

    def forward(gated: GatedRequest, now: float) -> None:
        gate.forwarded(gated, now)
        produced[gated] = 0

    for step in range(data.draw(st.integers(1, 40))):
        now = float(step)
        for gated in gate.pump(now):
            forward(gated, now)
        for _ in range(data.draw(st.integers(0, 3))):
            prompt, output = data.draw(st.integers(1, 30)), data.draw(st.integers(0, 18))
            gated = request(gate, prompt, output, streams=data.draw(st.booleans()))
            if gate.offer(gated, now) is None:
                live.append(gated)
                if gated.admitted:
                    forward(gated, now)
        assert gate.admission.projected_peak_blocks() <= 12
        for gated in admitted_requests(live):
            most = gated.sequences[0].max_new_tokens
            produced[gated] = min(produced[gated] + 1, most)
            if gated.sequences[0].streams and most:
                gate.progress(gated, produced[gated], now + 1)
            if produced[gated] == most or data.draw(st.integers(0, 9)) == 0:
                gate.finish(gated, now + 1, produced[gated])
                live.remove(gated)
        gate.tick(now + 1)
        assert gate.admission.step_seconds == 1.0
        assert gate.admission.projected_peak_blocks() <= 12
        assert gate.held_blocks <= 12
