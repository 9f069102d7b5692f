"""From a configuration to a `ModelArchitecture`: one pass that gathers all that is wrong with it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvscaler.models.dtypes import canonical_dtype
from kvscaler.models.errors import ModelNotUnderstood
from kvscaler.models.families import FAMILIES, Family, Windows
from kvscaler.models.fields import Fields, shown
from kvscaler.models.flatten import (
    block_facts,
    extra_facts,
    family_name,
    listed_facts,
    quantization_of,
    text_model,
)
from kvscaler.models.kinds import Counts, groups_of, layer_counts
from kvscaler.models.layers import LayerGroup, LayerKind, RecurrentState
from kvscaler.models.parameters import sparse_layers, tensor_kinds
from kvscaler.models.quantization import Quantization
from kvscaler.models.shapes import Shapes
from kvscaler.models.tensors import FEED_FORWARD, Shard, TensorKind


def parse(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `ModelArchitecture`. Raises `ModelNotUnderstood` with all faults at once."""
    text = {**text_model(config), **overrides}
    model_type = family_name(text)
    family = FAMILIES.get(model_type)
    problems: list[str] = []
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        problems.append(f"model_type {shown(model_type or 'is missing')} is not one of {known}")
        family = Family()
    text |= listed_facts(text) | block_facts(text, problems)
    fields = Fields(text, family.defaults)
    fields.problems = problems
    quantization = _quantization(fields, text)
    shapes, native = _shapes(fields, model_type, family)
    _strange(fields, family, shapes)
    groups = _groups(fields, shapes, native)
    tensors = tensor_kinds(fields, family, shapes)
    draft = _draft(fields, tensors, shapes)
    facts = _facts(fields, text, model_type, shapes, native, quantization)
    made = {
        "model_type": model_type,
        "groups": groups,
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.inner,
        "attention_heads": shapes.heads,
        "vocab_size": shapes.vocab,
        "max_context_tokens": facts["max_position_embeddings"],
        "tensors": tensors,
        "tied_embeddings": shapes.tied,
        "native_dtype": native,
        "facts": facts,
        "quantization": quantization,
        "draft": draft,
        "rotary_dim": _rotary_dim(fields, shapes),
        "experts_per_token": fields.integer(
            "num_experts_per_tok", "num_experts_per_token", default=0, least=0
        ),
        "expert_width": fields.integer("moe_intermediate_size", default=shapes.inner),
        "overrides": tuple(sorted(overrides)),
    }
    fields.refuse()
    return made


def _rotary_dim(fields: Fields, shapes: Shapes) -> int:
    """Elements of a head that carry positions; all of them unless a share is stated."""
    if fields.flag("mla_use_nope"):
        return 0
    if latent := fields.optional("qk_rope_head_dim"):
        return latent
    share = fields.get("partial_rotary_factor")
    if share is None:
        return shapes.head_dim
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        fields.problems.append(f"partial_rotary_factor is {shown(share)}, not between 0 and 1")
        return shapes.head_dim
    return int(shapes.head_dim * share)


def _quantization(fields: Fields, text: Mapping[str, Any]) -> Quantization | None:
    try:
        return quantization_of(text)
    except ModelNotUnderstood as error:
        fields.problems.append(str(error))
        return None


