import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvscaler.protocol.refusals import RefusalReason
from kvscaler.protocol.state import (
    ExecutorReport,
    InFlight,
    ModelReport,
    ReplicaState,
    TrafficCounters,
)
from kvscaler.traffic import AbsenceReason, Absent, Present, SampleHistory, TrafficSample
from kvscaler.traffic.window import RECENT_SECONDS


def sample(pod: str, time: float, arrivals: int, started: float = 0.0, **more) -> TrafficSample:
    counters = TrafficCounters(arrivals=arrivals, **more)
    return TrafficSample(pod, started, time - started, time, counters, InFlight(), "direct")


def steady(history: SampleHistory, pod: str, start: float, end: float, rate: float, **more) -> None:
    t = start
    while t <= end:
        history.observe(sample(pod, t, int(rate * (t - start)), **more))
        t += 1.0


def window(history: SampleHistory, now: float, *pods: str):
    signal = history.window(now, pods)
    assert isinstance(signal, Present), signal
    return signal.value


def test_rates_come_from_differences_of_counters():
    history = SampleHistory()
    steady(history, "a", 0.0, 100.0, 2.0)
    found = window(history, 100.0, "a")
    assert found.arrivals_short.count == pytest.approx(24)
    assert found.arrivals_level.per_second == pytest.approx(2.0)
    assert [r.seconds for r in found.arrivals_recent] == list(RECENT_SECONDS)
    assert all(r.per_second == pytest.approx(2.0) for r in found.arrivals_recent)
    assert [round(b.count) for b in found.arrival_buckets] == [30] * 6
    assert found.coverage == 1.0


def test_what_was_counted_before_we_watched_is_a_baseline():
    history = SampleHistory()
    history.observe(sample("a", 1000.0, 50_000))
    history.observe(sample("a", 1010.0, 50_010))
    found = window(history, 1010.0, "a")
    assert found.arrivals_level.count == pytest.approx(10)
    assert found.arrivals_level.seconds == pytest.approx(10)


def test_a_pod_that_starts_while_we_watch_brings_all_its_arrivals():
    history = SampleHistory()
    steady(history, "a", 0.0, 60.0, 1.0)
    history.observe(sample("b", 60.0, 20, started=50.0))
    assert window(history, 60.0, "a", "b").arrivals_short.count == pytest.approx(12 + 20)


def test_a_restart_resets_counters_and_loses_no_rate():
    history = SampleHistory()
    steady(history, "a", 0.0, 50.0, 2.0)
    history.observe(sample("a", 52.0, 2, started=51.0))
    history.observe(sample("a", 60.0, 18, started=51.0))
    found = window(history, 60.0, "a")
    assert found.arrivals_short.count == pytest.approx(2 * 2 + 18, abs=0.1)
    assert found.arrivals_level.per_second == pytest.approx(2.0, rel=0.06)


def test_pitfall_13_a_vanished_pod_leaves_with_its_time():
    history = SampleHistory()
    steady(history, "gone", 0.0, 50.0, 10.0)
    steady(history, "a", 0.0, 100.0, 1.0)
    found = window(history, 100.0, "a")
    assert found.arrivals_level.count == pytest.approx(45)
    assert found.coverage == 1.0
    assert sum(b.count for b in found.arrival_buckets) > 400
    steady(history, "a", 101.0, 900.0, 1.0, started=100.5)
    assert history.last_seen("gone") == 50.0
    window(history, 900.0, "a")
    assert history.last_seen("gone") is None


def test_two_paths_feed_one_history_and_the_slower_is_not_taken():
    history = SampleHistory()
    history.observe(sample("a", 10.0, 100))
    late = history.observe(sample("a", 8.0, 90))
    assert isinstance(late, Absent)
    assert late.reason is AbsenceReason.STALE


def test_pitfall_7_counters_that_run_back_within_a_process_are_mismatched():
    history = SampleHistory()
    history.observe(sample("a", 10.0, 100))
    other = history.observe(sample("a", 12.0, 3))
    assert isinstance(other, Absent)
    assert other.reason is AbsenceReason.MISMATCHED
    assert "ran back" in other.detail


