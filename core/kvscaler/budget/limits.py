"""From a budget to admission limits: the same function in the operator and in the sidecar."""

from dataclasses import dataclass

from kvscaler.budget.lines import KVBudget
from kvscaler.protocol.limits import AdmissionLimits, AdmissionMode, ChargePolicy

QUEUE_POOLS = 8
"""The queue holds at most this many pools' worth of tokens: more can't be served in time."""
QUEUE_BYTES = 64 << 20
"""Memory of requests that may wait in one replica, at most; where memory is small,"""
QUEUE_SHARE = 50
"""a 50th of what the replica is planned to use: it is on no line of the budget."""


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """What a user decides about admission; everything else follows from the budget."""

    mode: AdmissionMode = AdmissionMode.ENFORCE
    charge: ChargePolicy = ChargePolicy.EXPECTED
    queue_requests: int = 256
    max_wait_seconds: float = 30.0
    watermark_percent: float = 5.0


def admission_limits(
    budget: KVBudget, policy: AdmissionPolicy, *, calibrated_blocks: int | None = None
) -> AdmissionLimits:
    """Limits of one replica.

    `calibrated_blocks` is the pool that a live engine reported and replaces the predicted one.
    Raises `ValueError` for a budget without a single block: such a replica must not start.
    """
    blocks = budget.blocks if calibrated_blocks is None else calibrated_blocks
    if blocks < 1:
        raise ValueError(f"no admission limits without KV blocks: {budget.fit.message}")
    return limits_over_pool(
        policy,
        kv_blocks=blocks,
        block_tokens=budget.block_tokens,
        max_sequences=budget.max_sequences,
        step_tokens=budget.step_tokens,
        max_context_tokens=budget.max_context_tokens,
        memory_bytes=budget.total_bytes,
    )


def limits_over_pool(
    policy: AdmissionPolicy,
    *,
    kv_blocks: int,
    block_tokens: int,
    max_sequences: int,
    step_tokens: int,
    max_context_tokens: int,
    memory_bytes: int | None = None,
) -> AdmissionLimits:
    """Limits of a replica whose pool (at least one block) is known, by its budget or its report.

    `memory_bytes` is what the replica is planned to use, where that is known.
    """
    tokens = kv_blocks * block_tokens
    return AdmissionLimits(
        max_sequences=max(1, min(max_sequences, kv_blocks)),
        kv_blocks=kv_blocks,
        step_tokens=step_tokens,
        queue_requests=policy.queue_requests,
        queue_tokens=QUEUE_POOLS * tokens,
        queue_bytes=QUEUE_BYTES
        if memory_bytes is None
        else min(QUEUE_BYTES, memory_bytes // QUEUE_SHARE),
        max_wait_seconds=policy.max_wait_seconds,
        max_request_tokens=max(1, min(max_context_tokens, tokens)),
        watermark_blocks=-(-int(kv_blocks * policy.watermark_percent) // 100),
        charge=policy.charge,
        mode=policy.mode,
    )
