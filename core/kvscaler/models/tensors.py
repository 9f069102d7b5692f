"""The weights of a model as a few kinds of tensors: what each stores, quantizes and shards alike.

Counting by kind instead of by total makes weight bytes right per rank and per quantization: checkpoints
quantize linear layers but rarely embeddings, heads, norms and routers, and tensor parallelism
replicates norms, latent projections and surplus KV heads.
"""

from dataclasses import dataclass
from enum import StrEnum


class Shard(StrEnum):
    """How tensor parallelism divides a kind of weights."""

    TENSOR = "tensor"
    KV_HEADS = "kv heads"
    VOCABULARY = "vocabulary"
    EXPERTS = "experts"
    REPLICATED = "replicated"


class Stage(StrEnum):
    """Which pipeline stage holds a kind of weights."""

    LAYERS = "layers"
    FIRST = "first"
    LAST = "last"


FEED_FORWARD = ("feed-forward", "feed-forward output")
"""Kinds of the feed-forward of layers without experts."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """`elements` over all layers; `path` is a module name as checkpoints and ignore lists write it."""

    name: str
    elements: int
    path: str
    shard: Shard = Shard.TENSOR
    linear: bool = True
    """A matrix that quantization can reach; norms, biases, embeddings and recurrences are not."""
    stage: Stage = Stage.LAYERS
    tied_head: bool = False

    def rank_elements(self, tensor_parallel: int, kv_heads: int, vocab_size: int) -> int:
        """Elements on one rank. Vocabularies are padded to a multiple of 64 before they are divided
        (vLLM `model_executor/layers/vocab_parallel_embedding.py`; SGLang the same)."""
        match self.shard:
            case Shard.REPLICATED:
                return self.elements
            case Shard.KV_HEADS:
                return -(-self.elements // min(tensor_parallel, max(1, kv_heads)))
            case Shard.VOCABULARY:
                padded = -(-vocab_size // 64) * 64
                width = self.elements // vocab_size
                return -(-padded // tensor_parallel) * width
        return -(-self.elements // tensor_parallel)
