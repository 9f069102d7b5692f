"""What a gate wants to know of an engine, whatever the engine calls it.

Every part may be unknown, and what is unknown is `None`: the gate's state then leaves it out. Only
`capacity` is needed to admit anything at all.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from kvscaler.engine.gated import EngineCapacity
from kvscaler.protocol.state import (
    BudgetLineReport,
    CapacityReport,
    ExecutorReport,
    ModelReport,
    OccupancyReport,
    StepCosts,
)


class PageNotUnderstood(Exception):
    """An engine's page is not what its adapter knows; says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One look at an engine, from one page."""

    ready: bool
    capacity: EngineCapacity | None = None
    started_at: float | None = None
    """Unix seconds; a change tells a restart, after which `counters` begin at 0."""
    occupancy: OccupancyReport | None = None
    allocated: CapacityReport | None = None
    executor: ExecutorReport | None = None
    model: ModelReport | None = None
    budget: tuple[BudgetLineReport, ...] = ()
    step_costs: StepCosts | None = None
    counters: dict[str, float] = field(default_factory=dict)
    """Cumulative counts that only the engine knows, by their names in `TrafficCounters`."""


class EngineAdapter(Protocol):
    """How to ask one type of engine."""

    engine_type: ClassVar[str]
    report_path: ClassVar[str]
    """Page under the engine's metrics URL that `read` understands."""

    def read(self, page: bytes) -> EngineReport:
        """The report in a page; raises `PageNotUnderstood`."""
        ...

    def default_output_tokens(self, path: str) -> int | None:
        """Output tokens of a request that names none; `None` is all that the context leaves."""
        ...
