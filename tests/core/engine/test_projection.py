"""The projected peak against step-by-step addition."""

from hypothesis import given
from hypothesis import strategies as st
from kvscaler.engine.projection import Holding, projected_peak_blocks, steps_until_fit


def uniform(prompt: int, generated: int) -> int:
    return -(-(prompt + generated) // 4)


def sliding(prompt: int, generated: int) -> int:
    """A fixed state, and growth up to a window."""
    return 2 + min(5, -(-(prompt + generated) // 4))


def by_steps(holdings: list[Holding], footprint) -> int:
    last = max((h.end_steps for h in holdings), default=0)
    return max(
        (
            sum(
                footprint(h.prompt_tokens, h.generated_tokens + min(step, h.remaining_tokens))
                - h.shared_blocks
                for h in holdings
                if h.end_steps >= step
            )
            for step in range(last + 1)
        ),
        default=0,
    )


@st.composite
def holding(draw: st.DrawFn) -> Holding:
    remaining = draw(st.integers(0, 40))
    return Holding(
        draw(st.integers(1, 30)),
        draw(st.integers(0, 20)),
        remaining,
        remaining + draw(st.integers(0, 6)),
        draw(st.integers(0, 1)),
    )


HOLDINGS = st.lists(holding(), max_size=12)


def test_requests_that_end_early_make_room_for_those_that_go_on():
    first = Holding(8, 0, 8, 8)  # 2 blocks, 4 at its end
    second = Holding(8, 0, 80, 80)  # 2 blocks, 4 when the first ends, 22 at its own end
    assert projected_peak_blocks([first, second], uniform) == 22
    assert projected_peak_blocks([first, Holding(8, 0, 9, 9)], uniform) == 8
    assert projected_peak_blocks([], uniform) == 0


def test_the_token_formula_of_the_past_future_scheduler_is_the_case_of_one_token_blocks():
    held, remaining = [7, 3, 11, 2], [5, 9, 1, 30]
    order = sorted(range(4), key=lambda i: -remaining[i])
    published = max(
        remaining[i] * (rank + 1) + sum(held[j] for j in order[: rank + 1])
        for rank, i in enumerate(order)
    )
    holdings = [Holding(h, 0, r, r) for h, r in zip(held, remaining, strict=True)]
    assert (
        projected_peak_blocks(holdings, lambda prompt, generated: prompt + generated) == published
    )


@given(HOLDINGS, st.sampled_from([uniform, sliding]), st.integers(0, 60))
def test_the_peak_is_that_of_adding_up_every_step(holdings, footprint, enough):
    exact = by_steps(holdings, footprint)
    assert projected_peak_blocks(holdings, footprint) == exact
    found = projected_peak_blocks(holdings, footprint, enough)
    if exact > enough:
        assert found == exact
    else:
        assert exact <= found <= enough or not holdings


@given(HOLDINGS, holding(), st.integers(20, 60), st.integers(1, 12))
def test_after_the_steps_until_fit_it_fits(holdings, candidate, limit, sequences):
    candidate = candidate._replace(shared_blocks=0)
    steps = steps_until_fit(holdings, candidate, uniform, limit, sequences)
    later = [h.after(steps)._replace(shared_blocks=0) for h in holdings if h.end_steps > steps]
    if steps == 0:
        later = holdings
    alone = by_steps([candidate], uniform)
    assert len(later) < sequences or not later
    assert by_steps([*later, candidate], uniform) <= max(limit, alone)
    assert steps <= max((h.end_steps for h in holdings), default=0) or steps == 1
