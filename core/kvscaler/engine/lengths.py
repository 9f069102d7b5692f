"""How long an answer will be, before it is known."""

import math
from typing import Protocol


class LengthEstimator(Protocol):
    """Expected output length; learned from requests that finished."""

    def expected_output_tokens(self, prompt_tokens: int, generated_tokens: int) -> int | None:
        """Expected total output of a request that has generated so many tokens and goes on.

        More than `generated_tokens`; `None` while nothing is known, for which the caller charges
        the worst case. The caller caps it by the request's own `max_tokens`.
        """

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Learn from a request that finished by itself (not cancelled, not failed)."""


class RunningMean:
    """Mean output of the requests that finished, the last `memory_requests` weighing most.

    A request that outlives its estimate gets another mean on top, as often as it needs: what
    the expectation is for lengths without memory (exponential), and what heavier tails exceed
    only for a while, since the estimate follows.
    """

    __slots__ = ("finished", "mean_tokens", "memory_requests")

    def __init__(self, memory_requests: int = 512) -> None:
        self.memory_requests = memory_requests
        self.finished = 0
        self.mean_tokens = 0.0

    def expected_output_tokens(self, prompt_tokens: int, generated_tokens: int) -> int | None:
        """The mean, and one more for each that the request has outlived."""
        if self.finished == 0:
            return None
        mean = max(1.0, self.mean_tokens)
        return max(generated_tokens + 1, math.ceil(mean * (generated_tokens // mean + 1)))

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Move the mean towards one more length."""
        self.finished += 1
        weight = 1 / min(self.finished, self.memory_requests)
        self.mean_tokens += weight * (output_tokens - self.mean_tokens)
