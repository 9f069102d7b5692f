"""The torch reference of paged attention against the formula, written out with einsum."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvscaler_kernels.block_copy import copy_blocks
from kvscaler_kernels.kv_write import write_kv
from kvscaler_kernels.paged_attention import (
    causal_template,
    decode_attention,
    decode_context,
    gather_blocks,
    length_mask,
    prefill_attention,
    prefill_context,
)

torch.set_num_threads(1)  # tests share the machine: threads would wait for each other

PREFILL_ROWS = 128
SHAPES = st.tuples(
    st.integers(1, 4),  # KV heads
    st.integers(1, 5),  # query heads a KV head
    st.sampled_from([2, 8, 24, 64]),  # head_dim
    st.sampled_from([4, 16]),  # block_tokens
)


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`query` [kv, group, d] of the last token over `keys`, `values` [tokens, kv, d]; float64."""
    scores = torch.einsum("kgd,tkd->kgt", query.double(), keys.double()) / query.shape[-1] ** 0.5
    return torch.einsum("kgt,tkd->kgd", scores.softmax(-1), values.double()).float()


def shuffled_pool(
    tokens: int, kv_heads: int, head_dim: int, block_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A pool [blocks, width] with one sequence in shuffled blocks, its table, and its rows
    [tokens, 2, kv, d]."""
    needed = -(-tokens // block_tokens)
    slot = 2 * kv_heads * head_dim
    pool = torch.randn(needed + 3, block_tokens * slot)
    table = torch.randperm(needed + 3)[:needed]
    rows = torch.randn(tokens, 2, kv_heads, head_dim)
    slots = torch.tensor([int(table[t // block_tokens]) * block_tokens + t % block_tokens
                          for t in range(tokens)])  # fmt: skip
    write_kv(pool.view(-1, slot), slots, rows.view(tokens, -1))
    return pool, table, rows


@settings(max_examples=60)
@given(SHAPES, st.lists(st.integers(1, 70), min_size=1, max_size=5), st.integers(0, 2**31))
def test_decode_equals_the_formula(
    shape: tuple[int, int, int, int], lengths: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    kv_heads, group, head_dim, block_tokens = shape
    longest = max(lengths)
    blocks = -(-longest // block_tokens)
    pool = torch.randn(len(lengths) * blocks, block_tokens * 2 * kv_heads * head_dim)
    tables = torch.randperm(len(lengths) * blocks).view(len(lengths), blocks)
    query = torch.randn(len(lengths), kv_heads, group, head_dim)
    gathered = torch.empty_like(pool)
    gather_blocks(pool, tables.flatten(), gathered)
    keys, values = decode_context(gathered, len(lengths), longest, kv_heads, head_dim)
    mask = length_mask(torch.tensor(lengths), longest, torch.float32)
    out = decode_attention(query, keys, values, mask)
    for n, length in enumerate(lengths):
        rows = pool[tables[n]].view(-1, 2, kv_heads, head_dim)[:length]
        expected = attention(query[n], rows[:, 0], rows[:, 1])
        torch.testing.assert_close(out[n], expected, atol=2e-5, rtol=2e-5)


@settings(max_examples=60)
@given(
    SHAPES,
    st.integers(0, 90),
    st.one_of(st.integers(1, 40), st.integers(PREFILL_ROWS - 1, PREFILL_ROWS + 40)),
    st.integers(0, 2**31),
)
def test_prefill_equals_the_formula_row_by_row(
    shape: tuple[int, int, int, int], start: int, length: int, seed: int
) -> None:
    torch.manual_seed(seed)
    kv_heads, group, head_dim, block_tokens = shape
    pool, table, rows = shuffled_pool(start + length, kv_heads, head_dim, block_tokens)
    query = torch.randn(length, kv_heads, group, head_dim)
    gathered = torch.empty(len(table), pool.shape[1])
    gather_blocks(pool, table, gathered)
    keys, values = prefill_context(gathered, start + length, kv_heads, group, head_dim)
    template = causal_template(PREFILL_ROWS, 300, torch.float32, "cpu")
    out = prefill_attention(query.permute(1, 2, 0, 3), keys, values, start, template)
    for row in range(length):
        seen = rows[: start + row + 1]
        expected = attention(query[row], seen[:, 0], seen[:, 1])
        torch.testing.assert_close(out[:, :, row], expected, atol=2e-5, rtol=2e-5)


def test_write_touches_only_its_slots() -> None:
    pool = torch.zeros(3 * 4, 12)
    write_kv(pool, torch.tensor([5, 11]), torch.ones(2, 12))
    written = pool.ne(0).all(dim=1).nonzero().flatten().tolist()
    assert written == [5, 11]
    assert pool.count_nonzero() == 24


def test_copies_read_all_sources_before_they_write() -> None:
    pool = [torch.arange(4.0).repeat_interleave(6).view(4, 6) + 10 * layer for layer in range(2)]
    copy_blocks(pool, [0, 1], [1, 2])
    assert [block[0].item() for block in pool[0]] == [0, 0, 1, 3]
    assert [block[0].item() for block in pool[1]] == [10, 10, 11, 13]
