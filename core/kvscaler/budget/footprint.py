"""How many blocks a request holds: the one unit in which pool, admission and scaling count."""

from collections.abc import Callable
from dataclasses import dataclass

BlocksOf = Callable[[int, int], int]
"""`(prompt_tokens, generated_tokens) -> blocks`."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Uniform full attention: `ceil(tokens / block_tokens)` blocks, and no end to its growth.

    Sliding windows (a cap) and recurrent layers (a fixed state) will add their terms here.
    """

    block_tokens: int

    def blocks(
        self,
        prompt_tokens: int,
        generated_tokens: int = 0,
        speculative_tokens: int = 0,
        branches: int = 1,
    ) -> int:
        """Blocks for keys and values of that many tokens.

        `branches` continuations share the full blocks of the prompt; the block in which the
        prompt ends is copied on the first write of all but one of them.
        """
        if min(prompt_tokens, generated_tokens, speculative_tokens) < 0 or branches < 1:
            raise ValueError(
                f"footprint of {prompt_tokens} prompt, {generated_tokens} generated and "
                f"{speculative_tokens} speculative tokens in {branches} branches: "
                "counts can't be negative, and there is at least one branch"
            )
        tokens = prompt_tokens + generated_tokens + speculative_tokens
        single = -(-tokens // self.block_tokens)
        shared = prompt_tokens // self.block_tokens
        return shared + branches * (single - shared)
