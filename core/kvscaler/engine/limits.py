"""What admission limits come to inside one engine, where admission and scheduler must agree.

Both ask here, so that what the one admits the other can run: the KV limit that is really in force,
and the headroom that a new request has to leave.
"""

from collections.abc import Callable, Iterable

from kvscaler.protocol.limits import AdmissionLimits, AdmissionMode, ChargePolicy

BlocksOf = Callable[[int, int], int]
"""`(prompt_tokens, generated_tokens) -> blocks`, never falling in either; `budget.Footprint.blocks`
is one."""


def kv_limit_blocks(
    limits: AdmissionLimits, capacity_blocks: int, accepted_blocks: Iterable[int]
) -> int:
    """The KV limit in force: the asked one, lifted to the largest footprint that was accepted.

    An accepted request is never dropped, so it must be able to finish on its own. Unless limits
    are enforced, only the pool itself limits.
    """
    if limits.mode is not AdmissionMode.ENFORCE or limits.kv_blocks >= capacity_blocks:
        return capacity_blocks
    return min(capacity_blocks, max(limits.kv_blocks, max(accepted_blocks, default=1)))


def headroom_blocks(limits: AdmissionLimits, others: int) -> int:
    """Blocks that a request must leave unused when it starts beside `others` requests.

    The watermark absorbs estimates that prove too low. A worst case needs none, and a request
    that is alone may use everything.
    """
    if others == 0 or limits.charge is ChargePolicy.WORST_CASE:
        return 0
    return limits.watermark_blocks


def sequence_limit(limits: AdmissionLimits) -> int:
    """Most sequences at once: more than `step_tokens` could not all advance in a step."""
    return min(limits.max_sequences, limits.step_tokens)
