"""Counts over time: any window gets what its share of each span is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.traffic.cumulative import Cumulative, Span


def overlap(span: Span, start: float, end: float) -> float:
    a, b, events = span
    if b <= a:
        return events if start < b <= end else 0.0
    return events * max(0.0, min(b, end) - max(a, start)) / (b - a)


spans = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 20), st.integers(0, 50)), max_size=12
).map(
    lambda steps: [
        (float(start), float(start + length), float(events))
        for start, length, events in _placed(steps)
    ]
)


def _placed(steps):
    at = 0
    for gap, length, events in steps:
        yield at + gap, length, events
        at += gap + length


@given(st.lists(spans, max_size=4), st.floats(-5, 200), st.floats(0, 100))
def test_a_window_holds_each_spans_share(replicas, start, length):
    expected = sum(overlap(s, start, start + length) for one in replicas for s in one)
    assert Cumulative(replicas).between(start, start + length) == pytest.approx(expected, abs=1e-6)


@given(st.lists(spans, max_size=4), st.floats(0, 200), st.floats(0, 60), st.floats(0, 60))
def test_neighbouring_windows_add_up(replicas, start, first, second):
    counted = Cumulative(replicas)
    middle, end = start + first, start + first + second
    whole = counted.between(start, end)
    assert counted.between(start, middle) + counted.between(middle, end) == pytest.approx(whole)


def test_no_replica_counts_nothing():
    assert Cumulative([]).between(0.0, 100.0) == 0.0
