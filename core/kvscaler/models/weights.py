"""Weight bytes: of the whole model, and on the fullest rank of a tensor and pipeline group."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvscaler.models.dtypes import dtype_bytes
from kvscaler.models.quantization import Quantization, skipped
from kvscaler.models.tensors import Shard, Stage, TensorKind


@dataclass(frozen=True, slots=True)
class Split:
    """How a model is divided: `attention` is smaller than `tensor` under data-parallel attention."""

    tensor: int = 1
    pipeline: int = 1
    attention: int | None = None
    kv_heads: int = 1
    vocab_size: int = 1
    experts: int | None = None
    """Ranks that share the experts, where they are more than `tensor` (data-parallel attention)."""


def kind_bytes_per_element(
    kind: TensorKind, quantization: Quantization | None, element_bytes: int
) -> float:
    """Bytes of one element of `kind` as it lies in device memory.

    Embeddings, heads, routers and vision towers stay in 16 bits in every common checkpoint; other
    matrices follow the scheme unless it lists them as skipped. Prediction layers are quantized along
    in fp8 checkpoints only.
    """
    if quantization is None:
        return float(element_bytes)
    if quantization.whole_file:
        return quantization.bytes_per_weight
    if not kind.linear or kind.name in ("head", "vision"):
        return float(element_bytes)
    if kind.name == "draft" and quantization.name != "fp8":
        return float(element_bytes)
    if skipped(kind.path, quantization.skips):
        return float(element_bytes)
    if quantization.experts_only and kind.name != "experts":
        other = quantization.other_bytes
        return float(element_bytes) if other is None else other
    if quantization.other_bytes is not None and kind.name not in _FEED_FORWARD:
        return quantization.other_bytes
    return quantization.bytes_per_weight


_FEED_FORWARD = ("feed-forward", "experts", "shared experts")


def total_bytes(kinds: Iterable[TensorKind], quantization: Quantization | None, dtype: str) -> int:
    """Bytes of all weights on one device."""
    element = dtype_bytes(dtype)
    return sum(
        round(kind.elements * kind_bytes_per_element(kind, quantization, element)) for kind in kinds
    )


def rank_bytes(
    kinds: Iterable[TensorKind],
    quantization: Quantization | None,
    dtype: str,
    split: Split,
) -> int:
    """Bytes on the fullest rank.

    Pipeline stages share the layers evenly, the first also holds the embeddings, the last the
    head (vLLM `distributed/utils.py`, `get_pp_indices`).
    """
    element = dtype_bytes(dtype)
    attention = split.attention or split.tensor
    stages = dict.fromkeys(Stage, 0.0)
    for kind in kinds:
        tensor = split.tensor
        if kind.shard in (Shard.KV_HEADS,) or kind.name in ("query", "attention output"):
            tensor = attention
        elif kind.shard is Shard.EXPERTS:
            tensor = split.experts or split.tensor
        elements = kind.rank_elements(tensor, split.kv_heads, split.vocab_size)
        size = elements * kind_bytes_per_element(kind, quantization, element)
        stages[kind.stage] += size
        if kind.tied_head and split.pipeline > 1:
            stages[Stage.LAST] += size
    if split.pipeline == 1:
        return round(sum(stages.values()))
    ends = max(stages[Stage.FIRST], stages[Stage.LAST])
    return round(stages[Stage.LAYERS] / split.pipeline + ends)
