"""What a request holds on a replica that is as full as it may be: the point at which fleets are sized.

Measured block-seconds are those of the load under which they were measured. In a calm they are
short, because tokens come quickly; sized by them, a fleet for a spike is too small by the factor by
which full replicas are slower. In the step-time model everything that a request waits for grows as
1/(1 - ρ), so its block-seconds B do, too, and with λ requests a second and w seconds of work each

    B(λ) = B₀/(1 - λ·w),  λ·B(λ) = y  gives  λ = y/(B₀ + y·w),  that is B = B₀ + y·w

on a replica with y blocks in use. B₀, of a request alone, is the measured B contracted by the
measured time per token. So whatever shapes B (block rounding, shared prefixes, branches, censoring)
stays as measured; only its pace is the model's.
"""

import math
from dataclasses import replace

from kvscaler.performance.step_time import RequestWork, StepTimeModel
from kvscaler.traffic.window import LengthStatistics

ROOM_SIGMAS = 0.7
"""z: square-root staffing. At the highest permitted load about a third of the requests wait for a
moment (Halfin and Whitt 1981: 1/(1 + z·Φ(z)/φ(z))); more room costs replicas at every hour."""


def share_per_replica(usable_blocks: float, request_blocks: float, sigmas: float) -> float:
    """Largest y with y + sigmas·√(y·request_blocks) <= usable_blocks."""
    root = sigmas * math.sqrt(request_blocks)
    return ((-root + math.sqrt(root * root + 4.0 * usable_blocks)) / 2.0) ** 2


def request_work(lengths: LengthStatistics) -> RequestWork:
    """The moments that the step-time model takes."""
    return RequestWork(
        lengths.prompt_mean_tokens,
        lengths.prompt_second_moment,
        lengths.output_mean_tokens,
        lengths.output_second_moment,
        lengths.prompt_output_mean,
    )


def lengths_when_full(
    lengths: LengthStatistics,
    model: StepTimeModel | None,
    usable_blocks: int,
    hit_share: float = 0.0,
) -> LengthStatistics:
    """`lengths` with block-seconds as on a replica whose share of blocks is in use.

    They stay as measured while step times are unknown or no time per token was seen. A replica
    never holds more than its usable blocks, so what was measured, however overloaded, exceeds the
    result at most by usable/y: the bound that holds when step costs are far too small.
    """
    measured, tpot = lengths.block_seconds, lengths.time_per_output_token_seconds
    if model is None or tpot is None or tpot <= 0 or measured <= 0:
        return lengths
    work = request_work(lengths)
    typical = lengths.block_squared_seconds / measured
    share = share_per_replica(usable_blocks, typical, ROOM_SIGMAS)
    alone = measured * min(1.0, model.time_alone_per_token_seconds(work) / tpot)
    full = alone + share * model.work_seconds(work, hit_share)
    pace = max(full / measured, share / usable_blocks)
    return replace(
        lengths,
        block_seconds=pace * measured,
        block_squared_seconds=pace * lengths.block_squared_seconds,
        time_per_output_token_seconds=pace * tpot,
    )
