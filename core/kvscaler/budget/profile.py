"""The seam for engines: how one spends memory, each in a small module of its own."""

from typing import Protocol

from kvscaler.budget.lines import BudgetLine
from kvscaler.budget.settings import EngineSettings, ResolvedSettings
from kvscaler.hardware import Accelerator
from kvscaler.models import ModelArchitecture


class EngineProfile(Protocol):
    """How an engine spends memory: its defaults, and every line but the KV pool."""

    name: str

    def resolve(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: EngineSettings
    ) -> ResolvedSettings:
        """Fill in the engine's own defaults for this model and device."""
        ...

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, activations and overhead in bytes on one rank."""
        ...
