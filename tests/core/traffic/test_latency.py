import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.protocol.state import LATENCY_BUCKETS_SECONDS, Histogram
from kvscaler.traffic.latency import quantile_seconds, share_within, subtract, total

COUNTS = st.lists(
    st.integers(0, 50),
    min_size=len(LATENCY_BUCKETS_SECONDS) + 1,
    max_size=len(LATENCY_BUCKETS_SECONDS) + 1,
).map(lambda counts: Histogram(counts=tuple(counts), sum_seconds=float(sum(counts))))


def observed(*seconds: float) -> Histogram:
    counts = [0] * (len(LATENCY_BUCKETS_SECONDS) + 1)
    for value in seconds:
        index = sum(1 for bound in LATENCY_BUCKETS_SECONDS if bound < value)
        counts[index] += 1
    return Histogram(counts=tuple(counts), sum_seconds=sum(seconds))


def test_no_observations_have_no_quantile_and_no_share():
    assert quantile_seconds(Histogram(), 0.5) is None
    assert share_within(Histogram(), 1.0) is None


def test_quantiles_lie_in_the_bucket_of_their_rank():
    histogram = observed(0.04, 0.04, 0.25, 4.0)
    assert 0.03 < quantile_seconds(histogram, 0.5) <= 0.05
    assert 0.2 < quantile_seconds(histogram, 0.75) <= 0.3
    assert 3.0 < quantile_seconds(histogram, 1.0) <= 5.0


def test_beyond_the_last_bound_the_answer_is_the_bound():
    assert quantile_seconds(observed(500.0), 0.99) == 120.0
    assert share_within(observed(500.0, 1.0), 120.0) == 0.5


def test_share_at_a_bound_is_exact():
    assert share_within(observed(0.9, 1.9, 2.5, 9.0), 2.0) == 0.5


def test_a_quantile_outside_0_and_1_is_refused():
    with pytest.raises(ValueError, match="within 0 and 1"):
        quantile_seconds(Histogram(), 1.5)


@given(COUNTS, COUNTS)
def test_subtracting_undoes_adding(a, b):
    assert subtract(total([a, b]), b).counts == a.counts


@given(COUNTS, st.floats(0, 1), st.floats(0, 1))
def test_quantiles_never_fall(histogram, p, q):
    low, high = sorted((p, q))
    first, second = quantile_seconds(histogram, low), quantile_seconds(histogram, high)
    assert (first is None) == (second is None)
    if first is not None:
        assert first <= second