def _shapes(fields: Fields, model_type: str, family: Family) -> tuple[Shapes, str]:
    hidden = fields.integer("hidden_size", "n_embd", "d_model")
    heads = fields.integer("num_attention_heads", "n_head", "n_heads")
    layers = fields.integer("num_hidden_layers", "n_layer", "n_layers")
    vocab = fields.integer("vocab_size")
    experts = fields.optional("moe_intermediate_size")
    inner = fields.integer(
        "intermediate_size",
        "n_inner",
        "ffn_hidden_size",
        "ff_intermediate_size",
        default=experts or (None if family.gated else 4 * hidden),
    )
    head_dim = fields.integer("head_dim", default=max(1, hidden // heads))
    kv_heads = _kv_heads(fields, heads)
    if heads % kv_heads:
        fields.problems.append(
            f"num_attention_heads {heads} is no multiple of key-value heads {kv_heads}"
        )
    native = "bfloat16"
    name = fields.text("torch_dtype", "dtype", default="bfloat16")
    try:
        native = canonical_dtype(name)
    except ModelNotUnderstood as error:
        fields.problems.append(str(error))
    tied = fields.flag("tie_word_embeddings", default=family.tied)
    counts = Counts(full=layers)
    if layers > 10_000:
        fields.problems.append(f"num_hidden_layers is {layers}: no model has so many")
    else:
        counts = layer_counts(fields, model_type, family, layers)
    shapes = Shapes(
        model_type, hidden, inner, layers, heads, kv_heads, head_dim, vocab, tied, counts
    )
    return shapes, native


def _kv_heads(fields: Fields, heads: int) -> int:
    stated = fields.optional("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    attention = fields.get("attn_config")
    if stated is None and isinstance(attention, Mapping):
        stated = Fields(attention, {}).optional("kv_n_heads")
    return heads if stated is None else stated


def _strange(fields: Fields, family: Family, shapes: Shapes) -> None:
    """Fields that a family does not have, and that would change what it keeps."""
    window = fields.get("sliding_window")
    if (
        family.windows is Windows.IGNORED
        and shapes.model_type != "deepseek_v4"
        and window
        and fields.flag("use_sliding_window", default=True)
    ):
        fields.problems.append(
            f"sliding_window {shown(window)}: no windowed layers are known of {shapes.model_type}"
        )
    if not family.experts:
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            if fields.has(name) and fields.get(name) != 1:
                fields.problems.append(f"{name}: no experts are known of {shapes.model_type}")
    if fields.has("kv_lora_rank") and not family.latent:
        fields.problems.append(f"kv_lora_rank: no latent attention is known of {shapes.model_type}")
    if fields.has("routed_expert_hidden_size"):
        fields.problems.append("routed_expert_hidden_size: experts of a latent are not computed")
    if shapes.model_type == "nemotron-nas" and not fields.has("block_configs", "block_kv_heads"):
        fields.problems.append("block_configs is missing, which says what each layer keeps")


def _groups(fields: Fields, shapes: Shapes, native: str) -> tuple[LayerGroup, ...]:
    if runs := fields.runs("block_kv_heads"):
        heads = {int(name) for name, _ in runs if name.isdigit() and name != "0"}
        return tuple(
            LayerGroup(
                LayerKind.FULL,
                sum(count for name, count in runs if name == str(number)),
                number,
                shapes.head_dim,
                shapes.head_dim,
            )
            for number in sorted(heads, reverse=True)
        )
    groups = groups_of(
        fields, shapes.counts, shapes.model_type, shapes.kv_heads, shapes.head_dim, native
    )
    cross = fields.optional("cross_attention_layers_count", least=0) or len(
        fields.get("cross_attention_layers") or ()
    )
    if cross and groups:
        groups = _with_cross_attention(fields, groups, cross, shapes, native)
    return groups


def _with_cross_attention(
    fields: Fields, groups: tuple[LayerGroup, ...], cross: int, shapes: Shapes, native: str
) -> tuple[LayerGroup, ...]:
    """Cross attention keeps keys and values of the image only: a fixed state per sequence."""
    tokens = fields.integer("cross_attention_tokens", default=6404)
    elements = tokens * shapes.kv_heads * 2 * shapes.head_dim
    state = RecurrentState(0, 1, elements, native, heads=shapes.kv_heads)
    kept = replace(groups[0], layers=max(1, groups[0].layers - cross))
    return (kept, LayerGroup(LayerKind.RECURRENT, cross, 0, 0, 0, state=state))


def _draft(
    fields: Fields, tensors: tuple[TensorKind, ...], shapes: Shapes
) -> tuple[TensorKind, ...]:
    """One attention layer with its feed-forward, and a projection of two hidden states, each."""
    layers = fields.integer("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0, least=0)
    if not layers:
        return ()
    counts = shapes.counts
    attention = max(1, counts.full + counts.sliding + counts.chunked)
    sparse = any(kind.name == "experts" for kind in tensors)
    per_layer = 2.0 * shapes.hidden * shapes.hidden
    for kind in tensors:
        if kind.name in ("embeddings", "head", "vision") or kind.name.startswith("recurrent"):
            continue
        if kind.name in FEED_FORWARD and sparse:
            continue
        expert = kind.name in ("experts", "shared experts", "router", "expert latents")
        layers_of = sparse_layers(fields, shapes) if expert else attention
        if kind.name in (*FEED_FORWARD, "norms"):
            layers_of = shapes.layers
        per_layer += kind.elements / max(1, layers_of)
    return (TensorKind("draft", round(layers * per_layer), "model.mtp", Shard.TENSOR),)


def _facts(
    fields: Fields,
    text: Mapping[str, Any],
    model_type: str,
    shapes: Shapes,
    native: str,
    quantization: Quantization | None,
) -> dict[str, Any]:
    context = fields.integer(
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
        "model_max_length",
    )
    facts: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.inner,
        "num_hidden_layers": shapes.layers,
        "num_attention_heads": shapes.heads,
        "num_key_value_heads": shapes.kv_heads,
        "head_dim": shapes.head_dim,
        "vocab_size": shapes.vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": shapes.tied,
        "attention_bias": fields.flag("attention_bias"),
        "mlp_bias": fields.flag("mlp_bias"),
        "torch_dtype": native,
    }
    extra = extra_facts(text, fields, quantization)
    return facts | {k: v for k, v in extra.items() if k not in facts}
