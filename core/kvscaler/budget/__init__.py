"""From model, accelerator and engine to KV bytes, blocks and footprints."""

from kvscaler.budget.compute import BudgetUnknown, compute_budget
from kvscaler.budget.footprint import BlocksOf, Footprint
from kvscaler.budget.limits import AdmissionPolicy, admission_limits, limits_over_pool
from kvscaler.budget.lines import Basis, BudgetLine, Fit, KVBudget, gib
from kvscaler.budget.profile import EngineProfile
from kvscaler.budget.profiles import UnknownEngine, profile_for
from kvscaler.budget.settings import AUTO, EngineSettings, ResolvedSettings

__all__ = [
    "AUTO",
    "AdmissionPolicy",
    "Basis",
    "BlocksOf",
    "BudgetLine",
    "BudgetUnknown",
    "EngineProfile",
    "EngineSettings",
    "Fit",
    "Footprint",
    "KVBudget",
    "ResolvedSettings",
    "UnknownEngine",
    "admission_limits",
    "compute_budget",
    "gib",
    "limits_over_pool",
    "profile_for",
]
