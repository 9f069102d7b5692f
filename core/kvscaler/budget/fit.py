"""Whether a pool holds the one request that it must hold, and by how much it falls short."""

from kvscaler.budget.layout import PoolLayout
from kvscaler.budget.lines import Fit, KVBudget, gib

SMALLEST_CONTEXT_TOKENS = 256
"""A replica that can't hold one request of this length is not worth starting."""


def fit_of(
    *,
    device_bytes: int,
    overhead_bytes: int,
    layout: PoolLayout,
    blocks: int,
    needed_tokens: int,
    kv_bytes: int,
    utilization_percent: float,
) -> Fit:
    """Whether a pool of `blocks` holds one request of `needed_tokens`, and in words what would."""
    needed_blocks = layout.sequence_blocks(needed_tokens)
    needed_bytes = layout.fixed_bytes + needed_blocks * layout.block_bytes
    if blocks >= needed_blocks:
        held = layout.longest(blocks, 1 << 40)
        return Fit(True, 0, f"{blocks} blocks hold {held} tokens", needed_bytes, needed_tokens)
    shortfall = needed_bytes - kv_bytes
    memory_needed = device_bytes + shortfall * 100 / utilization_percent
    remedies = [f"an accelerator memory of {gib(memory_needed)}"]
    longest = layout.longest(blocks, needed_tokens)
    longest -= longest % layout.block_tokens
    if longest >= SMALLEST_CONTEXT_TOKENS:
        remedies.append(f"maxContextTokens {longest}")
    rounded = -(-needed_tokens // layout.block_tokens) * layout.block_tokens
    return Fit(
        False,
        shortfall,
        f"does not fit by {gib(shortfall)}: one request of {rounded} tokens needs "
        f"{gib(needed_bytes)} of KV cache, and {gib(max(0, kv_bytes))} of "
        f"{gib(device_bytes)} x {utilization_percent:g}% are left after "
        f"{gib(overhead_bytes)} for weights and overhead. It would fit with "
        f"{' or with '.join(remedies)}",
        needed_bytes,
        needed_tokens,
    )


def fitted(budget: KVBudget) -> tuple[Fit, int]:
    """The fit and the longest context of `budget` after its pool changed, by an observation.

    What one request needs stays; a context that nobody stated shrinks with the pool.
    """
    layout = budget.layout
    needed_tokens, context = budget.fit.needed_tokens, budget.max_context_tokens
    if needed_tokens < context:
        context = max(needed_tokens, layout.longest(budget.blocks, context))
    fit = fit_of(
        device_bytes=budget.device_bytes,
        overhead_bytes=budget.overhead_bytes,
        layout=layout,
        blocks=budget.blocks,
        needed_tokens=needed_tokens,
        kv_bytes=budget.kv_bytes,
        utilization_percent=budget.utilization_percent,
    )
    return fit, context
