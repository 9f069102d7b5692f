import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.traffic import (
    AbsenceReason,
    Absent,
    Present,
    both,
    expire,
    freshest,
    map_signal,
    number,
)

MISSING = Absent(AbsenceReason.MISSING, "prometheus")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, AbsenceReason.MISSING),
        (float("nan"), AbsenceReason.NOT_A_NUMBER),
        ("NaN", AbsenceReason.NOT_A_NUMBER),
        (math.inf, AbsenceReason.NOT_A_NUMBER),
        ("twelve", AbsenceReason.NOT_A_NUMBER),
    ],
)
def test_what_is_no_number_is_absent_with_its_reason_and_never_0(value, reason):
    signal = number(value, "prometheus", 5.0)
    assert isinstance(signal, Absent)
    assert signal.reason is reason


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_stays_itself_also_as_text(value):
    assert number(repr(value), "p", 1.0) == Present(value, "p", 1.0)


def test_zero_is_a_value():
    assert number(0, "p", 1.0) == Present(0.0, "p", 1.0)


def test_map_keeps_absences_and_their_reason():
    assert map_signal(MISSING, lambda x: x + 1) is MISSING
    assert map_signal(Present(1, "d", 2.0), lambda x: x + 1) == Present(2, "d", 2.0)


def test_both_is_as_old_as_the_older_and_absent_for_the_graver_reason():
    a, b = Present(1, "direct", 10.0), Present("x", "prometheus", 7.0)
    assert both(a, b) == Present((1, "x"), "direct+prometheus", 7.0)
    mismatched = Absent(AbsenceReason.MISMATCHED, "direct")
    assert both(a, MISSING) is MISSING
    assert both(MISSING, mismatched) is mismatched
    assert both(mismatched, MISSING) is mismatched


def test_freshest_prefers_the_newer_path_and_any_value_to_none():
    direct, scraped = Present(1, "direct", 10.0), Present(2, "prometheus", 12.0)
    assert freshest(direct, scraped) is scraped
    assert freshest(MISSING, direct) is direct
    seen = Absent(AbsenceReason.STALE, "direct", last_seen=3.0)
    assert freshest(MISSING, seen) is seen


def test_a_value_expires_and_remembers_when_it_was_seen():
    signal = Present(4, "direct", 100.0)
    assert expire(signal, 110.0, 10.0) is signal
    assert expire(signal, 111.0, 10.0) == Absent(
        AbsenceReason.STALE, "direct", "last seen 1970-01-01T00:01:40Z", 100.0
    )
    assert expire(MISSING, 111.0, 10.0) is MISSING


def test_a_value_from_the_future_is_no_fresh_one():
    ahead = expire(Present(4, "prometheus", 200.0), 111.0, 10.0)
    words = "stamped 1970-01-01T00:03:20Z, ahead of our clock"
    assert ahead == Absent(AbsenceReason.STALE, "prometheus", words, 200.0)
    little = Present(4, "prometheus", 112.0)
    assert expire(little, 111.0, 10.0) is little


@pytest.mark.parametrize("time", [-1e30, -1.0, 0.0, 1e12, 1e30])
def test_a_time_of_no_calendar_is_said_all_the_same(time):
    stale = expire(Present(4, "prometheus", time), 1e6, 10.0)
    assert isinstance(stale, Absent)
    assert stale.detail.startswith(("last seen", "stamped"))
