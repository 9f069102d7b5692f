"""Tokens of texts, estimated from what engines counted."""

from hypothesis import given
from hypothesis import strategies as st
from kvscaler.engine.token_estimate import TEMPLATE_TOKENS, ChargeBasis, LearnedTokens


def test_nothing_learned_is_a_token_a_byte_and_a_template() -> None:
    assert LearnedTokens().estimate(1000) == (1000 + TEMPLATE_TOKENS, ChargeBasis.NOTHING_LEARNED)


def test_it_learns_each_size_apart_and_borrows_from_smaller_ones() -> None:
    learned = LearnedTokens()
    learned.observe(20, 60)  # a short prompt is mostly template
    learned.observe(4000, 1000)
    assert learned.estimate(20) == (60, ChargeBasis.LEARNED)
    assert learned.estimate(4000) == (1000, ChargeBasis.LEARNED)
    assert learned.estimate(3000) == (750, ChargeBasis.LEARNED)
    assert learned.estimate(40000) == (10000, ChargeBasis.LEARNED)
    assert learned.estimate(100) == (300, ChargeBasis.LEARNED), "from the smaller class: too much"
    assert learned.estimate(200) == (200 + TEMPLATE_TOKENS, ChargeBasis.LEARNED), "the worst case"
    assert learned.estimate(2)[1] is ChargeBasis.NOTHING_LEARNED


@given(st.lists(st.integers(200, 400), min_size=20, max_size=200))
def test_most_texts_have_no_more_tokens_than_estimated(tokens: list[int]) -> None:
    learned = LearnedTokens()
    for count in tokens:
        learned.observe(1024, count)
    estimate, basis = learned.estimate(1024)
    assert basis is ChargeBasis.LEARNED
    assert sum(count > estimate for count in tokens) <= len(tokens) / 2
    assert estimate <= 3 * max(tokens)


def test_it_follows_when_texts_change() -> None:
    learned = LearnedTokens()
    for _ in range(1000):
        learned.observe(1000, 250)
    for _ in range(2000):
        learned.observe(1000, 500)
    assert 499 <= learned.estimate(1000)[0] <= 520
