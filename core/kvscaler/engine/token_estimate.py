"""How many tokens a text has, for who can't tokenize: a gate and a router.

Learned from answers that say it (`usage`), as tokens per byte of text, apart for each size class
(powers of two), because what a chat template adds weighs more in short prompts. An estimate is the
mean plus two mean deviations, so that most prompts have no more. While nothing is learned, a text
is taken for its worst case: a byte-level vocabulary has at most one token a byte, and a template
is taken to add no more than `TEMPLATE_TOKENS`.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

TEMPLATE_TOKENS = 256
MEMORY = 256
"""The last so many answers of a size class weigh most."""
DEVIATIONS = 2.0
SIZE_CLASSES = 40


class ChargeBasis(StrEnum):
    """Where the prompt tokens that a request is charged come from."""

    EXACT = "Exact"  # token ids
    LEARNED = "Learned"
    NOTHING_LEARNED = "NothingLearned"  # one token a byte
    UNKNOWN_CONTENT = "UnknownContent"  # images, audio, earlier turns that the engine keeps
    UNREADABLE_BODY = "UnreadableBody"
    UNKNOWN_ENDPOINT = "UnknownEndpoint"


WORST_CASE_BASES = frozenset(
    {ChargeBasis.UNKNOWN_CONTENT, ChargeBasis.UNREADABLE_BODY, ChargeBasis.UNKNOWN_ENDPOINT}
)
"""Bases on which a request is charged the longest that the limits admit."""


@dataclass(slots=True)
class _SizeClass:
    answers: int = 0
    tokens_per_byte: float = 0.0
    deviation: float = 0.0

    def observe(self, ratio: float) -> None:
        self.answers += 1
        weight = 1 / min(self.answers, MEMORY)
        before = self.tokens_per_byte
        self.tokens_per_byte += weight * (ratio - before)
        if self.answers > 1:
            self.deviation += weight * (abs(ratio - before) - self.deviation)


class LearnedTokens:
    """Tokens of texts of one kind, by their UTF-8 bytes."""

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}

    def estimate(self, text_bytes: int) -> tuple[int, ChargeBasis]:
        """Tokens (at least 1) that a text is taken for.

        A class that has learned nothing borrows from the next smaller one, whose ratio is higher
        if it differs; never more than the worst case.
        """
        worst = max(0, text_bytes) + TEMPLATE_TOKENS
        for size in range(min(text_bytes.bit_length(), SIZE_CLASSES), 0, -1):
            known = self._classes.get(size)
            if known is not None:
                ratio = known.tokens_per_byte + DEVIATIONS * known.deviation
                return max(1, min(worst, math.ceil(text_bytes * ratio))), ChargeBasis.LEARNED
        return worst, ChargeBasis.NOTHING_LEARNED

    def observe(self, text_bytes: int, tokens: int) -> None:
        """An engine counted `tokens` in a text of so many bytes."""
        if text_bytes > 0 and tokens > 0:
            size = min(text_bytes.bit_length(), SIZE_CLASSES)
            self._classes.setdefault(size, _SizeClass()).observe(tokens / text_bytes)
