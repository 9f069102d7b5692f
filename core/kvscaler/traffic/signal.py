"""A measured value with its source and time, or an absence with its reason: never 0 for "unknown".

Most accidents of autoscalers start with a missing metric that was read as no load. Here the two
have different types: a reader must say what it does with an `Absent` before it gets at a number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class AbsenceReason(StrEnum):
    """Why there is no value. The order is that of severity, the mildest first."""

    PARTIAL = "Partial"
    """Some parts of a sum answered, others did not: the sum would be too small."""
    STALE = "Stale"
    """The last value is older than its use allows."""
    MISSING = "Missing"
    """Nobody answered, or the answer had no such series."""
    NOT_A_NUMBER = "NotANumber"
    """The answer was NaN, infinite or no number at all."""
    MISMATCHED = "Mismatched"
    """The answer is about something else: other labels, another Pod, counters that ran back."""


@dataclass(frozen=True, slots=True)
class Present(Generic[T]):
    """A value, where it came from and when it was true (Unix seconds, the reader's clock)."""

    value: T
    source: str
    time: float

    def age_seconds(self, now: float) -> float:
        """Seconds since the value was true; 0 for one that a skewed clock puts in the future."""
        return max(0.0, now - self.time)


@dataclass(frozen=True, slots=True)
class Absent:
    """No value, the reason, and since when (Unix seconds; `None` when there never was one)."""

    reason: AbsenceReason
    source: str
    detail: str = ""
    last_seen: float | None = None

    def __str__(self) -> str:
        return f"{self.reason} ({self.source}{': ' + self.detail if self.detail else ''})"


Signal: TypeAlias = Present[T] | Absent


def number(value: float | str | None, source: str, time: float) -> Signal[float]:
    """`value` as a signal: `None` is missing; NaN, infinity and words are not a number."""
    if value is None:
        return Absent(AbsenceReason.MISSING, source)
    try:
        parsed = float(value)
    except ValueError:
        return Absent(AbsenceReason.NOT_A_NUMBER, source, repr(value)[:40], time)
    if not math.isfinite(parsed):
        return Absent(AbsenceReason.NOT_A_NUMBER, source, str(parsed), time)
    return Present(parsed, source, time)


def map_signal(signal: "Signal[T]", function: Callable[[T], U]) -> "Signal[U]":
    """`function` of the value; an absence stays what it is."""
    if isinstance(signal, Absent):
        return signal
    return Present(function(signal.value), signal.source, signal.time)


def both(first: "Signal[T]", second: "Signal[U]") -> "Signal[tuple[T, U]]":
    """Both values, as old as the older one; absent for the graver reason when either is absent."""
    if isinstance(first, Absent) and isinstance(second, Absent):
        order = list(AbsenceReason)
        return max(first, second, key=lambda absent: order.index(absent.reason))
    if isinstance(first, Absent):
        return first
    if isinstance(second, Absent):
        return second
    source = first.source if first.source == second.source else f"{first.source}+{second.source}"
    return Present((first.value, second.value), source, min(first.time, second.time))


def freshest(*signals: "Signal[T]") -> "Signal[T]":
    """The newest present value, on a tie the first; otherwise the absence seen last.

    This joins the direct path and Prometheus: either may be down while the other carries on.
    """
    if not signals:
        raise ValueError("freshest() needs at least one signal")
    present = [signal for signal in signals if isinstance(signal, Present)]
    if present:
        return max(present, key=lambda signal: signal.time)
    absent = [signal for signal in signals if isinstance(signal, Absent)]
    return max(absent, key=lambda a: -math.inf if a.last_seen is None else a.last_seen)


def expire(signal: "Signal[T]", now: float, max_age_seconds: float) -> "Signal[T]":
    """The signal, or its absence as stale when its time is further than `max_age_seconds` away.

    On either side: a value from the future would never grow old.
    """
    if isinstance(signal, Absent) or abs(now - signal.time) <= max_age_seconds:
        return signal
    return Absent(AbsenceReason.STALE, signal.source, last_seen(signal.time, now), signal.time)


def last_seen(time: float, now: float) -> str:
    """When something was seen last, for messages.

    As a time and not as an age: a message that grows by itself makes every look at a standing fault
    news, and is written again and again.
    """
    if time > now:
        return f"stamped {utc(time)}, ahead of our clock"
    return f"last seen {utc(time)}"


def utc(time: float) -> str:
    """Unix seconds as RFC 3339, to the second; as a number when they are no time of a calendar."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):
        return f"{time:g} (Unix seconds)"
