"""How many blocks a request holds: the one unit in which pool, admission and scaling count."""

from collections.abc import Callable
from dataclasses import dataclass

from kvscaler.budget.layout import PoolLayout

BlocksOf = Callable[[int, int], int]
"""`(prompt_tokens, generated_tokens) -> blocks`."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Blocks of a request by its tokens: a fixed state, a slope, and a cap for each window.

    Without `layout` it is uniform full attention: `ceil(tokens / block_tokens)` blocks, and no end
    to its growth.
    """

    block_tokens: int
    layout: PoolLayout | None = None

    def blocks(
        self,
        prompt_tokens: int,
        generated_tokens: int = 0,
        speculative_tokens: int = 0,
        branches: int = 1,
    ) -> int:
        """Blocks for keys and values of that many tokens.

        `branches` continuations share the full blocks of the prompt; the block in which the
        prompt ends is copied on the first write of all but one of them. Windows and recurrent
        states are not shared: each branch moves on by itself.
        """
        if min(prompt_tokens, generated_tokens, speculative_tokens) < 0 or branches < 1:
            raise ValueError(
                f"footprint of {prompt_tokens} prompt, {generated_tokens} generated and "
                f"{speculative_tokens} speculative tokens in {branches} branches: "
                "counts can't be negative, and there is at least one branch"
            )
        tokens = prompt_tokens + generated_tokens + speculative_tokens
        if self.layout is None:
            single = -(-tokens // self.block_tokens)
            shared = prompt_tokens // self.block_tokens
            return shared + branches * (single - shared)
        total = 0
        for group in self.layout.groups:
            single = group.blocks(tokens, self.layout.step_tokens)
            unbounded = group.window_tokens is None and not group.fixed_blocks
            shared = prompt_tokens // group.block_tokens if unbounded else 0
            total += shared + branches * (single - shared)
        return total
