"""Signals with their age, and windows of traffic statistics."""

from kvscaler.traffic.history import MAX_AGE_SECONDS, SampleHistory
from kvscaler.traffic.samples import TrafficSample
from kvscaler.traffic.signal import (
    AbsenceReason,
    Absent,
    Present,
    Signal,
    both,
    expire,
    freshest,
    map_signal,
    number,
)
from kvscaler.traffic.window import LengthBasis, LengthStatistics, Rate, TrafficWindow

__all__ = [
    "MAX_AGE_SECONDS",
    "AbsenceReason",
    "Absent",
    "LengthBasis",
    "LengthStatistics",
    "Present",
    "Rate",
    "SampleHistory",
    "Signal",
    "TrafficSample",
    "TrafficWindow",
    "both",
    "expire",
    "freshest",
    "map_signal",
    "number",
]
