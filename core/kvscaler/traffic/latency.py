"""Differences, sums, quantiles and shares of the latency histograms that replicas report."""

from collections.abc import Iterable
from itertools import accumulate

from kvscaler.protocol.state import LATENCY_BUCKETS_SECONDS, Histogram

_LOWER = (0.0, *LATENCY_BUCKETS_SECONDS)


def subtract(later: Histogram, earlier: Histogram) -> Histogram:
    """What was observed between two readings of one histogram (never below 0)."""
    pairs = zip(later.counts, earlier.counts, strict=True)
    return Histogram(
        counts=tuple(max(0, a - b) for a, b in pairs),
        sum_seconds=max(0.0, later.sum_seconds - earlier.sum_seconds),
    )


def mean_seconds(histogram: Histogram) -> float | None:
    """Mean of what was observed; `None` without observations."""
    count = sum(histogram.counts)
    return histogram.sum_seconds / count if count else None


def total(histograms: Iterable[Histogram]) -> Histogram:
    """The sum of histograms over replicas or periods."""
    everything = list(histograms)
    if not everything:
        return Histogram()
    columns = zip(*(h.counts for h in everything), strict=True)
    return Histogram(
        counts=tuple(sum(column) for column in columns),
        sum_seconds=sum(h.sum_seconds for h in everything),
    )


def quantile_seconds(histogram: Histogram, q: float) -> float | None:
    """Quantile `q` in seconds, linear within its bucket; `None` without observations.

    An answer in the unbounded bucket is its lower bound, 120 s: at least that.
    """
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"quantile must be within 0 and 1, not {q}")
    count = sum(histogram.counts)
    if count == 0:
        return None
    rank = q * count
    for index, (n, reached) in enumerate(
        zip(histogram.counts, accumulate(histogram.counts), strict=True)
    ):
        if n and reached >= rank:
            if index == len(LATENCY_BUCKETS_SECONDS):
                break
            low, high = _LOWER[index], LATENCY_BUCKETS_SECONDS[index]
            return low + (high - low) * max(0.0, rank - (reached - n)) / n
    return LATENCY_BUCKETS_SECONDS[-1]


def share_within(histogram: Histogram, seconds: float) -> float | None:
    """Share of observations of at most `seconds`, linear within a bucket; `None` without any."""
    count = sum(histogram.counts)
    if count == 0:
        return None
    within = 0.0
    for n, low, high in zip(histogram.counts[:-1], _LOWER, LATENCY_BUCKETS_SECONDS, strict=False):
        if seconds >= high:
            within += n
        elif seconds > low:
            within += n * (seconds - low) / (high - low)
    return within / count
