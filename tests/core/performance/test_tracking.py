"""Step costs follow the machine: a slower one, a busier one, one that stalls once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.performance.step_time import StepTimeModel
from kvscaler.performance.tracking import StepCostTracker
from kvscaler.protocol.state import StepCosts

START = StepCosts(
    base_seconds=0.02,
    per_sequence_seconds=0.001,
    per_context_token_seconds=2e-6,
    per_prefill_token_seconds=4e-4,
)


def scaled(costs: StepCosts, factor: float) -> StepTimeModel:
    return StepTimeModel(
        costs.base_seconds * factor,
        costs.per_sequence_seconds * factor,
        costs.per_context_token_seconds * factor,
        costs.per_prefill_token_seconds * factor,
        "true",
    )


@given(st.floats(min_value=0.2, max_value=9), st.integers(min_value=0, max_value=100))
def test_it_converges_to_another_pace(factor: float, seed: int) -> None:
    rng = random.Random(seed)
    true, tracker = scaled(START, factor), StepCostTracker(START)
    for step in range(600):
        decodes, context = rng.randint(1, 32), rng.randint(10, 8000)
        prefill = rng.choice([64, 256, 512]) if step % 4 == 0 else 0
        tracker.observe(decodes, context, prefill, true.step_seconds(decodes, context, prefill))
    costs = tracker.costs
    assert costs.base_seconds == pytest.approx(true.base_seconds, rel=0.02)
    assert costs.per_context_token_seconds == pytest.approx(
        true.per_context_token_seconds, rel=0.02
    )
    assert costs.per_prefill_token_seconds == pytest.approx(
        true.per_prefill_token_seconds, rel=0.05
    )


def test_one_stall_changes_little() -> None:
    tracker = StepCostTracker(START)
    tracker.observe(4, 100, 0, 60.0)
    assert tracker.costs.base_seconds < 1.5 * START.base_seconds
    tracker.observe(4, 100, 64, 60.0)
    assert tracker.costs.per_prefill_token_seconds < 1.5 * START.per_prefill_token_seconds


def test_a_prompt_token_cost_that_was_unknown_is_learned() -> None:
    tracker = StepCostTracker(START.model_copy(update={"per_prefill_token_seconds": 0.0}))
    true = scaled(START, 1)
    for _ in range(100):
        tracker.observe(0, 512, 512, true.step_seconds(0, 512, 512))
    assert tracker.costs.per_prefill_token_seconds == pytest.approx(4e-4, rel=0.01)


def test_nothing_is_learned_from_no_time() -> None:
    tracker = StepCostTracker(START)
    tracker.observe(1, 10, 0, 0.0)
    assert tracker.costs == START


def test_attention_of_long_prompts_is_not_taken_for_a_cost_of_their_tokens() -> None:
    known = START.model_copy(update={"per_prefill_pair_seconds": 1e-7})
    tracker, true = StepCostTracker(known), StepTimeModel.from_costs(known)
    for start in range(0, 20_000, 500):
        pairs = 500 * start + 500 * 501 // 2
        seconds = true.step_seconds(2, 40, 500, pairs)
        tracker.observe(2, 40, 500, seconds, prefill_pairs=pairs)
    assert tracker.costs.per_prefill_token_seconds == pytest.approx(4e-4)
    assert tracker.costs.per_prefill_pair_seconds == 1e-7
