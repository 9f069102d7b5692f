"""Brings a model into memory exactly as it was planned, with the Torch executor.

The number format is chosen once, before the budget, because the choice is timed and the budget
depends on it; what is loaded must be what was budgeted.
"""

import gc
from dataclasses import dataclass
from typing import Self

import torch
from kvscaler.models import ModelNotUnderstood

from kvscaler_sidecar.config import Settings
from kvscaler_sidecar.executors.dtype import ComputeDtype, choose_compute_dtype
from kvscaler_sidecar.executors.threads import ThreadsError, thread_count
from kvscaler_sidecar.executors.torch_cpu import Torch, TorchSettings
from kvscaler_sidecar.replica import Loaded
from kvscaler_sidecar.start import Plan, StartRefused
from kvscaler_sidecar.tokenizer import HuggingFaceTokenizer


@dataclass(frozen=True, slots=True)
class TorchLoader:
    """Loads with one compute dtype; call it in a thread, it takes seconds."""

    compute: ComputeDtype

    @classmethod
    def for_machine(cls, settings: Settings) -> Self:
        """The loader for this machine, with its threads set.

        Raises `StartRefused` for a number of threads that can't be.
        """
        try:
            torch.set_num_threads(settings.threads or thread_count())
        except ThreadsError as error:
            raise StartRefused(str(error)) from error
        return cls(choose_compute_dtype(settings.compute_dtype))

    @property
    def compute_dtype(self) -> str:
        """What the budget is to count with."""
        return self.compute.name

    def __call__(self, settings: Settings, plan: Plan) -> Loaded:
        """Weights, pool, tokenizer and measured step costs, in this order.

        Raises `StartRefused` for what this executor can't compute.
        """
        budget = plan.budget
        if budget.kv_dtype != budget.compute_dtype:
            raise StartRefused(
                f"KVSCALER_CACHE_DTYPE asks for {budget.kv_dtype}, and this executor keeps keys "
                f"and values in its compute dtype, {budget.compute_dtype}: use Auto"
            )
        torch_settings = TorchSettings(
            block_tokens=budget.block_tokens,
            step_tokens=budget.step_tokens,
            max_sequences=budget.max_sequences,
            max_context_tokens=budget.max_context_tokens,
            compute=self.compute,
        )
        assert plan.folder is not None
        try:
            tokenizer = HuggingFaceTokenizer.from_folder(plan.folder)
            executor = Torch.load(plan.folder, torch_settings)
        except ModelNotUnderstood as error:
            raise StartRefused(f"model {settings.model_uri}: {error}") from error
        executor.allocate(budget.blocks)
        costs = executor.measure()
        gc.collect()
        gc.freeze()  # what was loaded stays; collections need not look at it again
        return Loaded(executor, tokenizer, costs)
