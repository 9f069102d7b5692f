"""What a budget says of itself: how many sequences, how long, and what of the pool holds nothing."""

from dataclasses import dataclass

from kvscaler.budget.deployment import Deployment
from kvscaler.budget.footprint import Footprint
from kvscaler.budget.lines import KVBudget
from kvscaler.models import LayerKind, ModelArchitecture


@dataclass(frozen=True, slots=True)
class Waste:
    """Bytes of a full pool that hold no token, on one rank, by cause."""

    rounding_bytes: int
    """Last blocks of sequences, half empty on average, at the given length and number."""
    padding_bytes: int
    """Pages grown to a common size and layers that pad groups."""
    replication_bytes: int
    """Copies of KV heads where there are more ranks than heads."""


def sequences_at(
    budget: KVBudget, prompt_tokens: int, output_tokens: int, speculative_tokens: int = 0
) -> int:
    """Requests of these lengths that one pool runs at once, within the engine's own limit.

    A speculative step writes `speculative_tokens` ahead of the last token.
    """
    footprint = Footprint(budget.block_tokens, budget.layout)
    each = footprint.blocks(prompt_tokens, output_tokens, speculative_tokens)
    return min(budget.max_sequences, budget.blocks // each) if each else budget.max_sequences


def largest_context(budget: KVBudget, model: ModelArchitecture, concurrency: int) -> int:
    """Tokens that each of `concurrency` sequences may have; at most the model's own context."""
    return budget.layout.longest(budget.blocks // max(1, concurrency), model.max_context_tokens)


def waste(deployment: Deployment, budget: KVBudget, tokens: int) -> Waste:
    """What of a pool full of sequences of `tokens` holds nothing, or holds it once more."""
    layout = budget.layout
    sequences = budget.blocks // max(1, layout.sequence_blocks(tokens))
    rounding = 0
    for group in layout.groups:
        if group.kind is not LayerKind.RECURRENT:
            held = group.blocks(tokens, layout.step_tokens) * group.block_tokens
            empty = max(0, held - min(tokens, group.window_tokens or tokens))
            rounding += sequences * empty * layout.block_bytes // group.block_tokens
    return Waste(
        rounding,
        layout.padding_bytes * budget.blocks,
        round(budget.pool_bytes * _copied_share(deployment)),
    )


def _copied_share(deployment: Deployment) -> float:
    """Share of the pool that another rank holds too: heads that are fewer than ranks, or latents.

    Ranks that share the tokens of a sequence (context parallelism) hold no copies.
    """
    model, settings = deployment.model, deployment.settings
    ranks = settings.tensor_parallel
    if deployment.shares_group:
        ranks = max(1, ranks // settings.data_parallel)
    copied = 0.0
    for group in model.groups:
        if group.kind is not LayerKind.RECURRENT:
            kept = ranks * group.rank_kv_heads(ranks)
            single = min(kept, group.kv_heads * settings.context_parallel)
            copied += group.layers * (1 - single / kept)
    return copied / max(1, model.layers)
