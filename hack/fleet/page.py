"""Reading the operator's own metrics page: counters by prefix, and histograms between two looks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SERIES = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Histogram:
    """Cumulative counts by upper bound, and the sum; differences are windows."""

    buckets: dict[float, float]
    total: float

    @property
    def count(self) -> float:
        """Observations."""
        return self.buckets.get(float("inf"), 0.0)

    @property
    def mean(self) -> float | None:
        """Mean of the observations; None without any."""
        return self.total / self.count if self.count else None

    @property
    def highest(self) -> float | None:
        """Upper bound of the bucket that the largest observation is in; None without any."""
        if not self.count:
            return None
        return min(bound for bound, count in self.buckets.items() if count == self.count)

    def since(self, before: "Histogram") -> "Histogram":
        """What was observed after `before`."""
        buckets = {b: n - before.buckets.get(b, 0.0) for b, n in self.buckets.items()}
        return Histogram(buckets, self.total - before.total)


class Page:
    """One look at a metrics page."""

    def __init__(self, text: str) -> None:
        self._text = text

    def series(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and values of the series of a name that have these labels."""
        for line in re.findall(rf"^{re.escape(name)}(?:\{{.*)? .*$", self._text, re.MULTILINE):
            found = _SERIES.match(line)
            if found is not None and found[1] == name:
                have = dict(_LABEL.findall(found[2] or ""))
                if labels.items() <= have.items():
                    yield have, float(found[3])

    def total(self, name: str, **labels: str) -> float:
        """Sum over the series of a name."""
        return sum(value for _, value in self.series(name, **labels))

    def histogram(self, name: str, **labels: str) -> Histogram:
        """All series of a histogram, added up."""
        buckets: dict[float, float] = {}
        for have, value in self.series(f"{name}_bucket", **labels):
            bound = float(have["le"])
            buckets[bound] = buckets.get(bound, 0.0) + value
        return Histogram(buckets, self.total(f"{name}_sum", **labels))
