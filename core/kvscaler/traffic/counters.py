"""Whole sets of cumulative counters as rows of numbers: what happened between two readings, and sums.

A window needs hundreds of readings of every replica. As messages they would take ten kilobytes
each; a row takes one, is nothing that the garbage collector has to look into, and is subtracted
and added without a name for each of its hundred numbers.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from kvscaler.protocol.refusals import CAPACITY_REASONS, RefusalReason
from kvscaler.protocol.state import LATENCY_BUCKETS_SECONDS, Histogram, TrafficCounters

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
_WHOLE = frozenset(
    name for name in _NUMBERS if TrafficCounters.model_fields[name].annotation is int
)
_numbers_of = attrgetter(*_NUMBERS)
_histograms_of = attrgetter(*_HISTOGRAMS)
_COUNTS = len(LATENCY_BUCKETS_SECONDS) + 1
_NO_REFUSALS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Row:
    """One reading. `values` are `_NUMBERS`, then sum and counts of each of `_HISTOGRAMS`."""

    values: "array[float]"
    refused: Mapping[str, int]

    @classmethod
    def of(cls, counters: TrafficCounters) -> "Row":
        """The row of a message; raises `ValueError` for a histogram that is not ours."""
        values = array("d", _numbers_of(counters))
        for name, histogram in zip(_HISTOGRAMS, _histograms_of(counters), strict=True):
            if len(histogram.counts) != _COUNTS:
                raise ValueError(f"{name} has {len(histogram.counts)} counts instead of {_COUNTS}")
            values.append(histogram.sum_seconds)
            values.extend(histogram.counts)
        return cls(values, counters.refused or _NO_REFUSALS)

    def counters(self) -> TrafficCounters:
        """The message again."""
        numbers: dict[str, Any] = {
            name: int(value) if name in _WHOLE else value
            for name, value in zip(_NUMBERS, self.values, strict=False)
        }
        histograms: dict[str, Any] = dict(zip(_HISTOGRAMS, self._histograms(), strict=True))
        return TrafficCounters.model_construct(
            None, **numbers, refused=dict(self.refused), **histograms
        )

    def _histograms(self) -> Iterator[Histogram]:
        for start in range(len(_NUMBERS), len(self.values), _COUNTS + 1):
            counts = self.values[start + 1 : start + 1 + _COUNTS]
            yield Histogram.model_construct(
                None, counts=tuple(map(int, counts)), sum_seconds=self.values[start]
            )


def increase(later: Row, earlier: Row | None) -> Row:
    """What one process counted between two readings; `earlier=None` means since its start."""
    if earlier is None:
        return later
    pairs = zip(later.values, earlier.values, strict=True)
    values = array("d", [a - b if a > b else 0.0 for a, b in pairs])
    refused = {
        reason: count - earlier.refused.get(reason, 0)
        for reason, count in later.refused.items()
        if count > earlier.refused.get(reason, 0)
    }
    return Row(values, refused)


def summed(rows: Iterable[Row]) -> TrafficCounters:
    """The sum over replicas and processes."""
    everything = list(rows)
    if not everything:
        return TrafficCounters()
    refused: dict[str, int] = {}
    for row in everything:
        for reason, count in row.refused.items():
            refused[reason] = refused.get(reason, 0) + count
    columns = zip(*(row.values for row in everything), strict=True)
    return Row(array("d", map(sum, columns)), refused).counters()


def demand_arrivals(counters: TrafficCounters) -> float:
    """Arrivals that a larger fleet would serve; those refused for want of capacity included.

    Some refusals are made at the door, before an arrival is counted, so what was admitted or lacked
    capacity is the least that it can be.
    """
    refused = counters.refused
    outside = sum(refused.get(reason, 0) for reason in NOT_DEMAND) if refused else 0
    at_least = counters.admitted + capacity_refusals(counters)
    return float(max(at_least, counters.arrivals - outside))


def capacity_refusals(counters: TrafficCounters) -> float:
    """Refusals that more capacity would have avoided."""
    if not counters.refused:
        return 0.0
    return float(sum(counters.refused.get(reason, 0) for reason in CAPACITY_REASONS))


def ran_back(later: Row, earlier: Row) -> bool:
    """Whether a reading can't follow another of the same process: a counter became smaller."""
    return any(a < b for a, b in zip(later.values[:_LAST], earlier.values[:_LAST], strict=True))


_LAST = len(_NUMBERS)
