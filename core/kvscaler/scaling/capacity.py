"""What one replica can hold and compute: predicted by its budget, corrected by what it reports."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvscaler.budget import AdmissionPolicy, KVBudget, admission_limits
from kvscaler.performance.step_time import StepTimeModel
from kvscaler.protocol.limits import AdmissionLimits


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """Capacity of the smallest rank of the smallest replica.

    `kv_blocks` is the calibrated number: the least that a ready replica reports, or
    `predicted_kv_blocks` while none does. `limits` are the admission limits that follow from it.
    """

    kv_blocks: int
    predicted_kv_blocks: int
    limits: AdmissionLimits
    step_times: tuple[StepTimeModel, ...] = ()
    """Of each replica that has measured its steps; empty while none has and no model is known."""

    def __post_init__(self) -> None:
        if self.usable_blocks < 1:
            raise ValueError(
                f"a replica of {self.kv_blocks} KV blocks with a watermark of"
                f" {self.limits.watermark_blocks} holds nothing: lower the watermark or raise its"
                " memory"
            )

    @property
    def slowest_step_time(self) -> StepTimeModel | None:
        """For objectives: requests do not choose their replica, and each is to meet them."""

        def cost(model: StepTimeModel) -> tuple[float, float, float]:
            return (
                model.per_context_token_seconds,
                model.per_sequence_seconds,
                model.base_seconds,
            )

        return max(self.step_times, key=cost, default=None)

    @property
    def mean_step_time(self) -> StepTimeModel | None:
        """For sums over the fleet: what a request holds is linear in the costs of its replica."""
        return StepTimeModel.mean(self.step_times) if self.step_times else None

    @property
    def usable_blocks(self) -> int:
        """Blocks that admission fills: all but the watermark."""
        return self.limits.kv_blocks - self.limits.watermark_blocks


def replica_capacity(
    budget: KVBudget,
    policy: AdmissionPolicy,
    reported_kv_blocks: Iterable[int] = (),
    step_times: Iterable[StepTimeModel] = (),
) -> ReplicaCapacity:
    """Capacity from a budget and what the ready replicas report that they allocated.

    Predicted and reported blocks differ by what a budget can only estimate; the report is counted
    from tensors, so it wins. Limits come from the same function as the replica's own. Raises
    `ValueError` for a replica that can hold nothing.
    """
    reported = [blocks for blocks in reported_kv_blocks if blocks > 0]
    blocks = min(reported) if reported else None
    limits = admission_limits(budget, policy, calibrated_blocks=blocks)
    return ReplicaCapacity(limits.kv_blocks, budget.blocks, limits, tuple(step_times))
