"""What an engine is told, before and after its own defaults are filled in."""

from dataclasses import dataclass

AUTO = "Auto"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings as a user gives them; `None` and `Auto` mean the engine's default."""

    memory_utilization_percent: float | None = None
    max_context_tokens: int | None = None
    max_sequences: int | None = None
    step_tokens: int | None = None
    block_tokens: int | None = None
    compute_dtype: str = AUTO
    kv_dtype: str = AUTO
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Settings with every default filled in, as the engine would run with them.

    `max_context_tokens` stays `None` where the pool decides it (see `compute_budget`).
    """

    memory_utilization_percent: float
    max_context_tokens: int | None
    max_sequences: int
    step_tokens: int
    block_tokens: int
    compute_dtype: str
    kv_dtype: str
