"""How layers keep the past of a sequence: the one thing that decides the size of a KV cache.

Five kinds cover the architectures that engines serve. All sizes count elements of one layer before
tensor parallelism; how an engine lays them out in pages is the business of its profile.
"""

from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """How a layer keeps state; the names are those of the API, in small letters."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "mla"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The fixed state of one recurrent layer, in elements before tensor parallelism.

    A causal convolution keeps its last `conv_kernel - 1` inputs of `conv_channels` (and one more
    for each speculative token), the recurrence `ssm_elements`. Sources: vLLM
    `model_executor/layers/mamba/mamba_utils.py`, state shapes of Mamba1, Mamba2 and gated DeltaNet.
    """

    conv_channels: int
    conv_kernel: int
    ssm_elements: int
    ssm_dtype: str = "float32"
    heads: int = 1
    """Heads that tensor parallelism divides; it can't be larger than this."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one layout of keys and values.

    MLA keeps one latent vector of `key_dim` (`kv_lora_rank + qk_rope_head_dim`) elements per token,
    whatever the number of heads: `kv_heads` is 1 and `value_dim` 0.
    """

    kind: LayerKind
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int | None = None
    """Tokens that a sliding window or an attention chunk reaches."""
    rope_dim: int = 0
    """MLA: the part of `key_dim` that carries positions, which quantized layouts leave in 16 bits."""
    index_dim: int = 0
    """Elements of the sparse-attention index key per token, on `index_layers` of the layers."""
    index_layers: int = 0
    tokens_per_state: int = 1
    """Tokens that one stored latent vector stands for, where they are compressed (DeepSeek V4)."""
    state: RecurrentState | None = None

    def rank_kv_heads(self, tensor_parallel: int) -> int:
        """KV heads on one rank: divided, and replicated where there are fewer than ranks."""
        if self.kind is LayerKind.MLA:
            return 1
        return max(1, -(-self.kv_heads // tensor_parallel))
