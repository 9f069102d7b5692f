"""How an engine cuts the memory of a KV pool into blocks, group by group.

Layers that keep alike share a block table. A *block* is what one table entry stands for: in every
group it has the same size in bytes (one page for each layer that shares the tensor), but it may hold
a different number of tokens. A sequence takes blocks from one pool for every group.
"""

from dataclasses import dataclass

from kvscaler.budget.rounding import ceil_div
from kvscaler.models import LayerKind


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """One block table: `layers` layers whose block holds `block_tokens` tokens of a sequence."""

    kind: LayerKind
    layers: int
    block_tokens: int
    window_tokens: int | None = None
    fixed_blocks: int = 0
    """Recurrent state: blocks of a sequence, whatever its length."""

    def blocks(self, tokens: int, step_tokens: int) -> int:
        """Blocks that a sequence of `tokens` holds at most, computed `step_tokens` at a time.

        Full attention and MLA: `ceil(n / b)`. A window keeps its last `w - 1` tokens and what one
        step computes, and may begin within a block: `ceil(min(w - 1 + step, n) / b) + 1`. A chunk:
        `ceil(min(c + step, n) / b)`. Source: vLLM `v1/kv_cache_interface.py`,
        `max_admission_blocks_per_request`.
        """
        if tokens <= 0:
            return 0
        match self.kind:
            case LayerKind.RECURRENT:
                return self.fixed_blocks
            case LayerKind.SLIDING if self.window_tokens is not None:
                held = min(self.window_tokens - 1 + step_tokens, tokens)
                return ceil_div(held, self.block_tokens) + 1
            case LayerKind.CHUNKED if self.window_tokens is not None:
                return ceil_div(min(self.window_tokens + step_tokens, tokens), self.block_tokens)
        return ceil_div(tokens, self.block_tokens)


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """All groups of a pool, and the bytes of one block on one rank."""

    groups: tuple[PoolGroup, ...]
    block_bytes: int
    step_tokens: int
    padding_bytes: int = 0
    """Of `block_bytes`, what no layer uses: pages grown to a common size, layers that pad groups."""
    fixed_bytes: int = 0
    """Of the pool, what is not cut into blocks: window cells that llama.cpp allocates apart."""

    @property
    def block_tokens(self) -> int:
        """Tokens of the smallest block: the unit in which engines print a pool."""
        return min(group.block_tokens for group in self.groups)

    def blocks_in(self, pool_bytes: int) -> int:
        """Whole blocks in `pool_bytes`."""
        return max(0, pool_bytes - self.fixed_bytes) // self.block_bytes

    def sequence_blocks(self, tokens: int) -> int:
        """Blocks of one sequence of `tokens` over all groups."""
        return sum(group.blocks(tokens, self.step_tokens) for group in self.groups)

    def concurrency(self, blocks: int, tokens: int) -> float:
        """Sequences of `tokens` that `blocks` hold, with its fraction, as engines print it."""
        each = self.sequence_blocks(tokens)
        return blocks / each if each else 0.0

    def longest(self, blocks: int, limit: int) -> int:
        """Longest sequence, up to `limit` tokens, that `blocks` hold; 0 when none fits."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.sequence_blocks(middle) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low

    @classmethod
    def uniform(cls, layers: int, block_tokens: int, block_bytes: int) -> "PoolLayout":
        """One group of full attention."""
        group = PoolGroup(LayerKind.FULL, layers, block_tokens)
        return cls((group,), block_bytes, block_tokens)
