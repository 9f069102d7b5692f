"""Sampling: what may be drawn, how often, and what is reported."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvscaler_sidecar.draws import uniform
from kvscaler_sidecar.executors.seam import SamplingParams
from kvscaler_sidecar.sampling import SamplingRow, sample

PROBABILITIES = [0.5, 0.25, 0.125, 0.0625, 0.0625]


def logits(rows: int = 1) -> torch.Tensor:
    return torch.tensor([PROBABILITIES] * rows).log() + 3.0


def drawn(count: int, **params: float) -> list[int]:
    wanted = SamplingParams(seed=1, **params)  # type: ignore[arg-type]
    rows = [SamplingRow(wanted, seed) for seed in range(count)]
    return [token.token_id for token in sample(logits(count), rows)]


def test_greedy_takes_the_best() -> None:
    assert set(drawn(5, temperature=0.0, top_p=0.01)) == {0}


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-6])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.5}, {"top_k": 3}])
def test_a_temperature_next_to_zero_is_greedy(temperature: float, more: dict[str, float]) -> None:
    """Divided by it, logits are infinite; the draw then was the last token of the vocabulary."""
    assert set(drawn(5, temperature=temperature, **more)) == {0}


def test_draws_follow_the_probabilities() -> None:
    tokens = drawn(4000, temperature=1.0)
    for token, expected in enumerate(PROBABILITIES):
        spread = math.sqrt(expected * (1 - expected) / 4000)
        assert abs(tokens.count(token) / 4000 - expected) < 5 * spread


def test_temperature_sharpens_and_flattens() -> None:
    cold, warm = drawn(2000, temperature=0.5), drawn(2000, temperature=2.0)
    powers = [p**2 for p in PROBABILITIES]
    assert abs(cold.count(0) / 2000 - powers[0] / sum(powers)) < 0.05
    roots = [p**0.5 for p in PROBABILITIES]
    assert abs(warm.count(0) / 2000 - roots[0] / sum(roots)) < 0.05


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.75}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        # Of the mass of the best three, 0.875: 0.5 / 0.875 is 0.57.
        ({"top_k": 3, "top_p": 0.55}, {0}),
        ({"top_k": 3, "top_p": 0.58}, {0, 1}),
    ],
)
def test_filters_allow_exactly(params: dict[str, float], allowed: set[int]) -> None:
    assert set(drawn(400, **params)) == allowed


def test_nucleus_wider_than_its_first_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscaler_sidecar.sampling.NUCLEUS_CANDIDATES", 2)
    assert set(drawn(400, top_p=0.8)) == {0, 1, 2}


def test_penalties_count_what_was_generated() -> None:
    base = [2.0, 1.0, 0.0]

    def best(generated: list[int], **penalties: float) -> int:
        params = SamplingParams(temperature=0.0, **penalties)  # type: ignore[arg-type]
        return sample(torch.tensor([base]), [SamplingRow(params, 0, generated)])[0].token_id

    assert best([0], presence_penalty=0.9) == 0
    assert best([0], presence_penalty=1.1) == 1
    assert best([0, 0], presence_penalty=0.9) == 0
    assert best([0, 0], frequency_penalty=0.6) == 1
    assert best([0, 0, 1, 1], frequency_penalty=1.2) == 2
    assert best([1], frequency_penalty=-1.5) == 1
    assert best([], presence_penalty=2.0) == 0


def test_logprobs_are_the_models_own() -> None:
    params = SamplingParams(temperature=0.5, top_k=1, presence_penalty=2.0, seed=0, logprobs=2)
    plain = SamplingParams(temperature=0.0)
    first, second = sample(logits(2), [SamplingRow(params, 0, [0, 0]), SamplingRow(plain, 0)])
    assert second.logprobs is None
    assert first.token_id == 1  # 0.5 less two nats is the less
    assert first.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(math.log(0.25), abs=1e-5)
    assert [token for token, _ in first.logprobs.top] == [0, 1]
    assert first.logprobs.top[0][1] == pytest.approx(math.log(0.5), abs=1e-5)


def test_zero_logprobs_reports_only_the_chosen() -> None:
    params = SamplingParams(temperature=0.0, logprobs=0)
    token = sample(logits(), [SamplingRow(params, 0)])[0]
    assert token.logprobs is not None
    assert token.logprobs.top == ()


def test_same_seed_and_index_draw_the_same_anywhere() -> None:
    wanted = SamplingParams(temperature=1.0)
    rows = [SamplingRow(wanted, 5, [1] * n) for n in range(20)]
    together = [token.token_id for token in sample(logits(20), rows)]
    alone = [sample(logits(), [row])[0].token_id for row in rows]
    assert together == alone
    assert len(set(together)) > 1


@given(st.integers(-(2**63), 2**64), st.integers(0, 10_000))
def test_uniform_is_in_its_range_and_repeats(seed: int, index: int) -> None:
    number = uniform(seed, index)
    assert 0 <= number < 1
    assert number == uniform(seed, index)


def test_uniform_is_the_same_on_every_machine() -> None:
    assert uniform(0, 0) == 0.3859926107094097
