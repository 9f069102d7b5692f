"""Keeps measured step costs true while a replica serves.

Costs that were timed at start are of a quiet machine, or of one that others kept busy; a CPU limit
throttles, neighbours come and go. The proportions of a step (base, sequences, context) belong to
the model and stay; its pace is what changes. So steps that only decode move one common factor, and
what a step with prefill takes beyond decoding and attention moves the cost of a prompt token.
"""

from kvscaler.performance.step_time import StepTimeModel
from kvscaler.protocol.state import StepCosts

WEIGHT = 0.05
"""Weight of the newest step: the memory is about twenty steps of a kind."""
MAX_STEP_RATIO = 10.0
"""A step that takes more than this many times what was predicted counts as this many times: one
stall of the machine must not spoil the estimate."""


class StepCostTracker:
    """Follows the costs of one replica, from what it measured at start."""

    def __init__(self, measured: StepCosts) -> None:
        self._model = StepTimeModel.from_costs(measured)
        self._pace = 1.0
        self._prefill_seconds = measured.per_prefill_token_seconds

    def observe(
        self,
        decodes: int,
        context_tokens: int,
        prefill_tokens: int,
        seconds: float,
        *,
        prefill_pairs: int = 0,
    ) -> None:
        """Learn from a step that took `seconds`, as `StepTimeModel.step_seconds` counts it."""
        decode_part = self._model.step_seconds(decodes, context_tokens)
        if decode_part <= 0 or seconds <= 0:
            return
        if prefill_tokens == 0:
            ratio = min(seconds / decode_part, MAX_STEP_RATIO * self._pace)
            self._pace += WEIGHT * (ratio - self._pace)
            return
        attention = self._model.pair_seconds * prefill_pairs
        rest = max(0.0, seconds - self._pace * (decode_part + attention)) / prefill_tokens
        if self._prefill_seconds > 0:
            rest = min(rest, MAX_STEP_RATIO * self._prefill_seconds)
        # A large chunk tells more about the cost of a token than a small one.
        weight = 1 - (1 - WEIGHT) ** max(1.0, prefill_tokens / 64)
        self._prefill_seconds += weight * (rest - self._prefill_seconds)

    @property
    def costs(self) -> StepCosts:
        """The costs as they are now."""
        costs = self._model.costs(self._pace)
        return costs.model_copy(update={"per_prefill_token_seconds": self._prefill_seconds})
