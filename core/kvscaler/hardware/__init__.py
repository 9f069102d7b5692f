"""Facts of accelerators: memory, bandwidth and peak rates, each with its source."""

from kvscaler.hardware.accelerators import (
    Accelerator,
    UnknownAccelerator,
    accelerators,
    custom,
    find,
)

__all__ = ["Accelerator", "UnknownAccelerator", "accelerators", "custom", "find"]
