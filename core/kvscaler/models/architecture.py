"""What of a model's architecture decides its memory: layers, KV heads, widths, parameters.

Facts keep the names of a Hugging Face `config.json`, because that is what users, catalogues and
replicas all have. An architecture that is not understood is refused with the fields that are
missing or strange: a guessed KV size ends in an out-of-memory hours later.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from kvscaler.models.dtypes import canonical_dtype, dtype_bytes
from kvscaler.models.errors import ModelNotUnderstood

Scalar = int | float | str | bool | None


class LayerKind(StrEnum):
    """How a layer keeps state. Only full attention is computed with so far."""

    FULL = "full"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one layout of keys and values."""

    kind: LayerKind
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values that one token adds over all layers of the group."""
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * element_bytes


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """Facts of a dense decoder with grouped-query attention (GQA, MQA or MHA).

    `parameters` counts what is stored once: tied embeddings once, untied twice.
    """

    model_type: str
    groups: tuple[LayerGroup, ...]
    hidden_size: int
    intermediate_size: int
    attention_heads: int
    vocab_size: int
    max_context_tokens: int
    parameters: int
    tied_embeddings: bool
    native_dtype: str
    facts: Mapping[str, Scalar]
    """The configuration fields that this was made from, by their own names."""

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(group.layers for group in self.groups)

    @property
    def kv_heads(self) -> int:
        """KV heads of the first group (all groups are alike for uniform attention)."""
        return self.groups[0].kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a key in the first group."""
        return self.groups[0].key_dim

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """`sum over groups of layers * kv_heads * (key_dim + value_dim) * bytes`, one rank.

        Source: the GQA line of every engine's start-up log (`2 * L * kv_heads * head_dim * bytes`).
        """
        element = dtype_bytes(kv_dtype)
        return sum(group.kv_bytes_per_token(element) for group in self.groups)

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all parameters stored in `dtype`."""
        return self.parameters * dtype_bytes(dtype)

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of SHA-256 over the canonical JSON of the facts."""
        canonical = json.dumps(dict(self.facts), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a `config.json` (as a mapping).

        Raises `ModelNotUnderstood` naming every field that is missing, of a wrong type, or that
        changes the memory in a way that is not computed yet.
        """
        return cls(**_parse(config))


_UNDERSTOOD: dict[str, str] = {
    "llama": "no biases unless attention_bias or mlp_bias says so",
    "mistral": "as llama; a sliding window is refused",
    "qwen2": "biases on q, k and v",
    "qwen3": "RMS norms on q and k heads",
}
"""Model types whose parameter count is computed here, with what sets them apart."""

_CHANGES_MEMORY = (
    "kv_lora_rank", "num_experts", "num_local_experts", "n_routed_experts", "layer_types",
    "mamba_d_state", "cross_attention_layers", "vision_config", "linear_num_key_heads",
)  # fmt: skip
"""Fields of other architectures: present and not null, they make plain GQA math wrong."""


def _parse(config: Mapping[str, Any]) -> dict[str, Any]:
    problems: list[str] = []

    def integer(name: str, default: int | None = None) -> int:
        value = config.get(name)
        if value is None:
            if default is None:
                problems.append(f"{name} is missing")
                return 1
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"{name} is {value!r}, not a positive whole number")
            return 1
        return value

    model_type = str(config.get("model_type") or "")
    if model_type not in _UNDERSTOOD:
        known = ", ".join(sorted(_UNDERSTOOD))
        problems.append(f"model_type {model_type or 'is missing'!r} is not one of {known}")
    uniform = {"full_attention"}
    for name in _CHANGES_MEMORY:
        value = config.get(name)
        if name == "layer_types" and value and set(value) <= uniform:
            continue
        if value:
            problems.append(f"{name} means memory that is not computed yet")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        problems.append(f"sliding_window {config['sliding_window']!r} is not computed yet")
    if config.get("quantization_config"):
        problems.append("quantization_config means weight sizes that are not computed yet")

    hidden = integer("hidden_size")
    heads = integer("num_attention_heads")
    head_dim = integer("head_dim", default=max(1, hidden // heads))
    layers = integer("num_hidden_layers")
    kv_heads = integer("num_key_value_heads", default=heads)
    vocab = integer("vocab_size")
    inner = integer("intermediate_size")
    context = integer("max_position_embeddings")
    if heads % kv_heads:
        problems.append(f"num_attention_heads {heads} is no multiple of key-value heads {kv_heads}")
    try:
        dtype = canonical_dtype(str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"))
    except ModelNotUnderstood as error:
        problems.append(str(error))
        dtype = "bfloat16"
    if problems:
        raise ModelNotUnderstood(
            f"architecture not understood: {'; '.join(problems)}. "
            "Give facts of a supported architecture in spec.model.architecture, or use a "
            "supported model."
        )

    tied = bool(config.get("tie_word_embeddings", model_type != "llama"))
    qkv_bias = model_type == "qwen2" or bool(config.get("attention_bias"))
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    attention = hidden * (q_width + 2 * kv_width) + q_width * hidden
    attention += (q_width + 2 * kv_width) if qkv_bias else 0
    attention += hidden if config.get("attention_bias") else 0
    attention += 2 * head_dim if model_type == "qwen3" else 0
    mlp = 3 * hidden * inner + ((2 * inner + hidden) if config.get("mlp_bias") else 0)
    parameters = layers * (attention + mlp + 2 * hidden) + hidden
    parameters += vocab * hidden * (1 if tied else 2)

    facts: dict[str, Scalar] = {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "torch_dtype": dtype,
    }
    group = LayerGroup(LayerKind.FULL, layers, kv_heads, head_dim, head_dim)
    return {
        "model_type": model_type,
        "groups": (group,),
        "hidden_size": hidden,
        "intermediate_size": inner,
        "attention_heads": heads,
        "vocab_size": vocab,
        "max_context_tokens": context,
        "parameters": parameters,
        "tied_embeddings": tied,
        "native_dtype": dtype,
        "facts": facts,
    }
