"""The seam for engines: how one spends memory, each in a small module of its own."""

from typing import Protocol

from kvscaler.budget.layout import PoolLayout
from kvscaler.budget.lines import BudgetLine
from kvscaler.budget.settings import EngineSettings, ResolvedSettings
from kvscaler.hardware import Accelerator
from kvscaler.models import ModelArchitecture


class EngineProfile(Protocol):
    """How an engine spends memory: its defaults, every line but the KV pool, and the pool's cut."""

    @property
    def name(self) -> str:
        """How budgets call the engine."""
        ...

    def resolve(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: EngineSettings
    ) -> ResolvedSettings:
        """Fill in the engine's own defaults for this model and device."""
        ...

    def usable_bytes(
        self, accelerator: Accelerator, settings: ResolvedSettings, lines: tuple[BudgetLine, ...]
    ) -> int:
        """Bytes of the device that lines and pool may take together, on one rank."""
        ...

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, activations and overhead in bytes on one rank."""
        ...

    def layout(self, model: ModelArchitecture, settings: ResolvedSettings) -> PoolLayout:
        """How the pool is cut into blocks. Raises `ModelNotUnderstood` for what it can't run."""
        ...

    def printed_tokens(self, layout: PoolLayout, blocks: int, max_context_tokens: int) -> int:
        """The tokens that the engine itself would print for a pool of `blocks`."""
        ...
