"""The least time of a decode step: what must be read of memory, at the card's bandwidth.

A bound that needs nothing but the budget. What a step really takes is the business of the step-time
model, which is fitted to measurements and knows fewer models and cards.
"""

from kvscaler.budget.deployment import Deployment
from kvscaler.budget.footprint import Footprint
from kvscaler.budget.lines import KVBudget


def decode_step_floor_seconds(
    deployment: Deployment, budget: KVBudget, sequences: int, tokens: int
) -> float | None:
    """`stages * (weights + sequences * KV of tokens) / bandwidth`, on one rank.

    `None` where the bandwidth is not known, and for models of which a step reads some experts
    only. An untied embedding table is not counted: a step reads a row of it per sequence.
    """
    bandwidth = deployment.accelerator.bandwidth_bytes_per_second
    model = deployment.model
    if bandwidth is None or model.experts_per_token:
        return None
    embedding = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    streamed = 1 - embedding / max(1, model.parameters)
    weights = budget.line("weights").bytes * streamed
    blocks = sequences * Footprint(budget.block_tokens, budget.layout).blocks(tokens)
    read = weights + blocks * budget.block_bytes
    return deployment.settings.pipeline_parallel * read / bandwidth
