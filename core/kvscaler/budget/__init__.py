"""From model, accelerator and engine to KV bytes, blocks and footprints."""

from typing import TYPE_CHECKING, Any

from kvscaler.budget.calibration import Calibration, Observation, calibrate
from kvscaler.budget.changes import Change, cheapest_changes, dtype_changes, quantized
from kvscaler.budget.compute import BudgetUnknown, compute_budget
from kvscaler.budget.demand import (
    Demand,
    Fleet,
    held,
    smallest_fleet,
    smallest_group,
    with_room_for,
)
from kvscaler.budget.deployment import Deployment
from kvscaler.budget.footprint import BlocksOf, Footprint
from kvscaler.budget.layout import PoolGroup, PoolLayout
from kvscaler.budget.lines import Basis, BudgetLine, Fit, KVBudget, gib
from kvscaler.budget.profile import EngineProfile
from kvscaler.budget.profiles import UnknownEngine, profile_for
from kvscaler.budget.questions import Waste, largest_context, sequences_at, waste
from kvscaler.budget.settings import AUTO, EngineSettings, ResolvedSettings

if TYPE_CHECKING:
    from kvscaler.budget.limits import AdmissionPolicy, admission_limits, limits_over_pool

_LIMITS = ("AdmissionPolicy", "admission_limits", "limits_over_pool")


def __getattr__(name: str) -> Any:
    """Limits are messages of the admin API, whose pydantic costs more time than a whole plan."""
    if name not in _LIMITS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvscaler.budget import limits  # noqa: PLC0415

    return getattr(limits, name)


__all__ = [
    "AUTO",
    "AdmissionPolicy",
    "Basis",
    "BlocksOf",
    "BudgetLine",
    "BudgetUnknown",
    "Calibration",
    "Change",
    "Demand",
    "Deployment",
    "EngineProfile",
    "EngineSettings",
    "Fit",
    "Fleet",
    "Footprint",
    "KVBudget",
    "Observation",
    "PoolGroup",
    "PoolLayout",
    "ResolvedSettings",
    "UnknownEngine",
    "Waste",
    "admission_limits",
    "calibrate",
    "cheapest_changes",
    "compute_budget",
    "dtype_changes",
    "gib",
    "held",
    "largest_context",
    "limits_over_pool",
    "profile_for",
    "quantized",
    "sequences_at",
    "smallest_fleet",
    "smallest_group",
    "waste",
    "with_room_for",
]
