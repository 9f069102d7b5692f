"""Reading a metrics page: sums of series, and histograms between two looks."""

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client import Histogram as Exported

from hack.fleet.page import Page


class Exporter:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.count = Counter("asked", "", ("verb", "code"), registry=self.registry)
        self.time = Exported(
            "took_seconds", "", ("path",), buckets=(0.1, 1.0), registry=self.registry
        )

    def page(self) -> Page:
        return Page(generate_latest(self.registry).decode())


def test_series_are_chosen_by_labels_and_added_up() -> None:
    exporter = Exporter()
    exporter.count.labels("GET", "200").inc(3)
    exporter.count.labels("PUT", "200").inc(2)
    exporter.count.labels("PUT", "500").inc()
    page = exporter.page()
    assert page.total("asked_total") == 6
    assert page.total("asked_total", verb="PUT") == 3
    assert page.total("asked_total", verb="PUT", code="500") == 1
    assert page.total("asked") == 0


def test_a_histogram_between_two_looks_holds_what_was_observed_meanwhile() -> None:
    exporter = Exporter()
    exporter.time.labels("a").observe(5.0)
    before = exporter.page().histogram("took_seconds")
    exporter.time.labels("a").observe(0.05)
    exporter.time.labels("b").observe(0.5)
    both = exporter.page().histogram("took_seconds").since(before)
    assert both.count == 2
    assert both.mean == pytest.approx(0.275)
    assert both.highest == 1.0
    assert exporter.page().histogram("took_seconds", path="b").highest == 1.0
    assert before.highest == float("inf")


def test_nothing_observed_has_no_mean_and_no_highest() -> None:
    found = Exporter().page().histogram("took_seconds")
    assert found.count == 0
    assert found.mean is None
    assert found.highest is None
