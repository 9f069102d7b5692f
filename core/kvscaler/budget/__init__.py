"""From model, accelerator and engine to KV bytes, blocks and footprints."""

from kvscaler.budget.calibration import Calibration, Observation, calibrate
from kvscaler.budget.compute import BudgetUnknown, compute_budget
from kvscaler.budget.footprint import BlocksOf, Footprint
from kvscaler.budget.layout import PoolGroup, PoolLayout
from kvscaler.budget.limits import AdmissionPolicy, admission_limits, limits_over_pool
from kvscaler.budget.lines import Basis, BudgetLine, Fit, KVBudget, gib
from kvscaler.budget.profile import EngineProfile
from kvscaler.budget.profiles import UnknownEngine, profile_for
from kvscaler.budget.questions import (
    Change,
    Deployment,
    Waste,
    cheapest_changes,
    dtype_changes,
    largest_context,
    sequences_at,
    smallest_group,
    waste,
)
from kvscaler.budget.settings import AUTO, EngineSettings, ResolvedSettings

__all__ = [
    "AUTO",
    "AdmissionPolicy",
    "Basis",
    "BlocksOf",
    "BudgetLine",
    "BudgetUnknown",
    "Calibration",
    "Change",
    "Deployment",
    "EngineProfile",
    "EngineSettings",
    "Fit",
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
    "largest_context",
    "limits_over_pool",
    "profile_for",
    "sequences_at",
    "smallest_group",
    "waste",
]
