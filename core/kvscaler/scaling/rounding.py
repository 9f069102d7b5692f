"""From a fractional need to a whole number of replicas."""

import math

SLACK = 1e-9
"""So that a need of exactly 3 is 3 whatever the order in which floats were added."""
MOST = 1_000_000
"""Stands for any number that is larger than every maximum."""


def replicas_for(needed: float) -> int:
    """Whole replicas that cover `needed`."""
    if needed >= MOST:
        return MOST
    return max(0, math.ceil(needed - SLACK))
