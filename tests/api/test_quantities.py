"""Quantities, durations and percentages keep their value through the wire and back."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler_api.quantities import (
    DecimalText,
    Time,
    format_duration,
    format_percent,
    format_quantity,
    parse_duration,
    parse_percent,
    parse_quantity,
)
from pydantic import TypeAdapter


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("80Gi", 80 * 2**30),
        ("1.5Gi", 3 * 2**29),
        ("80G", 80 * 10**9),
        ("100k", 100_000),
        ("1e9", 10**9),
        ("1E", 10**18),
        ("0", 0),
        ("1.1", 2),
        ("0.0001Ki", 1),
    ],
)
def test_quantities_are_read_as_the_api_server_does(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "-1Gi", "80GB", "80 Gi", "1m", "9999999999Ei", "٣Gi"])
def test_what_is_no_quantity_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        parse_quantity(text)


@given(st.integers(0, 2**63 - 1))
def test_quantities_survive_the_wire(value: int) -> None:
    assert parse_quantity(format_quantity(value)) == value


@pytest.mark.parametrize(
    ("text", "seconds", "canonical"),
    [
        ("45s", 45.0, "45s"),
        ("5m", 300.0, "5m"),
        ("300s", 300.0, "5m"),
        ("1h30m", 5400.0, "1h30m"),
        ("50ms", 0.05, "50ms"),
        ("1.5s", 1.5, "1s500ms"),
        ("0s", 0.0, "0s"),
    ],
)
def test_durations_have_one_canonical_form(text: str, seconds: float, canonical: str) -> None:
    assert parse_duration(text) == seconds
    assert format_duration(seconds) == canonical


@pytest.mark.parametrize("text", ["", "5", "-5m", "5 m", "1d", "m", "5min", "1e3s"])
def test_what_is_no_duration_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration; write numbers with units"):
        parse_duration(text)


@given(st.integers(0, 10**9))
def test_durations_survive_the_wire(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == milliseconds / 1000


@given(st.integers(0, 100_000))
def test_percentages_survive_the_wire(thousandths: int) -> None:
    fraction = float(Decimal(thousandths) / 100_000)
    assert parse_percent(format_percent(fraction)) == fraction


def test_percentages_keep_their_nines() -> None:
    assert parse_percent("99.9%") == 0.999
    assert format_percent(0.9999) == "99.99%"
    for text in ("99", "100.1%", "-1%", "%", "1.2345%"):
        with pytest.raises(ValueError, match="is no percentage"):
            parse_percent(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (2.4, "2.4"), (1 / 3, "0.3333"), (12345.6, "12350"), (-1.25, "-1.25")],
)
def test_status_keeps_four_significant_digits(value: float, text: str) -> None:
    adapter = TypeAdapter(Annotated[float, DecimalText()])
    assert adapter.dump_python(value, mode="json") == text
    assert adapter.validate_python(text) == float(text)


def test_times_are_written_in_utc_to_the_second() -> None:
    adapter: TypeAdapter[datetime] = TypeAdapter(Time)
    berlin = timezone(timedelta(hours=2))
    written = adapter.dump_python(datetime(2026, 1, 1, 2, 0, 0, 5, berlin), mode="json")
    assert written == "2026-01-01T00:00:00Z"
    assert adapter.validate_python(written) == datetime(2026, 1, 1, tzinfo=UTC)
    with pytest.raises(ValueError, match="a time needs a zone"):
        adapter.validate_python(datetime(2026, 1, 1))
