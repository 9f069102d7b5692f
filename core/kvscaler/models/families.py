"""What sets one model family apart from another, as far as memory is concerned.

A family says what a `config.json` leaves to code: biases, norms, gated or plain feed-forward, which
layers are windowed, and the defaults of fields that a file may omit because they equal the default
of its configuration class in transformers (`src/transformers/models/<family>/configuration_*.py`,
which is the source of every default here).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Windows(StrEnum):
    """Which layers a family's `sliding_window` is for."""

    IGNORED = "ignored"
    ALL = "all"
    FROM_LAYER = "from layer"
    """Layers from `max_window_layers` on, and only with `use_sliding_window` (Qwen)."""
    PERIOD = "period"
    """All but each `sliding_window_pattern`-th layer (Gemma, Cohere 2, gpt-oss)."""
    LISTED = "listed"
    """Only as `layer_types` lists them; a window without the list is not understood."""


@dataclass(frozen=True, slots=True)
class Family:
    """Structure that a configuration does not spell out. Widths are in elements."""

    gated: bool = True
    tied: bool = False
    norms: int = 2
    """Norms of hidden size in a layer."""
    norm_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """RMS norms on query and key heads."""
    output_gate: bool = False
    """The query projection is twice as wide (a gate on attention's output)."""
    windows: Windows = Windows.IGNORED
    router_bias: bool = False
    shared_gate: bool = False
    experts: bool = False
    """Some members have experts; in any other family a number of experts is strange."""
    latent: bool = False
    """Keys and values are compressed to a latent vector (MLA)."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


_LLAMA = Family()
_QWEN2 = Family(qkv_bias=True, windows=Windows.FROM_LAYER)
_QWEN3 = Family(head_norms=True, windows=Windows.FROM_LAYER)
_QWEN3_NEXT = Family(
    experts=True,
    head_norms=True,
    output_gate=True,
    shared_gate=True,
    windows=Windows.LISTED,
    defaults={
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 512,
        "partial_rotary_factor": 0.25,
    },
)
_GEMMA = Family(tied=True)
_GEMMA3 = Family(
    tied=True,
    norms=4,
    head_norms=True,
    windows=Windows.PERIOD,
    defaults={
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
_GEMMA4 = replace(
    _GEMMA3, experts=True, windows=Windows.LISTED, defaults={"max_position_embeddings": 131072}
)
_DEEPSEEK = Family(
    experts=True, latent=True, defaults={"first_k_dense_replace": 0, "moe_layer_freq": 1}
)
_PLAIN_NORM = Family(gated=False, norm_bias=True, tied=True)
_GRANITE_HYBRID = Family(tied=True, experts=True)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "llava": _LLAMA,
    "internlm2": _LLAMA,
    "yi": _LLAMA,
    "baichuan": _LLAMA,
    "seed_oss": Family(qkv_bias=True),
    "smollm3": Family(tied=True),
    "granite": _LLAMA,
    "granitemoe": Family(experts=True),
    "mistral": Family(windows=Windows.ALL),
    "mistral3": Family(windows=Windows.ALL),
    "ministral": Family(windows=Windows.ALL),
    "mixtral": Family(experts=True, windows=Windows.ALL),
    "olmo2": Family(norms=2, head_norms=True),
    "mllama_text_model": Family(defaults={"cross_attention_tokens": 6404}),
    "llama4_text": Family(
        experts=True, defaults={"intermediate_size_mlp": 16384, "no_rope_layer_interval": 4}
    ),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(
        _QWEN2, experts=True, shared_gate=True, defaults={"decoder_sparse_step": 1}
    ),
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": replace(_QWEN3, experts=True, defaults={"decoder_sparse_step": 1}),
    "qwen3_vl_text": _QWEN3,
    "qwen3_vl_moe_text": replace(_QWEN3, experts=True, defaults={"decoder_sparse_step": 1}),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_NEXT,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA3,
        head_norms=False,
        defaults={"sliding_window_pattern": 2, "sliding_window": 4096},
    ),
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "phi": Family(
        gated=False, norms=1, norm_bias=True, qkv_bias=True, output_bias=True, mlp_bias=True
    ),
    "phi3": Family(windows=Windows.ALL),
    "phi3small": Family(
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=True,
        defaults={"ff_intermediate_size": 14336, "num_key_value_heads": 8},
    ),
    "phimoe": Family(
        experts=True, norm_bias=True, qkv_bias=True, output_bias=True, windows=Windows.ALL
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "kimi_linear": Family(experts=True, latent=True, defaults={"kda_conv_kernel": 4}),
    "glm_moe_dsa": _DEEPSEEK,
    "minicpm3": Family(tied=True, latent=True, defaults={"v_head_dim": 64}),
    "mistral4": _DEEPSEEK,
    "glm4": Family(norms=4, qkv_bias=True),
    "glm4_moe": Family(
        experts=True, qkv_bias=True, head_norms=True, defaults={"first_k_dense_replace": 1}
    ),
    "gpt_oss": Family(
        experts=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        router_bias=True,
        windows=Windows.PERIOD,
        defaults={"sliding_window_pattern": 2, "torch_dtype": "bfloat16"},
    ),
    "mimo_v2_flash": Family(
        experts=True, windows=Windows.LISTED, defaults={"first_k_dense_replace": 1}
    ),
    "minimax_m2": Family(experts=True, head_norms=True),
    "minimax_m3": Family(experts=True, head_norms=True),
    "nemotron-nas": _LLAMA,
    "cohere": Family(tied=True, norms=1),
    "cohere2": Family(
        tied=True, norms=1, windows=Windows.PERIOD, defaults={"sliding_window_pattern": 4}
    ),
    "falcon": replace(_PLAIN_NORM, defaults={"multi_query": True}),
    "mpt": _PLAIN_NORM,
    "gpt_bigcode": Family(
        gated=False,
        norm_bias=True,
        tied=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        defaults={"multi_query": True},
    ),
    "starcoder2": Family(
        gated=False,
        norm_bias=True,
        tied=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        windows=Windows.ALL,
    ),
    "jamba": Family(
        experts=True,
        defaults={
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
    ),
    "bamba": _GRANITE_HYBRID,
    "granitemoehybrid": _GRANITE_HYBRID,
    "falcon_h1": Family(),
    "nemotron_h": Family(
        experts=True,
        gated=False,
        norms=1,
        defaults={"mamba_ssm_dtype": "float32", "conv_kernel": 4, "n_groups": 8},
    ),
}
"""Model types (of the text model) whose memory is computed here."""

ALIASES: Mapping[str, str] = {
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mllama": "mllama_text_model",
    "llava_llama": "llava",
    "kimi_k25": "kimi_k2",
    "kimi_vl": "deepseek_v3",
    "deepseek_v3_2": "deepseek_v32",
    "mimo": "qwen2",
    "minimax_m3_vl": "minimax_m3",
    "pixtral": "mistral",
    "refinedwebmodel": "falcon",
    "refinedweb": "falcon",
    "phi4": "phi3",
    "command-r": "cohere",
    "internlm3": "llama",
}
"""Other names of the same families, and of the wrappers around their text models."""


def canonical_type(model_type: str) -> str:
    """The family's own name for `model_type`."""
    return ALIASES.get(model_type.lower(), model_type)
