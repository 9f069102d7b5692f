"""The VRAM budget as lines that a person can add up, each with its basis and its interval."""

from dataclasses import dataclass
from enum import StrEnum

from kvscaler.budget.layout import PoolLayout

GIB = 1 << 30


class Basis(StrEnum):
    """Where a figure comes from: a formula, a committed constant, a live engine, or the user."""

    COMPUTED = "computed"
    DEFAULT = "default"
    OBSERVED = "observed"
    STATED = "stated"


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """One use of memory on one rank. `low_bytes` and `high_bytes` bound what is expected."""

    name: str
    bytes: int
    basis: Basis
    low_bytes: int
    high_bytes: int
    note: str

    @classmethod
    def exact(cls, name: str, size_bytes: int, note: str) -> "BudgetLine":
        """A line that a formula gives exactly."""
        return cls(name, size_bytes, Basis.COMPUTED, size_bytes, size_bytes, note)


@dataclass(frozen=True, slots=True)
class Range:
    """A constant and the range in which logs of its class show it, outliers left out."""

    value: float
    low: float
    high: float

    def line(self, name: str, note: str) -> BudgetLine:
        """The line that this many bytes make."""
        return BudgetLine(name, int(self.value), Basis.DEFAULT, int(self.low), int(self.high), note)

    def times(self, factor: float) -> "Range":
        """The same, `factor` times as large."""
        return Range(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether one request of the longest context fits, by how much not, and what would help."""

    fits: bool
    shortfall_bytes: int
    message: str
    needed_bytes: int = 0
    """KV bytes of that one request."""
    needed_tokens: int = 0
    """Its length."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """What one rank of a replica spends, and the blocks that are left for keys and values.

    `usable_bytes = sum(lines) + kv_bytes`, and `blocks = kv_bytes // block_bytes` (0 when the lines
    alone exceed what is usable). Every rank of the group spends alike; `blocks` counts once.
    """

    model_digest: str
    accelerator: str
    engine: str
    device_bytes: int
    utilization_percent: float
    usable_bytes: int
    lines: tuple[BudgetLine, ...]
    kv_bytes: int
    """What is left for the pool; negative by what is missing."""
    kv_low_bytes: int
    kv_high_bytes: int
    """What the engine is expected to report lies between these."""
    block_tokens: int
    block_bytes: int
    blocks: int
    max_context_tokens: int
    max_sequences: int
    step_tokens: int
    compute_dtype: str
    kv_dtype: str
    fit: Fit
    layout: PoolLayout
    """How the pool is cut into blocks, group by group."""
    ranks: int = 1

    @property
    def unused_bytes(self) -> int:
        """What of the device is neither a line nor the pool."""
        return self.device_bytes - self.usable_bytes

    @property
    def overhead_bytes(self) -> int:
        """Sum of all lines: everything but the pool."""
        return sum(line.bytes for line in self.lines)

    @property
    def pool_bytes(self) -> int:
        """Bytes that the blocks take, at most `kv_bytes`."""
        return self.blocks * self.block_bytes

    @property
    def pool_tokens(self) -> int:
        """Tokens of one sequence that the blocks hold: a unit for display only."""
        return self.layout.longest(self.blocks, 1 << 40)

    @property
    def total_bytes(self) -> int:
        """What the process is predicted to use with its pool full."""
        return self.overhead_bytes + self.pool_bytes

    def line(self, name: str) -> BudgetLine:
        """The line called `name`; `KeyError` when the engine's profile has none."""
        for line in self.lines:
            if line.name == name:
                return line
        raise KeyError(f"{self.engine} budget has no line {name!r}")


def gib(size_bytes: float) -> str:
    """`size_bytes` for people, in GiB or, when small, in MiB or KiB."""
    if abs(size_bytes) >= GIB:
        return f"{size_bytes / GIB:.2f} GiB"
    if 0 < abs(size_bytes) < 1 << 20:
        return f"{size_bytes / (1 << 10):.1f} KiB"
    return f"{size_bytes / (1 << 20):.1f} MiB"
