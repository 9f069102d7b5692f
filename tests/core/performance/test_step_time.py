import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.performance import LLAMA_3_1_8B_H100, MAX_UTILIZATION, RequestWork, StepTimeModel
from kvscaler.protocol.state import StepCosts

CONV = RequestWork(1247, 2.6e6, 221, 8.5e4, 2.8e5)
MODELS = st.builds(
    StepTimeModel,
    st.floats(1e-4, 0.05),
    st.floats(1e-7, 1e-3),
    st.floats(1e-10, 1e-6),
    st.floats(1e-7, 1e-3),
    st.just("drawn"),
)


def test_a_step_is_linear_in_sequences_context_and_prefill():
    model = StepTimeModel(10e-3, 1e-3, 1e-6, 1e-4, "test")
    assert model.step_seconds(4, 5000, 100) == pytest.approx(10e-3 + 4e-3 + 5e-3 + 10e-3)


def test_measured_costs_become_the_model():
    costs = StepCosts(
        base_seconds=1.0,
        per_sequence_seconds=2.0,
        per_context_token_seconds=3.0,
        per_prefill_token_seconds=4.0,
    )
    assert StepTimeModel.from_costs(costs).step_seconds(1, 1, 1) == 10.0


def test_h100_decode_at_batch_64_and_2000_tokens_is_about_12_ms():
    assert LLAMA_3_1_8B_H100.step_seconds(64, 64 * 2000) == pytest.approx(12.4e-3, rel=0.01)


def test_rate_is_the_one_at_which_the_closed_form_meets_the_target():
    rate = LLAMA_3_1_8B_H100.rate_for(CONV, 0.030)
    rho = rate * LLAMA_3_1_8B_H100.work_seconds(CONV)
    assert LLAMA_3_1_8B_H100.time_per_output_token_seconds(rho) == pytest.approx(0.030)


def test_a_target_below_an_idle_step_is_unreachable():
    assert LLAMA_3_1_8B_H100.rate_for(CONV, 0.005) is None


def test_no_steady_state_at_full_utilization():
    with pytest.raises(ValueError, match="no steady state"):
        LLAMA_3_1_8B_H100.time_per_output_token_seconds(1.0)


@given(MODELS, st.floats(0.001, 10))
def test_utilization_stays_below_its_bound(model, target):
    rate = model.rate_for(CONV, target)
    if rate is not None:
        assert rate * model.work_seconds(CONV) <= MAX_UTILIZATION * (1 + 1e-9)


@given(MODELS, st.floats(0, 0.9), st.floats(0, 0.9))
def test_busier_replicas_hold_requests_longer(model, a, b):
    low, high = sorted((a, b))
    assert model.residence_seconds(CONV, low) <= model.residence_seconds(CONV, high)
    assert model.kv_token_seconds(CONV, low) <= model.kv_token_seconds(CONV, high)


@given(MODELS, st.floats(0, 1))
def test_cached_prompts_cost_less_prefill(model, share):
    assert model.work_seconds(CONV, share) <= model.work_seconds(CONV)


def closed_form_by_iteration(model: StepTimeModel, rate: float) -> float:
    """TPOT by letting batch and context settle: Little's law in place of the closed form."""
    tpot = model.base_seconds
    for _ in range(20_000):
        batch = rate * CONV.output_mean_tokens * tpot
        context = rate * CONV.kv_token_steps * tpot
        prefill = rate * model.prefill_work_seconds(CONV) * tpot
        tpot = (
            model.step_seconds(0, 0)
            + prefill
            + (model.per_sequence_seconds * batch + model.per_context_token_seconds * context)
        )
    return tpot


def test_the_closed_form_is_the_fixed_point():
    rate = 5.0
    rho = rate * LLAMA_3_1_8B_H100.work_seconds(CONV)
    assert rho < 0.9
    closed = LLAMA_3_1_8B_H100.time_per_output_token_seconds(rho)
    assert closed_form_by_iteration(LLAMA_3_1_8B_H100, rate) == pytest.approx(closed)


def test_a_pair_of_prefill_costs_what_is_known_of_it() -> None:
    known = StepTimeModel(1.0, 0.1, 0.01, 0.001, "test", per_prefill_pair_seconds=0.0001)
    assert known.step_seconds(0, 0, 10, 55) == pytest.approx(1.0 + 0.01 + 0.0055)
    unknown = StepTimeModel(1.0, 0.1, 0.01, 0.001, "test")
    assert unknown.step_seconds(0, 0, 10, 55) == pytest.approx(1.0 + 0.01 + 0.55)


def test_a_prompt_costs_the_same_as_work_and_as_steps_in_chunks():
    model, prompt, chunk = LLAMA_3_1_8B_H100, 20_000, 2_000
    steps = sum(
        model.step_seconds(0, 0, chunk, chunk * start + chunk * (chunk + 1) // 2)
        - model.base_seconds
        for start in range(0, prompt, chunk)
    )
    work = RequestWork(prompt, prompt**2, 0, 0, 0)
    assert model.prefill_work_seconds(work) == pytest.approx(steps, rel=1e-3)


@given(MODELS, st.floats(0.001, 1000))
def test_reported_costs_are_all_stretched_alike(model, scale):
    stretched = StepTimeModel.from_costs(model.costs(scale))
    assert stretched.step_seconds(3, 100, 20, 210) == pytest.approx(
        scale * model.step_seconds(3, 100, 20, 210)
    )
