"""Sizes of a model that counting its weights needs."""

from dataclasses import dataclass

from kvscaler.models.kinds import Counts


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes that counting needs, as already read and checked."""

    model_type: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    counts: Counts
