"""Attention over keys and values that lie in blocks: `softmax(q kᵀ / sqrt(head_dim)) v`.

The torch path gathers a sequence's blocks into a reused buffer with `index_select` (about five
times faster than advanced indexing for the same copy) and gives views of it to fused attention.
Query heads that share a KV head are folded into the length axis (decode) or get it by an expanded
view (prefill), so keys and values are never repeated in memory.

A pool's layer is `[blocks, width]`: a block holds `[block_tokens, 2, kv_heads, head_dim]`, keys at
index 0 and values at 1. There are `kv_heads * group` query heads. Buffers are the same for every
layer, so views of them are made once a step.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


def gather_blocks(layer_pool: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the blocks of `table` (`[n]`, int64) to `out` (`[n, width]`)."""
    torch.index_select(layer_pool, 0, table, out=out)


def decode_context(
    gathered: torch.Tensor, batch: int, tokens: int, kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[batch, kv_heads, tokens, head_dim]` as views of gathered blocks.

    `gathered` is `[batch * blocks a sequence, width]`; `tokens` of each sequence's slots are used.
    """
    context = gathered.view(batch, -1, 2, kv_heads, head_dim)[:, :tokens]
    return context[:, :, 0].transpose(1, 2), context[:, :, 1].transpose(1, 2)


def decode_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One query token for each of `batch` sequences, `[batch, kv_heads, group, head_dim]`.

    `mask` is added to scores: `[batch, 1, 1, tokens]`, `-inf` behind a sequence's end; `None` if
    all sequences fill the context. The result has the query's shape.
    """
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def length_mask(lengths: torch.Tensor, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask of `decode_attention` for sequences of `lengths` (`[batch]`) in `tokens` slots."""
    behind = torch.arange(tokens, device=lengths.device) >= lengths[:, None]
    mask = torch.zeros(behind.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(behind, float("-inf"))[:, None, None, :]


def causal_template(
    rows: int, max_context_tokens: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Of which every causal mask of `prefill_attention` is a view, so that none is ever built.

    `[rows, max_context_tokens + rows]`: zeros, then a triangle of `-inf`.
    """
    shape = (rows, max_context_tokens + rows)
    template = torch.zeros(shape, dtype=dtype, device=device)
    triangle = torch.full((rows, rows), float("-inf"), dtype=dtype, device=device)
    template[:, max_context_tokens:] = triangle.triu_(1)
    return template


def prefill_context(
    gathered: torch.Tensor, tokens: int, kv_heads: int, group: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[kv_heads, group, tokens, head_dim]` of one sequence, as expanded views.

    `gathered` is `[blocks, width]`, with room for `tokens` at least.
    """
    context = gathered.view(-1, 2, kv_heads, head_dim)[:tokens]
    shape = (kv_heads, group, tokens, head_dim)
    keys = context[:, 0].transpose(0, 1).unsqueeze(1).expand(shape)
    return keys, context[:, 1].transpose(0, 1).unsqueeze(1).expand(shape)


def prefill_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    template: torch.Tensor,
) -> torch.Tensor:
    """A run of query tokens of one sequence from position `start`, which ends the context.

    Args:
        query: `[kv_heads, group, length, head_dim]`.
        keys, values: `[kv_heads, group, start + length, head_dim]`.
        template: from `causal_template`; its rows are the query rows per call of attention after
            a prefix, each of which skips what lies behind its last row.

    Returns:
        The query's shape.
    """
    if start == 0:
        return scaled_dot_product_attention(query, keys, values, is_causal=True)
    length, height = query.shape[2], template.shape[0]
    origin = template.shape[1] - height
    parts = []
    for first in range(0, length, height):
        last = min(first + height, length)
        begin, end = start + first, start + last
        parts.append(
            scaled_dot_product_attention(
                query[:, :, first:last],
                keys[:, :, :end],
                values[:, :, :end],
                attn_mask=template[: last - first, origin - begin : origin + last - first],
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
