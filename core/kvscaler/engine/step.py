"""The seam between what is decided (here) and what is computed (an executor).

The scheduler plans a step, an executor runs it and returns one token per sampling chunk, and the
scheduler commits the outcomes: one for each sampling chunk, in the order of the chunks. Nothing
else passes between them. Chunks and outcomes are named tuples because one of each is made for
every sequence in every step.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvscaler.engine.request import EngineRequest, FinishReason


class Chunk(NamedTuple):
    """`length` tokens of one request, from position `start`, computed in this step.

    `samples` is true when the chunk reaches the last known token, so that its logits give the
    next one. Slots for all its tokens are in the request's block table already.
    """

    request: EngineRequest
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a block's contents before the step runs (copy on write)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over a batch. Empty `chunks` means that there is nothing to do."""

    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[EngineRequest, ...] = ()
    copies: tuple[BlockCopy, ...] = ()

    @property
    def prefill_tokens(self) -> int:
        """Tokens of chunks that are not a single decode token."""
        return sum(c.length for c in self.chunks if not (c.length == 1 and c.samples))

    @property
    def decode_sequences(self) -> int:
        """Chunks of one sampled token."""
        return sum(1 for c in self.chunks if c.length == 1 and c.samples)

    @property
    def context_tokens(self) -> int:
        """Tokens that decoding sequences read in this step."""
        return sum(c.start + 1 for c in self.chunks if c.length == 1 and c.samples)

    @property
    def prefill_pairs(self) -> int:
        """Query-key pairs of the prefill tokens: one at position p meets p + 1 keys."""
        return sum(
            c.length * c.start + c.length * (c.length + 1) // 2
            for c in self.chunks
            if not (c.length == 1 and c.samples)
        )


class Outcome(NamedTuple):
    """What a sampling chunk gave: the next token, and whether the request ends with it."""

    token_id: int
    finish: FinishReason | None = None
