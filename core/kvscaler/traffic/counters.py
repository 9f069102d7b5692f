"""Arithmetic on whole sets of cumulative counters: what happened between two readings, and sums."""

from collections.abc import Iterable
from typing import Any

from kvscaler.protocol.refusals import CAPACITY_REASONS, RefusalReason
from kvscaler.protocol.state import TrafficCounters
from kvscaler.traffic.latency import subtract, total

NOT_DEMAND: frozenset[RefusalReason] = frozenset(
    {
        RefusalReason.CONTEXT_TOO_LONG,
        RefusalReason.NEVER_FITS,
        RefusalReason.DRAINING,
        RefusalReason.NOT_READY,
    }
)
"""Refusals of arrivals that no further replica would have served: too long for any, or sent to one
that was going or coming, from where the client turns to another."""

_HISTOGRAMS = ("time_to_first_token", "time_per_output_token", "queue_wait")
_NUMBERS = tuple(
    name for name in TrafficCounters.model_fields if name not in (*_HISTOGRAMS, "refused")
)


def increase(later: TrafficCounters, earlier: TrafficCounters | None) -> TrafficCounters:
    """What one process counted between two readings; `earlier=None` means since its start."""
    if earlier is None:
        return later
    numbers: dict[str, Any] = {
        name: max(0, getattr(later, name) - getattr(earlier, name)) for name in _NUMBERS
    }
    refused = {
        reason: count - earlier.refused.get(reason, 0)
        for reason, count in later.refused.items()
        if count > earlier.refused.get(reason, 0)
    }
    histograms: dict[str, Any] = {
        name: subtract(getattr(later, name), getattr(earlier, name)) for name in _HISTOGRAMS
    }
    return TrafficCounters.model_construct(None, **numbers, refused=refused, **histograms)


def summed(counters: Iterable[TrafficCounters]) -> TrafficCounters:
    """The sum over replicas and processes."""
    everything = list(counters)
    numbers: dict[str, Any] = {name: sum(getattr(c, name) for c in everything) for name in _NUMBERS}
    refused: dict[str, int] = {}
    for c in everything:
        for reason, count in c.refused.items():
            refused[reason] = refused.get(reason, 0) + count
    histograms: dict[str, Any] = {
        name: total(getattr(c, name) for c in everything) for name in _HISTOGRAMS
    }
    return TrafficCounters.model_construct(None, **numbers, refused=refused, **histograms)


def demand_arrivals(counters: TrafficCounters) -> float:
    """Arrivals that a larger fleet would serve; those refused for want of capacity included.

    Some refusals are made at the door, before an arrival is counted, so what was admitted or lacked
    capacity is the least that it can be.
    """
    outside = sum(counters.refused.get(reason, 0) for reason in NOT_DEMAND)
    at_least = counters.admitted + capacity_refusals(counters)
    return float(max(at_least, counters.arrivals - outside))


def capacity_refusals(counters: TrafficCounters) -> float:
    """Refusals that more capacity would have avoided."""
    return float(sum(counters.refused.get(reason, 0) for reason in CAPACITY_REASONS))


def ran_back(later: TrafficCounters, earlier: TrafficCounters) -> bool:
    """Whether a reading can't follow another of the same process: a counter became smaller."""
    return any(getattr(later, name) < getattr(earlier, name) for name in _NUMBERS)
