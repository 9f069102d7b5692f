"""What a service's traffic looked like over the last minutes: one value, made from all replicas.

Retries: a request that was refused and that its client sends again arrives twice and is counted
twice. Nothing here can tell a retry from a new request, so arrivals are an upper bound of demand
while capacity refuses, and equal to it as soon as it does not.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvscaler.protocol.state import Histogram
from kvscaler.traffic.latency import quantile_seconds, share_within

SHORT_SECONDS = 12.0
LEVEL_SECONDS = 45.0
BUCKET_SECONDS = 15.0
WINDOW_SECONDS = 600.0
RECENT_SECONDS = (2.0, 3.0, 4.0, 6.0, 8.0, 18.0, 27.0)
"""Windows beside the last 12 s that are searched for a step up: short ones see a large one early, long
ones a small one at all, and go on to see one that half of the level is in."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Events counted over a time. Keeps the count, so that its statistical weight is known."""

    count: float
    seconds: float

    @property
    def per_second(self) -> float:
        """Events per second; 0 over no time."""
        return self.count / self.seconds if self.seconds > 0 else 0.0


class LengthBasis(StrEnum):
    """Where an output mean comes from."""

    FINISHED = "finished"
    """Finished requests alone: those in flight would not change it."""
    CENSORED = "censored"
    """Raised for the requests in flight, which are longer than those that finished early."""


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Moments of prompt and output lengths (tokens) and of KV residence, per request.

    Outputs are allowed for censoring: short requests finish first, so the plain mean of finished
    ones is too short after a start. `output_correction` (≥ 1) is the factor that was applied; the
    second moments and the residence are scaled with it.
    """

    prompt_mean_tokens: float
    prompt_second_moment: float
    output_mean_tokens: float
    output_second_moment: float
    prompt_output_mean: float
    """E[prompt x output]."""
    block_seconds: float
    """E∫s dt: integral of a request's referenced blocks over its life."""
    block_squared_seconds: float
    """E∫s² dt."""
    finished: int
    """Finished requests that these moments rest on."""
    basis: LengthBasis
    output_correction: float
    time_per_output_token_seconds: float | None = None
    """Mean over the same requests, which says how busy replicas were; `None` with none seen."""


@dataclass(frozen=True, slots=True)
class TrafficWindow:
    """Service-level traffic, summed over replicas, those that vanished meanwhile included.

    `coverage` is the share of the expected replicas whose samples are fresh: below 1 every count
    here is a lower bound. `covered_seconds` is how far back the samples reach.
    """

    time: float
    coverage: float
    covered_seconds: float
    arrivals_short: Rate
    """Over the last 12 s."""
    arrivals_level: Rate
    """Over the last 45 s."""
    arrivals_recent: tuple[Rate, ...]
    """Over each of `RECENT_SECONDS`, as far as they are covered."""
    arrival_buckets: tuple[Rate, ...]
    """Complete 15 s buckets over at most 10 minutes, oldest first."""
    arrival_prompt_mean_tokens: float | None
    arrival_max_tokens_mean: float | None
    lengths: LengthStatistics | None
    """`None` until enough requests have finished."""
    refused_short: Rate
    """Refusals for want of capacity over 12 s. They are arrivals too."""
    refused_level: Rate
    refused: dict[str, int]
    """Refusals by reason over the window."""
    admitted: int
    finished: int
    cancelled: int
    failed: int
    preemptions: int
    prefix_hit_share: float | None
    """Prompt tokens found in the prefix cache, of those looked up; `None` without look-ups."""
    time_to_first_token: Histogram
    time_per_output_token: Histogram
    queue_wait: Histogram

    def attainment(
        self, time_to_first_token_seconds: float, time_per_output_token_seconds: float
    ) -> float | None:
        """Estimated share of offered requests that met both objectives; `None` without any.

        The two latencies are histograms apart, so the share that missed both is unknown: this is
        the lower bound 1 - (misses of one + misses of the other). Refused and failed are misses.
        """
        first = share_within(self.time_to_first_token, time_to_first_token_seconds)
        tokens = share_within(self.time_per_output_token, time_per_output_token_seconds)
        answered = sum(self.time_to_first_token.counts)
        offered = answered + sum(self.refused.values()) + self.failed
        if offered == 0 or first is None:
            return None
        met = max(0.0, first + (1.0 if tokens is None else tokens) - 1.0)
        return answered * met / offered

    def time_to_first_token_seconds(self, q: float) -> float | None:
        """Quantile `q` of time to first token."""
        return quantile_seconds(self.time_to_first_token, q)

    def time_per_output_token_seconds(self, q: float) -> float | None:
        """Quantile `q` of time per output token."""
        return quantile_seconds(self.time_per_output_token, q)
