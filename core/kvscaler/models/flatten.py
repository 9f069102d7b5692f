"""From a `config.json` as found to flat facts: scalars only, the same again when read twice.

Wrappers around a text model (`text_config` and its kin) are opened, lists with an entry per layer
become runs, a quantization block its scheme's name. What the parser does not use is dropped, so that
facts stay small enough for a status field.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvscaler.models.errors import ModelNotUnderstood
from kvscaler.models.families import canonical_type
from kvscaler.models.fields import Fields
from kvscaler.models.quantization import Quantization, parse_config, parse_name
from kvscaler.models.runs import MAX_LAYERS, read_runs, write_runs
from kvscaler.models.vision import vision_parameters

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "text_model")
_DEEPEST = 4
_INHERITED = ("quantization_config", "vision_config", "audio_config", "tie_word_embeddings")
_RUNS = ("layer_types", "layers_block_type", "indexer_types", "compress_ratios",
         "layer_types_counts", "indexer_types_counts", "compress_ratios_counts")  # fmt: skip
_SCALARS = (
    "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern",
    "attention_chunk_size", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
    "v_head_dim", "index_head_dim", "index_n_heads", "index_topk", "global_head_dim",
    "num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers",
    "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "num_experts",
    "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts",
    "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp",
    "moe_shared_expert_intermediate_size", "moe_latent_size", "first_k_dense_replace",
    "interleave_moe_layer_step", "decoder_sparse_step", "expert_layer_period",
    "expert_layer_offset", "attn_layer_period", "attn_layer_offset", "full_attention_interval",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "mamba_ssm_dtype", "mamba_num_heads",
    "mamba_n_heads", "mamba_head_dim", "mamba_d_head", "ssm_state_size", "mamba_d_state",
    "mamba_d_conv", "mamba_expand", "mamba_dt_rank", "conv_kernel", "n_groups", "mamba_n_groups",
    "hybrid_override_pattern", "num_nextn_predict_layers", "mtp_num_hidden_layers",
    "partial_rotary_factor", "enable_moe_block", "use_qk_norm", "o_lora_rank", "o_groups",
    "vision_parameters", "cross_attention_layers_count", "quantization", "quantization_skips",
    "adapters_parameters", "weights_bytes", "num_experts_per_token", "num_shared_experts",
    "mla_use_nope", "kda_num_heads", "kda_head_dim", "kda_conv_kernel",
)  # fmt: skip


def text_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the text model's fields on top, wrapper fields that still matter kept.

    Raises `ModelNotUnderstood` for what is no object, and for wrappers that go round in a circle.
    """
    if not isinstance(config, Mapping):
        raise ModelNotUnderstood(
            f"a configuration is a JSON object, this is a {type(config).__name__}"
        )
    merged: dict[str, Any] = {}
    current: Mapping[str, Any] = config
    for _ in range(_DEEPEST):
        inner = next(
            (current[name] for name in _TEXT if isinstance(current.get(name), Mapping)), None
        )
        if inner is None:
            return {**merged, **current}
        for name in _INHERITED:
            if current.get(name) is not None:
                merged[name] = current[name]
        outer = {k: v for k, v in current.items() if k not in _TEXT and v is not None}
        merged = {**outer, **merged}
        current = inner
    raise ModelNotUnderstood(
        f"text_config is nested more than {_DEEPEST - 1} deep, or goes round in a circle"
    )


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """The scheme of the checkpoint, `None` for weights in their own type."""
    named = config.get("quantization")
    if isinstance(named, str) and named:
        scheme = parse_name(named)
        skips = config.get("quantization_skips")
        if isinstance(skips, str) and skips:
            return replace(scheme, skips=tuple(skips.split(";")))
        return scheme
    block = config.get("quantization_config")
    if not block:
        return None
    if not isinstance(block, Mapping):
        raise ModelNotUnderstood(f"quantization_config is a {type(block).__name__}, not an object")
    scheme = parse_config(block)
    if config.get("expert_dtype") == "fp4" and scheme.name == "fp8":
        return replace(parse_name("mxfp4-mixed"), skips=scheme.skips)
    return scheme


