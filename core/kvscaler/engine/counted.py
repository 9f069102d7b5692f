"""A request of an engine that can't be looked into: its tokens are counted, not known.

A gate stands before such an engine. It has no token ids and no block tables, only how many tokens
a prompt is taken for and how many chunks have come back, and keeps the same books as an engine of
our own with them.
"""

from dataclasses import dataclass, field

from kvscaler.engine.limits import BlocksOf
from kvscaler.engine.request import EngineRequest, RequestState


@dataclass(slots=True, eq=False)
class CountedRequest(EngineRequest):
    """One sequence behind a gate. `token_ids` and `block_table` stay empty."""

    blocks_of: BlocksOf = field(kw_only=True)
    streams: bool = field(kw_only=True, default=True)
    """Whether its output can be watched as it comes."""
    counted_tokens: int = 0
    """Output tokens so far: seen in a stream, or by elapsed time where there is none."""

    @property
    def generated_tokens(self) -> int:
        """Output tokens so far, as far as they were seen or can be told by time."""
        return self.counted_tokens

    @property
    def uncomputed_tokens(self) -> int:
        """The whole prompt until the first token comes, then 1."""
        return 1 if self.counted_tokens else self.prompt_tokens

    @property
    def held_blocks(self) -> int:
        """Blocks that so many tokens need, while it runs."""
        if self.state is not RequestState.RUNNING:
            return 0
        return self.blocks_of(self.prompt_tokens, self.counted_tokens)

    @property
    def has_first_token(self) -> bool:
        """A token that time suggests was not seen to come."""
        return self.streams and self.counted_tokens > 0
