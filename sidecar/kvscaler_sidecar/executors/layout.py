"""From a planned step to the index tensors that its computation needs.

Rows (tokens) of decode chunks come first, longest context first, so that sequences of similar
length are neighbours and attend together in one padded call, a *bucket*. Prefill chunks follow,
one call each. Everything here is made once a step and used by every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kvscaler.engine.step import Chunk, StepPlan
from kvscaler_kernels.paged_attention import length_mask

BUCKET_COST_TOKENS = 256
"""Padding, in tokens, that costs about as much as one more call of attention."""


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Rows `first … first + count - 1`, one token each, attending to `tokens` padded slots."""

    first: int
    count: int
    tokens: int
    table: torch.Tensor  # [count * blocks a sequence]
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """Rows `first … first + length - 1` of one sequence, from position `start`."""

    first: int
    length: int
    start: int
    table: torch.Tensor  # [blocks of start + length]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Index tensors of one step over `rows` tokens."""

    rows: int
    token_ids: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows]
    buckets: tuple[DecodeBucket, ...]
    prefills: tuple[PrefillRun, ...]
    sampled: tuple[Chunk, ...]
    """Chunks that sample, in the order of the plan."""
    sampled_rows: torch.Tensor  # [len(sampled)]: each one's last row


def lay_out(
    plan: StepPlan, block_tokens: int, bucket_blocks: int, dtype: torch.dtype, device: str
) -> StepLayout:
    """Index tensors for `plan`; a bucket gathers at most `bucket_blocks` blocks (one sequence may
    exceed it)."""
    decodes = sorted((c for c in plan.chunks if c.length == 1), key=lambda c: -c.start)
    prefills = [c for c in plan.chunks if c.length > 1]
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    first_row: dict[int, int] = {}
    for chunk in (*decodes, *prefills):
        first_row[id(chunk)] = len(positions)
        end = chunk.start + chunk.length
        table = chunk.request.block_table
        token_ids += chunk.request.token_ids[chunk.start : end]
        positions += range(chunk.start, end)
        slots += [
            table[p // block_tokens] * block_tokens + p % block_tokens
            for p in range(chunk.start, end)
        ]

    def tensor(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    sampled = tuple(c for c in plan.chunks if c.samples)
    runs = []
    for chunk in prefills:
        blocks = -(-(chunk.start + chunk.length) // block_tokens)
        own = tensor(chunk.request.block_table[:blocks])
        runs.append(PrefillRun(first_row[id(chunk)], chunk.length, chunk.start, own))
    return StepLayout(
        rows=len(positions),
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        buckets=tuple(
            _bucket(first, members, block_tokens, dtype, device)
            for first, members in _split(decodes, block_tokens, bucket_blocks)
        ),
        prefills=tuple(runs),
        sampled=sampled,
        sampled_rows=tensor([first_row[id(c)] + c.length - 1 for c in sampled]),
    )


def _split(
    decodes: Sequence[Chunk], block_tokens: int, bucket_blocks: int
) -> list[tuple[int, Sequence[Chunk]]]:
    """Cut `decodes` (longest first) where padding or the cap would cost more than a new call."""
    cuts: list[tuple[int, Sequence[Chunk]]] = []
    begin = padding = 0
    for index, chunk in enumerate(decodes):
        longest = decodes[begin].start + 1
        blocks = -(-longest // block_tokens) * (index - begin + 1)
        padding += longest - (chunk.start + 1)
        if index > begin and (blocks > bucket_blocks or padding > BUCKET_COST_TOKENS):
            cuts.append((begin, decodes[begin:index]))
            begin, padding = index, 0
    if decodes:
        cuts.append((begin, decodes[begin:]))
    return cuts


def _bucket(
    first: int, members: Sequence[Chunk], block_tokens: int, dtype: torch.dtype, device: str
) -> DecodeBucket:
    lengths = [chunk.start + 1 for chunk in members]
    tokens = lengths[0]
    blocks = -(-tokens // block_tokens)
    table: list[int] = []
    for chunk in members:
        own = chunk.request.block_table[:blocks]
        table += own
        # Any block will do as padding: the mask hides it, and every block holds finite numbers.
        table += [own[0]] * (blocks - len(own))
    mask = None
    if lengths[-1] < tokens:
        mask = length_mask(torch.tensor(lengths, device=device), tokens, dtype)
    return DecodeBucket(
        first,
        len(members),
        tokens,
        torch.tensor(table, dtype=torch.int64, device=device),
        mask,
    )
