"""What one replica can hold and compute: predicted by its budget, corrected by what it reports."""

from dataclasses import dataclass

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
    watermark_blocks: int
    max_sequences: int
    block_tokens: int
    limits: AdmissionLimits
    step_time: StepTimeModel | None = None
    """`None` while no replica has measured its steps and no model of it is known."""

    def __post_init__(self) -> None:
        if self.kv_blocks - self.watermark_blocks < 1:
            raise ValueError(
                f"a replica of {self.kv_blocks} KV blocks with a watermark of"
                f" {self.watermark_blocks} holds nothing: lower the watermark or raise its memory"
            )

    @property
    def usable_blocks(self) -> int:
        """Blocks that admission fills: all but the watermark."""
        return self.kv_blocks - self.watermark_blocks
