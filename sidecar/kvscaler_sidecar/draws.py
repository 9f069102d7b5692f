"""Random numbers as a pure function of (seed, index of the generated token), never of a state.

So a request that is preempted and recomputed, or moved to another batch, draws the same again.
"""

import hashlib
import secrets

from kvscaler_sidecar.executors.seam import SamplingParams


def seed_of(params: SamplingParams) -> int:
    """The request's seed, or a fresh one if it gave none."""
    return secrets.randbits(63) if params.seed is None else params.seed


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that draw `index` of `seed` uses, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
