"""A step up is seen early, chance is not taken for one, and what is believed has been proved."""

import math
import random
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.scaling.arrivals import arrivals, highest_rate, lowest_rate, tail_probability
from kvscaler.traffic import Rate
from kvscaler.traffic.window import RECENT_SECONDS


def stream(source: random.Random, begin: float, end: float, per_second: float) -> list[float]:
    times, t = [], begin + source.expovariate(per_second)
    while t < end:
        times.append(t)
        t += source.expovariate(per_second)
    return times


def look(times: list[float], now: float):
    def last(seconds: float) -> Rate:
        count = bisect_right(times, now) - bisect_right(times, now - seconds)
        return Rate(float(count), seconds)

    return arrivals(last(45.0), last(12.0), *[last(s) for s in RECENT_SECONDS])


def poisson_tail(least: int, mean: float) -> float:
    below = sum(math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(least))
    return 1.0 - below


@pytest.mark.parametrize("per_second", [0.1, 0.3, 1.0, 5.0])
def test_a_look_every_second_at_constant_load_finds_less_than_two_false_steps_an_hour(per_second):
    hours, begun = 5, 0
    for seed in range(hours):
        times = stream(random.Random(seed), 0.0, 3645.0, per_second)
        steps = [look(times, float(second)).step for second in range(45, 3645)]
        begun += sum(1 for a, b in zip([False, *steps], steps, strict=False) if b and not a)
    assert begun / hours < 2.0


def test_a_sevenfold_rate_is_seen_within_5_s_and_most_of_it_within_13_s():
    seen, most = [], []
    for seed in range(60):
        source = random.Random(seed)
        times = stream(source, 0.0, 60.0, 0.29) + stream(source, 60.0, 90.0, 2.08)
        found = [look(times, 60.0 + second).per_second for second in range(1, 30)]
        seen.append(next((i + 1 for i, rate in enumerate(found) if rate > 0.7), 99))
        most.append(next((i + 1 for i, rate in enumerate(found) if rate > 1.4), 99))
    assert sorted(seen)[30] <= 5
    assert sorted(seen)[54] <= 12
    assert sorted(most)[30] <= 13


def highest_believed(seed: int, calm: float, spike: float, seconds: int = 90) -> float:
    """Over the spike's true rate: what was believed at most at any look during it."""
    source = random.Random(seed)
    times = stream(source, 0.0, 60.0, calm) + stream(source, 60.0, 60.0 + seconds, spike)
    return max(look(times, 60.0 + s).per_second for s in range(1, seconds)) / spike


def test_bursts_within_a_spike_are_no_further_steps():
    highest = sorted(highest_believed(seed, 0.23, 2.33) for seed in range(200))
    assert highest[100] < 1.2
    assert highest[180] < 1.36


def test_a_second_step_within_45_s_is_seen_too():
    second = []
    for seed in range(40):
        source = random.Random(seed)
        times = stream(source, 0.0, 60.0, 0.29) + stream(source, 60.0, 80.0, 2.0)
        times += stream(source, 80.0, 110.0, 8.0)
        found = [look(times, 80.0 + s).per_second for s in range(1, 30)]
        second.append(next((i + 1 for i, rate in enumerate(found) if rate > 5.0), 99))
    assert sorted(second)[20] <= 6
    assert sorted(second)[36] <= 13


def test_what_is_believed_is_proved_by_its_window():
    for count, seconds, error in ((36, 12.0, 0.15866), (36, 24.0, 0.15866), (7, 3.0, 0.15866 / 4)):
        mean = lowest_rate(Rate(count, seconds)) * seconds
        assert poisson_tail(count, mean) == pytest.approx(error, rel=0.02)


def test_a_burst_of_a_second_asks_for_no_more_than_the_last_12_s_allow():
    short = Rate(10, 12)
    found = arrivals(Rate(10, 45), short, *[Rate(10, s) for s in RECENT_SECONDS])
    assert found.step
    assert found.per_second <= highest_rate(short, 1.0) < lowest_rate(Rate(10, 2))


def test_a_burst_that_has_passed_is_no_step_any_more():
    times = [*range(-60, 100), *[100 + i / 20 for i in range(20)], *range(102, 220)]
    assert look(times, 101.0).step
    assert not look(times, 130.0).step
    assert look(times, 160.0).per_second == pytest.approx(1.0, rel=0.05)


@given(st.integers(0, 60), st.integers(0, 60), st.floats(0.01, 0.9))
def test_the_tail_is_that_of_the_binomial_distribution(least, trials, share):
    exact = sum(
        math.comb(trials, k) * share**k * (1 - share) ** (trials - k)
        for k in range(least, trials + 1)
    )
    found = tail_probability(least, trials, share)
    assert found == pytest.approx(exact, rel=1e-4) or (found == 1.0 and least <= trials * share)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 50))
def test_more_in_all_windows_never_lowers_a_proved_rate(count, more, seconds):
    window = Rate(count, 1.0 + seconds)
    assert lowest_rate(Rate(count + more, window.seconds)) >= lowest_rate(window) - 1e-12
    assert lowest_rate(window) <= window.per_second
