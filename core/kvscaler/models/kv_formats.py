"""How the keys and values of one head lie in a cache, by the names that engines give the formats.

A format is bytes per element plus bytes per head and token for scales. Sources: vLLM
`v1/kv_cache_interface.py` and `v1/attention/backends/` (`*_per_token_head`: one fp32 scale for keys
and one for values; nvfp4: half a byte and one fp8 scale per 16; `fp8_ds_mla` 656 bytes a token),
llama.cpp `ggml/src/ggml-common.h` (blocks of 32 with a 16-bit scale, and a minimum in the `_1` types).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvscaler.models.dtypes import DTYPE_BYTES, canonical_dtype
from kvscaler.models.errors import ModelNotUnderstood
from kvscaler.models.layers import LayerGroup, LayerKind


@dataclass(frozen=True, slots=True)
class KVFormat:
    """`element_bytes` of a key or value element, `scale_bytes` beside each key and each value."""

    name: str
    element_bytes: float
    scale_bytes: int = 0
    latent_bytes: int | None = None
    """MLA: bytes of one token's whole latent vector, where the format fixes them."""


_FORMATS: Mapping[str, KVFormat] = {
    **{name: KVFormat(name, float(size)) for name, size in DTYPE_BYTES.items()},
    "int8_per_token_head": KVFormat("int8_per_token_head", 1.0, 4),
    "fp8_per_token_head": KVFormat("fp8_per_token_head", 1.0, 4),
    "int4_per_token_head": KVFormat("int4_per_token_head", 0.5, 4),
    "nvfp4": KVFormat("nvfp4", 0.5 + 1 / 16),
    "fp8_ds_mla": KVFormat("fp8_ds_mla", 1.0, 0, 656),
    "q8_0": KVFormat("q8_0", 34 / 32),
    "q5_1": KVFormat("q5_1", 24 / 32),
    "q5_0": KVFormat("q5_0", 22 / 32),
    "q4_1": KVFormat("q4_1", 20 / 32),
    "q4_0": KVFormat("q4_0", 18 / 32),
    "iq4_nl": KVFormat("iq4_nl", 18 / 32),
}

INDEX_KEY_SCALE_BYTES = 4
"""A sparse-attention index key is stored in fp8 with one fp32 scale (128 + 4 = 132 bytes)."""


def kv_format(name: str) -> KVFormat:
    """The format called `name`. Raises `ModelNotUnderstood` with the names that are known."""
    short = name.strip().lower().removeprefix("torch.").replace("-", "_")
    if short in _FORMATS:
        return _FORMATS[short]
    try:
        return _FORMATS[canonical_dtype(short)]
    except ModelNotUnderstood:
        raise ModelNotUnderstood(
            f"KV cache type {name[:40]!r} is not known; known are {', '.join(sorted(_FORMATS))}"
        ) from None


def layer_token_bytes(group: LayerGroup, form: KVFormat, tensor_parallel: int = 1) -> float:
    """Bytes that one token adds in one layer of `group` on one rank.

    `kv_heads / tp` heads (at least one: heads replicate beyond), keys and values each with their
    scales. MLA: one latent vector on every rank. Recurrent layers: 0.
    """
    if group.kind is LayerKind.RECURRENT:
        return 0.0
    if group.kind is LayerKind.MLA:
        if form.latent_bytes is not None:
            return form.latent_bytes / group.tokens_per_state
        return (group.key_dim * form.element_bytes + form.scale_bytes) / group.tokens_per_state
    heads = group.rank_kv_heads(tensor_parallel)
    sides = 2 if group.value_dim else 1
    return heads * (
        (group.key_dim + group.value_dim) * form.element_bytes + sides * form.scale_bytes
    )


def index_token_bytes(group: LayerGroup) -> int:
    """Bytes of one layer's sparse-attention index key per token, on every rank."""
    return group.index_dim + INDEX_KEY_SCALE_BYTES if group.index_dim else 0


def state_bytes(
    group: LayerGroup, element_bytes: int, tensor_parallel: int = 1, speculative_tokens: int = 0
) -> int:
    """Bytes of one recurrent layer's state for one sequence on one rank.

    `conv_channels / tp * (kernel - 1 + speculative) * element + ssm / tp * its own element`.
    """
    state = group.state
    if state is None:
        return 0
    ranks = min(tensor_parallel, max(1, state.heads))
    window = state.conv_kernel - 1 + (speculative_tokens if state.conv_channels else 0)
    conv = -(-state.conv_channels // ranks) * window * element_bytes
    ssm_element = (
        element_bytes
        if state.ssm_dtype == "auto"
        else DTYPE_BYTES[canonical_dtype(state.ssm_dtype)]
    )
    return conv + -(-state.ssm_elements // ranks) * ssm_element