def extra_facts(
    config: Mapping[str, Any], fields: Fields, quantization: Quantization | None
) -> dict[str, Any]:
    """Facts beyond those of a plain decoder, as flat scalars."""
    facts: dict[str, Any] = {
        name: config[name]
        for name in _SCALARS
        if config.get(name) is not None and isinstance(config[name], (int, float, str, bool))
    }
    for name in _RUNS:
        value = config.get(name)
        if value:
            try:
                facts[name.removesuffix("_counts")] = write_runs(read_runs(value))
            except ValueError as error:
                fields.problems.append(f"{name}: {error}")
    cross = config.get("cross_attention_layers")
    if isinstance(cross, list):
        facts["cross_attention_layers_count"] = len(cross)
    if vision := vision_parameters(fields):
        facts["vision_parameters"] = vision
    if quantization is not None:
        facts["quantization"] = quantization.name
        if quantization.skips:
            facts["quantization_skips"] = ";".join(quantization.skips)[:3000]
    for name in ("block_kv_heads", "block_intermediate"):
        if isinstance(config.get(name), str):
            facts[name] = config[name]
    return facts


def listed_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers that a configuration lists under another name, and their number if only listed."""
    facts: dict[str, Any] = {}
    pattern = config.get("hybrid_layer_pattern")  # MiMo: 1 a windowed layer, 0 a full one
    if isinstance(pattern, list) and not config.get("layer_types"):
        names = {0: "full_attention", 1: "sliding_attention"}
        facts["layer_types"] = [
            names.get(item, "unknown") if isinstance(item, int) else "unknown" for item in pattern
        ]
    facts |= _delta_attention(config)
    for name in ("layer_types", "layers_block_type"):
        kinds = config.get(name)
        if isinstance(kinds, list) and config.get("num_hidden_layers") is None:
            facts["num_hidden_layers"] = len(kinds)
    return facts


def _delta_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Kimi Linear: `linear_attn_config` lists by number, from 1 on, which layers are of which kind."""
    block = config.get("linear_attn_config")
    if not isinstance(block, Mapping):
        return {}
    facts = {
        ours: block[theirs]
        for ours, theirs in (
            ("kda_num_heads", "num_heads"),
            ("kda_head_dim", "head_dim"),
            ("kda_conv_kernel", "short_conv_kernel_size"),
        )
        if theirs in block
    }
    layers = config.get("num_hidden_layers")
    named = {"full_attention": block.get("full_attn_layers"), "kda": block.get("kda_layers")}
    if isinstance(layers, int) and 0 < layers <= MAX_LAYERS and not config.get("layer_types"):
        kinds = dict.fromkeys(range(1, layers + 1), "unknown")
        for kind, numbers in named.items():
            if isinstance(numbers, list):
                kinds |= {n: kind for n in numbers[:MAX_LAYERS] if n in kinds}
        facts["layer_types"] = list(kinds.values())
    return facts


def block_facts(config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Nemotron-NAS: each layer has its own KV heads and feed-forward width, or none."""
    blocks = config.get("block_configs")
    if not isinstance(blocks, list):
        return {}
    heads = config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    kv_heads: list[int] = []
    inners: list[int] = []
    try:
        if not isinstance(heads, int) or not isinstance(hidden, int):
            raise TypeError("num_attention_heads and hidden_size are needed")
        for block in blocks[:10_000]:
            attention, forward = block["attention"], block["ffn"]
            gone = attention.get("no_op") or attention.get("replace_with_linear")
            kv_heads.append(0 if gone else heads // int(attention["n_heads_in_group"]))
            multiplier = forward.get("ffn_mult")
            width = 0 if forward.get("no_op") else int(2 * float(multiplier or 0) * hidden / 3)
            inners.append(-(-width // 256) * 256)
    except (TypeError, KeyError, ValueError, AttributeError, ZeroDivisionError) as error:
        problems.append(f"block_configs can't be read: {error!s:.80}")
        return {}
    return {
        "num_key_value_heads": max(kv_heads, default=1) or 1,
        "intermediate_size": max(inners, default=1) or 1,
        "block_kv_heads": write_runs(read_runs(kv_heads)),
        "block_intermediate": write_runs(read_runs(inners)),
    }


def family_name(config: Mapping[str, Any]) -> str:
    """The family of the text model: its `model_type`, or what its class name says."""
    name = config.get("model_type")
    return canonical_type(name) if isinstance(name, str) else ""
