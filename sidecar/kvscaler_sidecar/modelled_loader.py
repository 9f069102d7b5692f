"""Makes a replica of a card that is not there: step times, synthetic text, a stated cold start.

Imports no torch, so that a Pod of it is small.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvscaler import hardware
from kvscaler.budget import AUTO
from kvscaler.performance import StepTimeUnknown, step_time_on

from kvscaler_sidecar.config import Settings
from kvscaler_sidecar.executors.modelled import Modelled
from kvscaler_sidecar.executors.synthetic import (
    SyntheticTokenizer,
    SyntheticTokens,
    unsupported_field,
)
from kvscaler_sidecar.replica import Loaded
from kvscaler_sidecar.start import Plan, StartRefused


@dataclass(frozen=True, slots=True)
class ModelledLoader:
    """Loads nothing, and takes as long as was stated: from `begun`, `modelled_start_seconds`
    times the time scale."""

    begun: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    compute_dtype: str = AUTO
    """`Auto`: the card computes in the model's own element type."""

    def __call__(self, settings: Settings, plan: Plan) -> Loaded:
        """The executor with its tokenizer, after the cold start.

        Raises `StartRefused` for an accelerator whose step times are not known.
        """
        budget = plan.budget
        try:
            model = step_time_on(
                plan.architecture,
                hardware.find(settings.accelerator),
                budget.compute_dtype,
                budget.kv_dtype,
            )
            tokenizer = SyntheticTokenizer(plan.architecture.vocab_size)
        except (StepTimeUnknown, ValueError) as error:
            raise StartRefused(f"executor {settings.executor}: {error}") from error
        executor = Modelled(
            budget,
            model,
            SyntheticTokens(tokenizer.vocab_size, settings.modelled_output_tokens),
            time_scale=settings.time_scale,
        )
        ready_at = self.begun + settings.time_scale * settings.modelled_start_seconds
        self.sleep(max(0.0, ready_at - self.clock()))
        gc.collect()
        gc.freeze()  # what was made stays; collections need not look at it again
        return Loaded(executor, tokenizer, executor.measure(), unsupported_field)
