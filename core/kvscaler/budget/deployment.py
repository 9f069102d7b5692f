"""What is served, on what, by what: the thing that every question is asked of."""

from dataclasses import dataclass, replace

from kvscaler.budget.calibration import Calibration
from kvscaler.budget.compute import compute_budget
from kvscaler.budget.lines import KVBudget
from kvscaler.budget.profile import EngineProfile
from kvscaler.budget.settings import EngineSettings
from kvscaler.hardware import Accelerator
from kvscaler.models import ModelArchitecture

SHARED_GROUP = ("sglang",)
"""Engines whose attention replicas live on the ranks of one tensor-parallel group (SGLang
`enable_dp_attention`, `srt/layers/dp_attention.py`); elsewhere each has ranks of its own."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on an accelerator under an engine with its settings."""

    model: ModelArchitecture
    accelerator: Accelerator
    profile: EngineProfile
    settings: EngineSettings
    calibration: Calibration | None = None
    """What an observation of this model, accelerator and engine taught."""

    def budget(self, **changes: object) -> KVBudget:
        """The budget of one rank, with some settings changed."""
        settings = replace(self.settings, **changes)  # type: ignore[arg-type]
        found = compute_budget(self.model, self.accelerator, self.profile, settings)
        return found if self.calibration is None else self.calibration.applied_to(found)

    def changed(self, **changes: object) -> "Deployment":
        """The same with some settings changed."""
        return replace(self, settings=replace(self.settings, **changes))  # type: ignore[arg-type]

    @property
    def pools(self) -> int:
        """KV pools that serve requests of their own: one for each data-parallel replica."""
        return self.settings.data_parallel

    @property
    def shares_group(self) -> bool:
        """Whether data-parallel replicas divide one group of ranks among them."""
        return self.profile.name in SHARED_GROUP

    @property
    def devices(self) -> int:
        """Accelerators in all."""
        group = self.settings.tensor_parallel * self.settings.pipeline_parallel
        return group if self.shares_group else group * self.settings.data_parallel
