"""Length statistics that allow for requests still running.

Short requests finish first, so the mean over finished ones starts too short and stays so for as
long as the longest take; a service of long answers was seen 60 % short for its first ten minutes.
What the requests in flight have generated already corrects it:

- each of them will be at least as long as it is, so (ΣO + Σg) / (F + n) is a lower bound;
- if outputs are memoryless, each token generated is one more trial without an end, and the
  maximum-likelihood mean is (ΣO + Σg) / F;
- if all outputs are alike, a request in flight is a finished one in part, and the finished mean
  is right as it is.

Between the last two the squared coefficient of variation c decides. Among finished requests it is
as biased as the mean, but those in flight tell it too: met at a random moment they have come
m·(1 + c)/2 far on average (the inspection paradox), so c = 2·g/m - 1, and the larger of the two
counts. With few finished neither is known, so 1/F is added: the doubt errs on the long side.
"""

from kvscaler.protocol.state import InFlight, TrafficCounters
from kvscaler.traffic.latency import mean_seconds
from kvscaler.traffic.window import LengthBasis, LengthStatistics

MIN_FINISHED = 3
"""Fewer finished requests give no statistics."""


def output_correction(
    finished: float, output_tokens: float, output_squared: float, in_flight: InFlight
) -> float:
    """Factor (≥ 1) by which the mean of finished outputs is too short. Sums in, not means."""
    if finished < 1 or output_tokens <= 0 or in_flight.requests == 0:
        return 1.0
    mean = output_tokens / finished
    partial = in_flight.generated_tokens / mean
    seen = max(0.0, output_squared / finished / mean**2 - 1.0)
    inspected = 2.0 * in_flight.generated_tokens / in_flight.requests / mean - 1.0
    variation = min(1.0, max(seen, inspected) + 1.0 / finished)
    memoryless = (finished + partial) / (finished + (1.0 - variation) * partial)
    at_least = (finished + partial) / (finished + in_flight.requests)
    return max(1.0, memoryless, at_least)


def length_statistics(sums: TrafficCounters, in_flight: InFlight) -> LengthStatistics | None:
    """Moments per request from sums over finished requests; `None` with too few of them."""
    n = sums.finished
    if n < MIN_FINISHED:
        return None
    factor = output_correction(
        n, sums.finished_output_tokens, sums.finished_output_tokens_squared, in_flight
    )
    return LengthStatistics(
        prompt_mean_tokens=sums.finished_prompt_tokens / n,
        prompt_second_moment=sums.finished_prompt_tokens_squared / n,
        output_mean_tokens=factor * sums.finished_output_tokens / n,
        output_second_moment=factor**2 * sums.finished_output_tokens_squared / n,
        prompt_output_mean=factor * sums.finished_prompt_output_tokens / n,
        block_seconds=factor * sums.finished_block_seconds / n,
        block_squared_seconds=factor * sums.finished_block_squared_seconds / n,
        finished=n,
        basis=LengthBasis.FINISHED if factor == 1.0 else LengthBasis.CENSORED,
        output_correction=factor,
        time_per_output_token_seconds=mean_seconds(sums.time_per_output_token),
    )
