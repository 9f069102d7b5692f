"""Architectures from facts that a person states, where no configuration can be read."""

from collections.abc import Mapping, Sequence

from kvscaler.models.architecture import ModelArchitecture, Scalar
from kvscaler.models.dtypes import dtype_bytes
from kvscaler.models.errors import ModelNotUnderstood
from kvscaler.models.layers import LayerGroup, LayerKind, RecurrentState
from kvscaler.models.tensors import TensorKind

INLINE_DTYPE = "bfloat16"
"""Element type in which inline facts count their weights."""


def inline_group(
    kind: LayerKind,
    layers: int,
    *,
    kv_heads: int = 0,
    key_dim: int = 0,
    value_dim: int = 0,
    window_tokens: int | None = None,
    state_bytes: int | None = None,
) -> LayerGroup:
    """Layers as stated; a recurrent state counts in bytes of one sequence and layer."""
    state = None
    if kind is LayerKind.RECURRENT:
        if not state_bytes:
            raise ModelNotUnderstood("layers of kind Recurrent need state")
        state = RecurrentState(0, 1, -(-state_bytes // 4), "float32", heads=1)
    return LayerGroup(kind, layers, kv_heads, key_dim, value_dim, window_tokens, state=state)


def inline_architecture(
    groups: Sequence[LayerGroup],
    *,
    weights_bytes: int,
    hidden_size: int,
    intermediate_size: int,
    attention_heads: int,
    vocab_size: int,
    max_context_tokens: int,
    facts: Mapping[str, Scalar],
) -> ModelArchitecture:
    """A model of `weights_bytes` as they are loaded, whose layers keep what `groups` say."""
    elements = -(-weights_bytes // dtype_bytes(INLINE_DTYPE))
    return ModelArchitecture(
        model_type="inline",
        groups=tuple(groups),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        attention_heads=attention_heads,
        vocab_size=vocab_size,
        max_context_tokens=max_context_tokens,
        tensors=(TensorKind("weights", elements, "model"),),
        tied_embeddings=False,
        native_dtype=INLINE_DTYPE,
        facts=facts,
    )
