"""How long a step takes: a linear model of prefill and decode."""

from kvscaler.performance.cards import LLAMA_3_1_8B_H100, StepTimeUnknown, step_time_on
from kvscaler.performance.step_time import MAX_UTILIZATION, RequestWork, StepTimeModel
from kvscaler.performance.tracking import StepCostTracker

__all__ = [
    "LLAMA_3_1_8B_H100",
    "MAX_UTILIZATION",
    "RequestWork",
    "StepCostTracker",
    "StepTimeModel",
    "StepTimeUnknown",
    "step_time_on",
]
