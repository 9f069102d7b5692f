"""How sure a KV size is: the deviations of its lines, taken together as independent."""

import math

from kvscaler.budget.lines import BudgetLine
from kvscaler.hardware import Accelerator


def kv_interval(
    accelerator: Accelerator, usable_bytes: int, lines: tuple[BudgetLine, ...], kv_bytes: int
) -> tuple[int, int]:
    """Lowest and highest KV bytes to expect.

    The root of the sum of squares of what each line may deviate to either side, and of the
    device's total: lines are independent, and all of them at their worst at once does not happen.
    """
    share = usable_bytes / accelerator.memory_bytes if accelerator.memory_bytes else 0.0
    total = accelerator.memory_bytes or 0
    smallest, largest = accelerator.memory_range_bytes or (total, total)
    down = math.hypot(share * (total - smallest), *(line.high_bytes - line.bytes for line in lines))
    up = math.hypot(share * (largest - total), *(line.bytes - line.low_bytes for line in lines))
    return int(kv_bytes - down), int(kv_bytes + up)
