"""From model, accelerator and engine to the budget: the formula that everything starts from."""

from kvscaler.budget.lines import Fit, KVBudget, gib
from kvscaler.budget.profile import EngineProfile
from kvscaler.budget.settings import EngineSettings
from kvscaler.hardware import Accelerator
from kvscaler.models import ModelArchitecture

SMALLEST_CONTEXT_TOKENS = 256
"""A replica that can't hold one request of this length is not worth starting."""


class BudgetUnknown(ValueError):
    """A budget can't be computed: a fact that it needs is missing."""


def compute_budget(
    model: ModelArchitecture,
    accelerator: Accelerator,
    profile: EngineProfile,
    settings: EngineSettings | None = None,
) -> KVBudget:
    """The KV budget of one replica.

    With `max_context_tokens` unset, the context is the model's own or what the pool holds,
    whichever is less. Raises `BudgetUnknown` when the accelerator's memory is not known; a
    budget that does not fit is returned with `fit.fits` false and the reason in words.
    """
    if accelerator.memory_bytes is None:
        raise BudgetUnknown(
            f"accelerator {accelerator.name!r} has no memory of its own; "
            "give spec.accelerator.memory, or a memory limit on the engine's container"
        )
    resolved = profile.resolve(model, accelerator, settings or EngineSettings())
    lines = profile.lines(model, accelerator, resolved)
    usable = int(accelerator.memory_bytes * resolved.memory_utilization_percent / 100)
    overhead = sum(line.bytes for line in lines)
    kv_bytes = usable - overhead
    block_bytes = model.kv_bytes_per_token(resolved.kv_dtype) * resolved.block_tokens
    blocks = max(0, kv_bytes // block_bytes)

    context = resolved.max_context_tokens
    if context is None:
        context = min(model.max_context_tokens, blocks * resolved.block_tokens)
        needed_tokens = min(SMALLEST_CONTEXT_TOKENS, model.max_context_tokens)
        context = max(context, needed_tokens)
    else:
        needed_tokens = context
    needed_blocks = -(-needed_tokens // resolved.block_tokens)
    fit = _fit(
        accelerator=accelerator,
        utilization_percent=resolved.memory_utilization_percent,
        overhead_bytes=overhead,
        block_bytes=block_bytes,
        block_tokens=resolved.block_tokens,
        blocks=blocks,
        needed_blocks=needed_blocks,
        kv_bytes=kv_bytes,
    )
    return KVBudget(
        model_digest=model.digest,
        accelerator=accelerator.name,
        engine=profile.name,
        device_bytes=accelerator.memory_bytes,
        utilization_percent=resolved.memory_utilization_percent,
        usable_bytes=usable,
        lines=lines,
        kv_bytes=kv_bytes,
        block_tokens=resolved.block_tokens,
        block_bytes=block_bytes,
        blocks=blocks,
        max_context_tokens=context,
        max_sequences=max(1, min(resolved.max_sequences, blocks)),
        step_tokens=resolved.step_tokens,
        compute_dtype=resolved.compute_dtype,
        kv_dtype=resolved.kv_dtype,
        fit=fit,
    )


def _fit(
    *,
    accelerator: Accelerator,
    utilization_percent: float,
    overhead_bytes: int,
    block_bytes: int,
    block_tokens: int,
    blocks: int,
    needed_blocks: int,
    kv_bytes: int,
) -> Fit:
    needed_tokens = needed_blocks * block_tokens
    if blocks >= needed_blocks:
        return Fit(True, 0, f"{blocks} blocks hold {blocks * block_tokens} tokens")
    shortfall = needed_blocks * block_bytes - kv_bytes
    memory_needed = (overhead_bytes + needed_blocks * block_bytes) * 100 / utilization_percent
    remedies = [f"an accelerator memory of {gib(memory_needed)}"]
    if blocks * block_tokens >= SMALLEST_CONTEXT_TOKENS:
        remedies.append(f"maxContextTokens {blocks * block_tokens}")
    return Fit(
        False,
        shortfall,
        f"does not fit by {gib(shortfall)}: one request of {needed_tokens} tokens needs "
        f"{gib(needed_blocks * block_bytes)} of KV cache, and {gib(max(0, kv_bytes))} of "
        f"{gib(accelerator.memory_bytes or 0)} x {utilization_percent:g}% are left after "
        f"{gib(overhead_bytes)} for weights and overhead. It would fit with "
        f"{' or with '.join(remedies)}",
    )