def test_pitfall_6_stale_readings_are_absent_and_partial_ones_are_said_to_be():
    history = SampleHistory()
    steady(history, "a", 0.0, 100.0, 1.0)
    steady(history, "b", 0.0, 60.0, 1.0)
    assert window(history, 100.0, "a", "b").coverage == 0.5
    stale = history.window(200.0, ["a", "b"])
    assert isinstance(stale, Absent)
    assert stale.reason is AbsenceReason.STALE
    never = history.window(100.0, ["c"])
    assert isinstance(never, Absent)
    assert never.reason is AbsenceReason.MISSING


def test_arrivals_that_no_replica_could_serve_are_no_demand_and_refused_ones_are():
    history = SampleHistory()
    history.observe(sample("a", 0.0, 0))
    refused = {RefusalReason.NEVER_FITS.value: 10, RefusalReason.QUEUE_FULL.value: 5}
    history.observe(sample("a", 20.0, 40, refused=refused))
    found = window(history, 20.0, "a")
    assert found.arrivals_level.count == pytest.approx(30)
    assert found.refused_level.count == pytest.approx(5)
    assert found.refused == refused


def test_refusals_at_the_door_that_never_arrived_hide_no_demand():
    history = SampleHistory()
    history.observe(sample("a", 0.0, 0))
    refused = {RefusalReason.DRAINING.value: 35, RefusalReason.QUEUE_FULL.value: 5}
    history.observe(sample("a", 20.0, 40, admitted=30, refused=refused))
    assert window(history, 20.0, "a").arrivals_level.count == pytest.approx(35)


def test_attainment_counts_refused_as_misses_and_is_unknown_without_requests():
    history = SampleHistory()
    history.observe(sample("a", 0.0, 0))
    assert window(history, 0.0, "a").attainment(2.0, 0.05) is None
    fast = (0,) * 11 + (8,) + (0,) * 13
    history.observe(
        sample(
            "a",
            20.0,
            10,
            refused={RefusalReason.QUEUE_FULL.value: 2},
            time_to_first_token={"counts": fast, "sum_seconds": 4.0},
        )
    )
    assert window(history, 20.0, "a").attainment(2.0, 0.05) == pytest.approx(0.8)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.floats(0.5, 30), st.integers(0, 20), st.booleans()), min_size=3, max_size=60
    )
)
def test_buckets_never_hold_more_than_was_counted(steps):
    history, time, started, arrivals, counted = SampleHistory(), 0.0, 0.0, 0, 0
    history.observe(sample("a", time, 0))
    for gap, more, restart in steps:
        if restart:
            started, arrivals = time + gap / 2, 0
        time += gap
        arrivals += more
        counted += more
        history.observe(sample("a", time, arrivals, started=started))
    found = window(history, time, "a")
    assert sum(b.count for b in found.arrival_buckets) <= counted + 1e-6
    assert found.arrivals_short.count <= found.arrivals_level.count + 1e-6 <= counted + 1e-6


def test_readings_that_nobody_asks_for_do_not_pile_up():
    """A paused service is observed for days, and no window of it is ever made."""
    history = SampleHistory()
    steady(history, "gone", 0.0, 10.0, 2.0)
    steady(history, "a", 0.0, 5000.0, 2.0)
    assert sum(len(kept) for kept in history._readings.values()) <= 1025
    assert "gone" not in history._readings
    assert window(history, 5000.0, "a").arrivals_level.per_second == pytest.approx(2.0)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0.2, 40), st.integers(0, 20), st.booleans()), min_size=3, max_size=80
    )
)
def test_thinning_loses_no_count_of_the_window(steps):
    """Whole counters are kept once a bucket; what happened within the window is still all there."""
    history, time, started, arrivals, counted = SampleHistory(), 0.0, 0.0, 0, 0
    history.observe(sample("a", time, 0, admitted=0))
    for gap, more, restart in steps:
        if time + gap > 580.0:
            break
        if restart:
            started, arrivals = time + gap / 2, 0
        time += gap
        arrivals += more
        counted += more
        history.observe(sample("a", time, arrivals, started=started, admitted=arrivals))
        if more % 3 == 0:
            window(history, time, "a")
    found = window(history, time, "a")
    assert found.admitted == counted


