"""Weight bytes: of the whole model, and on the fullest rank of a tensor and pipeline group."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvscaler.models.dtypes import dtype_bytes
from kvscaler.models.quantization import Quantization
from kvscaler.models.tensors import FEED_FORWARD, Shard, Stage, TensorKind


@dataclass(frozen=True, slots=True)
class Split:
    """Among how many ranks each part of a model is divided; what is `None` is divided by `tensor`."""

    tensor: int = 1
    pipeline: int = 1
    attention: int | None = None
    """Attention: fewer ranks than `tensor` where each group of them serves requests of its own."""
    experts: int | None = None
    """Routed experts: more than `tensor` where data-parallel engines share one group of them."""
    shared_experts: int | None = None
    dense: int | None = None
    """Feed-forward of layers without experts."""
    embeddings: int | None = None
    head: int | None = None
    kv_heads: int = 1
    vocab_size: int = 1

    def ranks(self, kind: TensorKind) -> int:
        """Ranks that share `kind`."""
        if kind.shard is Shard.KV_HEADS or kind.name in _ATTENTION:
            return self.attention or self.tensor
        if kind.name in FEED_FORWARD:
            return self.dense or self.tensor
        named = {
            "experts": self.experts,
            "shared experts": self.shared_experts,
            "embeddings": self.embeddings,
            "head": self.head,
        }
        return named.get(kind.name) or self.tensor


_ATTENTION = ("query", "attention output", "latent expansion")


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
    if quantization.leaves(kind.path):
        return float(element_bytes)
    if quantization.experts_only and kind.name != "experts":
        other = quantization.other_bytes
        return float(element_bytes) if other is None else other
    return quantization.bytes_per_weight


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
    stages = dict.fromkeys(Stage, 0.0)
    for kind in kinds:
        elements = kind.rank_elements(split.ranks(kind), split.kv_heads, split.vocab_size)
        size = elements * kind_bytes_per_element(kind, quantization, element)
        stages[kind.stage] += size
        if kind.tied_head and split.pipeline > 1:
            stages[Stage.LAST] += size
    if split.pipeline == 1:
        return round(sum(stages.values()))
    ends = max(stages[Stage.FIRST], stages[Stage.LAST])
    return round(stages[Stage.LAYERS] / split.pipeline + ends)
