"""Weights of attention: grouped heads, latent projections, and DeepSeek V4's compressed keys."""

from kvscaler.models.families import Family
from kvscaler.models.fields import Fields
from kvscaler.models.shapes import Shapes
from kvscaler.models.tensors import Shard, TensorKind


def attention_tensors(fields: Fields, family: Family, shapes: Shapes) -> list[TensorKind]:
    """Projections, biases and norms of all attention layers."""
    if fields.has("kv_lora_rank"):
        return _mla(fields, shapes)
    layers = shapes.counts.full + shapes.counts.sliding + shapes.counts.chunked
    if shapes.model_type == "deepseek_v4":
        return _compressed(fields, shapes)
    wide = shapes.counts.full if fields.has("global_head_dim") else 0
    stated = fields.flag("attention_bias")
    bias = family.qkv_bias or stated
    output_bias = family.output_bias or (stated and not family.qkv_bias)
    value_dim = fields.integer("v_head_dim", default=shapes.head_dim)
    sliding_heads = fields.integer("swa_num_key_value_heads", default=shapes.kv_heads)
    query = keys = output = 0
    for count, head_dim, values, kv_heads, copies in (
        (
            wide,
            fields.integer("global_head_dim", default=shapes.head_dim),
            fields.integer("global_head_dim", default=shapes.head_dim),
            fields.integer("num_global_key_value_heads", default=shapes.kv_heads),
            1 if fields.flag("attention_k_eq_v") else 2,
        ),
        (shapes.counts.sliding, shapes.head_dim, value_dim, sliding_heads, 2),
        (layers - wide - shapes.counts.sliding, shapes.head_dim, value_dim, shapes.kv_heads, 2),
    ):
        gate = 2 if family.output_gate else 1
        query += count * shapes.hidden * shapes.heads * head_dim * gate
        key_values = kv_heads * (head_dim + (values if copies == 2 else 0))
        keys += count * shapes.hidden * key_values
        output += count * shapes.heads * values * shapes.hidden
    extras = 0
    if bias:
        widths = shapes.heads + 2 * shapes.kv_heads
        extras += layers * widths * shapes.head_dim
    if output_bias:
        extras += layers * shapes.hidden
    if family.head_norms or fields.flag("use_qk_norm"):
        extras += layers * 2 * shapes.head_dim
    if shapes.model_type == "gpt_oss":
        extras += layers * shapes.heads
    return [
        TensorKind("query", query, "model.layers.0.self_attn.q_proj"),
        TensorKind("keys and values", keys, "model.layers.0.self_attn.k_proj", Shard.KV_HEADS),
        TensorKind("attention output", output, "model.layers.0.self_attn.o_proj"),
        TensorKind("attention biases and norms", extras, "q_norm", Shard.REPLICATED, linear=False),
    ]


def _mla(fields: Fields, shapes: Shapes) -> list[TensorKind]:
    """Latent attention; the low-rank down-projections are replicated on every rank."""
    latent = fields.integer("kv_lora_rank")
    rope = fields.integer("qk_rope_head_dim")
    nope = fields.integer("qk_nope_head_dim")
    value_dim = fields.integer("v_head_dim")
    rank = fields.optional("q_lora_rank")
    width = shapes.heads * (nope + rope)
    down = shapes.hidden * (latent + rope) + (shapes.hidden * rank if rank else 0)
    up = (rank or shapes.hidden) * width
    expand = latent * shapes.heads * (nope + value_dim)
    output = shapes.heads * value_dim * shapes.hidden
    layers = shapes.counts.full
    kinds = [
        TensorKind(
            "latent projections",
            layers * down,
            "model.layers.0.self_attn.kv_a_proj_with_mqa",
            Shard.REPLICATED,
        ),
        TensorKind("query", layers * up, "model.layers.0.self_attn.q_b_proj"),
        TensorKind("latent expansion", layers * expand, "model.layers.0.self_attn.kv_b_proj"),
        TensorKind("attention output", layers * output, "model.layers.0.self_attn.o_proj"),
        TensorKind(
            "latent norms", layers * (latent + (rank or 0)), "norm", Shard.REPLICATED, linear=False
        ),
    ]
    if index := fields.optional("index_head_dim"):
        heads = fields.integer("index_n_heads")
        runs = fields.runs("indexer_types", "indexer_types_counts")
        index_layers = sum(n for name, n in runs if name == "full") if runs else layers
        per_layer = (rank or shapes.hidden) * heads * index + shapes.hidden * (index + heads)
        kinds.append(
            TensorKind(
                "indexer",
                index_layers * per_layer,
                "model.layers.0.self_attn.indexer.wq_b",
                Shard.REPLICATED,
            )
        )
    return kinds


def _compressed(fields: Fields, shapes: Shapes) -> list[TensorKind]:
    """DeepSeek V4: one shared key-value head, grouped low-rank output, compressors, an indexer."""
    rank = fields.integer("q_lora_rank")
    output_rank = fields.integer("o_lora_rank", default=1024)
    output_groups = fields.integer("o_groups", default=shapes.heads // 8)
    width = shapes.heads * shapes.head_dim
    layers = shapes.layers
    output = width // output_groups * output_rank * output_groups
    output += output_groups * output_rank * shapes.hidden
    return [
        TensorKind(
            "latent projections",
            layers * shapes.hidden * (rank + shapes.head_dim),
            "model.layers.0.self_attn.q_a_proj",
            Shard.REPLICATED,
        ),
        TensorKind("query", layers * rank * width, "model.layers.0.self_attn.q_b_proj"),
        TensorKind("attention output", layers * output, "model.layers.0.self_attn.o_proj"),
        TensorKind(
            "compressors",
            layers * 4 * shapes.hidden * shapes.head_dim,
            "model.layers.0.self_attn.compressor",
            Shard.REPLICATED,
        ),
    ]
