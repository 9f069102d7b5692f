import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.protocol.state import InFlight, TrafficCounters
from kvscaler.traffic.lengths import length_statistics, output_correction
from kvscaler.traffic.window import LengthBasis


def watch(seed: int, seconds: float, draw, requests_per_second: float = 5.0):
    """Outputs at one token a second, watched for `seconds` after a start: `(finished, in flight)`."""
    source = random.Random(seed)
    finished, running = [], []
    t = source.expovariate(requests_per_second)
    while t < seconds:
        length = draw(source)
        (finished if t + length <= seconds else running).append(min(length, seconds - t))
        t += source.expovariate(requests_per_second)
    return finished, running


def corrected_mean(finished, running) -> float:
    in_flight = InFlight(requests=len(running), generated_tokens=int(sum(running)))
    factor = output_correction(
        len(finished), sum(finished), sum(x * x for x in finished), in_flight
    )
    return factor * sum(finished) / len(finished)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mean", [60.0, 120.0])
def test_pitfall_policy_6_means_are_not_short_after_a_start(seed, mean):
    finished, running = watch(seed, 60.0, lambda r: r.expovariate(1 / mean))
    plain = sum(finished) / len(finished)
    corrected = corrected_mean(finished, running)
    assert plain < 0.5 * mean
    assert corrected > 0.65 * mean
    assert corrected < 1.5 * mean


@pytest.mark.parametrize("seed", range(5))
def test_alike_outputs_are_hardly_corrected(seed):
    finished, running = watch(seed, 60.0, lambda r: r.uniform(25.0, 35.0))
    assert corrected_mean(finished, running) == pytest.approx(30.0, rel=0.15)


def test_a_request_in_flight_beyond_the_mean_raises_it_at_least_to_what_it_has():
    factor = output_correction(10, 100.0, 1000.0, InFlight(requests=10, generated_tokens=1000))
    assert factor * 10.0 >= (100 + 1000) / 20


@given(
    st.integers(1, 500),
    st.floats(1, 1000),
    st.floats(1, 5),
    st.integers(0, 100),
    st.integers(0, 10000),
)
def test_a_correction_never_shortens_and_never_exceeds_total_over_finished(
    finished, mean, spread, running, generated
):
    tokens = finished * mean
    in_flight = InFlight(requests=running, generated_tokens=generated if running else 0)
    factor = output_correction(finished, tokens, tokens * mean * spread, in_flight)
    assert factor >= 1.0
    assert factor * mean <= (tokens + in_flight.generated_tokens) / finished * (1 + 1e-9)


def test_too_few_finished_give_no_statistics():
    assert (
        length_statistics(TrafficCounters(finished=2, finished_output_tokens=9), InFlight()) is None
    )


def test_moments_per_request():
    sums = TrafficCounters(
        finished=4,
        finished_prompt_tokens=40,
        finished_prompt_tokens_squared=440,
        finished_output_tokens=20,
        finished_output_tokens_squared=120,
        finished_prompt_output_tokens=240,
        finished_block_seconds=8,
        finished_block_squared_seconds=24,
    )
    found = length_statistics(sums, InFlight())
    assert (found.prompt_mean_tokens, found.output_mean_tokens) == (10, 5)
    assert (found.prompt_output_mean, found.block_seconds) == (60, 2)
    assert found.basis is LengthBasis.FINISHED
