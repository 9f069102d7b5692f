"""What a step is made of, as the step-time model counts it."""

from hypothesis import given
from hypothesis import strategies as st
from kvscaler.engine.request import EngineRequest
from kvscaler.engine.step import Chunk, StepPlan


def chunk(start: int, length: int, samples: bool) -> Chunk:
    return Chunk(EngineRequest.from_prompt("r", [0], 1, 0.0), start, length, samples)


def test_decodes_read_their_context_and_prefill_meets_pairs():
    plan = StepPlan((chunk(99, 1, True), chunk(49, 1, True), chunk(10, 5, False)))
    assert (plan.decode_sequences, plan.context_tokens) == (2, 150)
    assert (plan.prefill_tokens, plan.prefill_pairs) == (5, 11 + 12 + 13 + 14 + 15)


@given(st.integers(2, 200), st.integers(1, 60))
def test_pairs_do_not_depend_on_how_a_prompt_is_cut(prompt, size):
    cuts = [(start, min(size, prompt - start)) for start in range(0, prompt, size)]
    plans = [StepPlan((chunk(start, length, False),)) for start, length in cuts]
    assert sum(plan.prefill_pairs for plan in plans) == prompt * (prompt + 1) // 2
