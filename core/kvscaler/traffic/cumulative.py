"""Counts of several replicas over time, added up: how many events fell between any two times.

Each replica's events are spread evenly over the span between two of its readings, so its count is
a line with corners, and any window over it costs two look-ups instead of a pass over all spans.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[float, float, float]
"""From, to (Unix seconds) and the events counted in between."""


class Cumulative:
    """Made from the spans of each replica, in the order of time and without overlaps."""

    def __init__(self, replicas: Iterable[Sequence[Span]]) -> None:
        self._lines: list[tuple[list[float], list[float]]] = []
        for spans in replicas:
            times: list[float] = []
            counts: list[float] = []
            total = 0.0
            for start, end, events in spans:
                if not times or start > times[-1]:
                    times.append(start)
                    counts.append(total)
                total += events
                times.append(end)
                counts.append(total)
            if times:
                self._lines.append((times, counts))

    def between(self, start: float, end: float) -> float:
        """Events after `start` and up to `end`; what a span of no length counts, it counts at its
        end."""
        if end <= start:
            return 0.0
        return sum(_at(t, c, end) - _at(t, c, start) for t, c in self._lines)


def _at(times: list[float], counts: list[float], time: float) -> float:
    """Events up to and with `time`."""
    index = bisect_right(times, time)
    if index == 0:
        return 0.0
    if index == len(times):
        return counts[-1]
    before, after = times[index - 1], times[index]
    low = counts[index - 1]
    return low + (counts[index] - low) * (time - before) / (after - before)
