"""Errors of one figure by source, and the figures made of them: a source has one vote, its rows' median."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness import Figure
from kv_truth_rows import Case

FEW = 20
"""Below this many sources a percentile says little, so `n` and the maximum stand beside it."""


@dataclass
class Errors:
    """Errors of one figure by source, ours and the baseline's; `rows` for the list of the worst."""

    ours: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    naive: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rows: list[tuple[float, str, str]] = field(default_factory=list)

    def add(self, case: Case, ours: float, naive: float | None, note: str) -> None:
        """One row's relative errors (signed)."""
        self.ours[case.row["source"]].append(abs(ours))
        if naive is not None:
            self.naive[case.row["source"]].append(abs(naive))
        self.rows.append((ours, case.row["id"], note))


def votes(by_source: Mapping[str, Sequence[float]]) -> list[float]:
    """The median of each source, in order."""
    return sorted(statistics.median(found) for found in by_source.values())


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that `share` of the sources do not exceed."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures_of(
    name: str, errors: Errors, bounds: Mapping[str, tuple[str | None, str | None]]
) -> list[Figure]:
    """Median, p90, p95, maximum and number of sources, with the baseline's beside each."""
    ours, naive = votes(errors.ours), votes(errors.naive)
    found = []
    for part, share in (("median", 0.5), ("p90", 0.9), ("p95", 0.95), ("max", 1.0)):
        value = statistics.median(ours) if part == "median" and ours else quantile(ours, share)
        other = statistics.median(naive) if part == "median" and naive else quantile(naive, share)
        floor, aim = bounds.get(part, (None, None))
        peer = None if other is None else {"usual_formula": round(other, 5)}
        rounded = None if value is None else round(value, 5)
        why = "" if len(ours) >= FEW or not ours else f"{len(ours)} sources only"
        found.append(Figure(f"{name}_{part}", rounded, "1", floor, aim, peer, why))
    found.append(Figure(f"{name}_sources", len(ours), "sources"))
    return found