def test_most_readings_keep_two_numbers_and_not_a_hundred():
    history = SampleHistory()
    steady(history, "a", 0.0, 2000.0, 2.0)
    window(history, 2000.0, "a")
    (readings,) = history._readings.values()
    assert len(readings) <= 110
    assert sum(reading.row is not None for reading in readings) <= 46


def test_a_histogram_with_other_buckets_is_mismatched_and_leaves_no_trace():
    history = SampleHistory()
    strange = sample("a", 1.0, 5, queue_wait={"counts": (1, 2, 3), "sum_seconds": 1.0})
    taken = history.observe(strange)
    assert isinstance(taken, Absent)
    assert taken.reason is AbsenceReason.MISMATCHED
    assert "queue_wait has 3 counts instead of 25" in taken.detail
    assert history.last_seen("a") is None


def test_a_container_that_starts_again_under_a_corrected_clock_is_news() -> None:
    """The node's clock was a day ahead; the next process says that it started a day earlier."""
    history = SampleHistory()
    day = 86_400.0
    for t in (100.0, 101.0):
        history.observe(
            TrafficSample("a", day, t, t, TrafficCounters(arrivals=50), InFlight(), "d")
        )
    next_one = TrafficSample("a", 102.0, 1.0, 103.0, TrafficCounters(arrivals=3), InFlight(), "d")
    assert isinstance(history.observe(next_one), Present)
    assert window(history, 103.0, "a").arrivals_short.count == pytest.approx(3)


def test_a_late_reading_of_the_process_before_is_stale_and_counts_nothing() -> None:
    history = SampleHistory()
    steady(history, "a", 0.0, 50.0, 2.0)
    history.observe(sample("a", 52.0, 2, started=51.0))
    late = history.observe(sample("a", 52.5, 102))
    assert isinstance(late, Absent)
    assert late.reason is AbsenceReason.STALE
    history.observe(sample("a", 60.0, 18, started=51.0))
    assert window(history, 60.0, "a").arrivals_level.count == pytest.approx(2.0 * 35 + 18, abs=1)


def test_a_clock_set_back_makes_no_news_of_old_counts() -> None:
    """Its age is not known, so what it had counted when it was first seen is a baseline."""
    state = make_state_with_clock(
        started_at=1_000.0, observed_at=1_000.0 - 86_400.0, arrivals=50_000
    )
    history = SampleHistory()
    history.observe(TrafficSample.from_state(state, 5_000.0))
    history.observe(TrafficSample.from_state(with_arrivals(state, 50_010), 5_010.0))
    assert window(history, 5_010.0, "a").arrivals_level.count == pytest.approx(10)


def test_counters_that_stay_behind_are_a_new_baseline_once_nothing_is_fresh() -> None:
    history = SampleHistory()
    steady(history, "a", 0.0, 50.0, 2.0)
    for t in range(51, 71):
        refused = history.observe(sample("a", float(t), 10 + t))
        assert isinstance(refused, Absent)
        assert refused.reason is AbsenceReason.MISMATCHED
    assert isinstance(history.observe(sample("a", 71.0, 81)), Present)
    for t in range(72, 90):
        assert isinstance(history.observe(sample("a", float(t), 10 + t)), Present)
    assert window(history, 89.0, "a").arrivals_short.per_second == pytest.approx(1.0, rel=0.1)


def test_a_reading_from_the_future_is_no_fresh_one() -> None:
    history = SampleHistory()
    steady(history, "a", 1_000.0, 1_050.0, 2.0)
    found = history.window(500.0, ["a"])
    assert isinstance(found, Absent)
    assert found.reason is AbsenceReason.STALE
    assert "ahead of our clock" in found.detail


def make_state_with_clock(started_at: float, observed_at: float, arrivals: int) -> ReplicaState:
    return ReplicaState(
        service_uid="s",
        service_name="s",
        pod_uid="a",
        pod_name="a",
        started_at=started_at,
        observed_at=observed_at,
        ready=True,
        executor=ExecutorReport(type="t", device="cpu", compute_dtype="f", kv_dtype="f"),
        model=ModelReport(uri="u", served_names=("s",), digest="d"),
        traffic=TrafficCounters(arrivals=arrivals),
    )


def with_arrivals(state: ReplicaState, arrivals: int) -> ReplicaState:
    return state.model_copy(update={"traffic": TrafficCounters(arrivals=arrivals)})
