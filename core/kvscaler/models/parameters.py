"""Counting the parameters of a model, kind by kind, from its configuration."""

from dataclasses import dataclass

from kvscaler.models.families import Family
from kvscaler.models.fields import Fields
from kvscaler.models.kinds import Counts
from kvscaler.models.recurrent_weights import recurrent_tensors
from kvscaler.models.runs import count_of
from kvscaler.models.tensors import Shard, Stage, TensorKind
from kvscaler.models.vision import vision_parameters


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes that counting needs, as already read and checked."""

    model_type: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    counts: Counts


def tensor_kinds(fields: Fields, family: Family, shapes: Shapes) -> tuple[TensorKind, ...]:
    """All weights that an engine loads for text generation (and a vision tower, if there is one)."""
    norms = family.norms * (2 if family.norm_bias else 1) * shapes.hidden
    final = shapes.hidden * (2 if family.norm_bias else 1)
    layers = shapes.layers
    kinds = [
        _embedding(shapes),
        TensorKind("norms", norms * layers + final, "norm", shard=Shard.REPLICATED, linear=False),
        *_attention(fields, family, shapes),
        *recurrent_tensors(fields, shapes.model_type, shapes.hidden, shapes.counts.recurrent),
        *_feed_forward(fields, family, shapes),
    ]
    if not shapes.tied:
        kinds.append(
            TensorKind(
                "head", shapes.vocab * shapes.hidden, "lm_head", Shard.VOCABULARY, stage=Stage.LAST
            )
        )
    if vision := vision_parameters(fields):
        kinds.append(TensorKind("vision", vision, "model.visual", stage=Stage.FIRST))
    return tuple(kind for kind in kinds if kind.elements)


def _embedding(shapes: Shapes) -> TensorKind:
    return TensorKind(
        "embeddings",
        shapes.vocab * shapes.hidden,
        "model.embed_tokens",
        Shard.VOCABULARY,
        linear=False,
        stage=Stage.FIRST,
        tied_head=shapes.tied,
    )


def _attention(fields: Fields, family: Family, shapes: Shapes) -> list[TensorKind]:
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
    layers = shapes.layers
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


def _feed_forward(fields: Fields, family: Family, shapes: Shapes) -> list[TensorKind]:
    matrices = 3 if family.gated else 2
    experts = fields.optional("num_experts", "num_local_experts", "n_routed_experts")
    sparse = sparse_layers(fields, shapes) if experts else 0
    dense = _dense_layers(fields, family, shapes, sparse)
    inner = shapes.inner
    if shapes.model_type == "llama4_text":
        inner = fields.integer("intermediate_size_mlp")
    size = matrices * shapes.hidden * inner
    biases = 0
    if (family.mlp_bias or fields.flag("mlp_bias")) and not experts:
        biases = dense * ((matrices - 1) * inner + shapes.hidden)
    blocks = fields.runs("block_intermediate")
    dense_elements = dense * size
    if blocks:
        dense_elements = sum(3 * shapes.hidden * int(name) * count for name, count in blocks)
    kinds = [
        TensorKind("feed-forward", dense_elements, "model.layers.0.mlp.gate_proj"),
        TensorKind("feed-forward biases", biases, "bias", linear=False),
    ]
    if experts:
        kinds += _experts(fields, family, shapes, experts, sparse)
    return kinds


def _experts(
    fields: Fields, family: Family, shapes: Shapes, experts: int, sparse: int
) -> list[TensorKind]:
    matrices = 3 if family.gated else 2
    width = fields.integer("moe_intermediate_size", default=shapes.inner)
    hidden = fields.integer("moe_latent_size", default=shapes.hidden)
    shared_width = fields.integer(
        "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=0, least=0
    )
    shared = fields.integer("n_shared_experts", default=0, least=0)
    if not shared_width:
        factor = 2 if shapes.model_type == "nemotron_h" else 1
        shared_width = shared * width * factor
    if shapes.model_type == "llama4_text":
        shared_width = shapes.inner
    router = experts * shapes.hidden + (experts if family.router_bias else 0)
    per_expert = matrices * hidden * width
    biases = 0
    if family.router_bias:
        biases = sparse * experts * ((matrices - 1) * width + shapes.hidden)
    latent = 2 * shapes.hidden * hidden if hidden != shapes.hidden else 0
    kinds = [
        TensorKind(
            "experts",
            sparse * experts * per_expert,
            "model.layers.0.mlp.experts.0.up_proj",
            Shard.EXPERTS,
        ),
        TensorKind("expert biases", biases, "bias", linear=False),
        TensorKind(
            "shared experts",
            sparse * matrices * shapes.hidden * shared_width,
            "model.layers.0.mlp.shared_experts.up_proj",
        ),
        TensorKind(
            "expert latents",
            sparse * latent,
            "model.layers.0.mixer.fc1_latent_proj",
            Shard.REPLICATED,
        ),
        TensorKind(
            "router",
            sparse * (router + (shapes.hidden if family.shared_gate else 0)),
            "model.layers.0.mlp.gate",
            Shard.REPLICATED,
            linear=False,
        ),
    ]
    return kinds


def sparse_layers(fields: Fields, shapes: Shapes) -> int:
    """Layers with experts."""
    layers = shapes.layers
    if pattern := fields.text("hybrid_override_pattern"):
        return pattern.count("E")
    if listed := count_of(fields.runs("layers_block_type"), "moe"):
        return listed
    if shapes.model_type == "jamba":
        period, offset = (
            fields.integer("expert_layer_period"),
            fields.integer("expert_layer_offset"),
        )
        return len(range(offset, layers, period))
    step = fields.integer(
        "interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq_step", default=1
    )
    first = fields.integer("first_k_dense_replace", default=0, least=0)
    return max(0, layers // step - first)


def _dense_layers(fields: Fields, family: Family, shapes: Shapes, sparse: int) -> int:
    """Layers with a dense feed-forward."""
    if pattern := fields.text("hybrid_override_pattern"):
        return pattern.count("-")
    if count_of(fields.runs("layers_block_type"), "moe"):
        return count_of(fields.runs("layers_block_type"), "mlp")
    if fields.flag("enable_moe_block") or (sparse and shapes.model_type == "gemma4_text"):
        return shapes.layers
    return shapes.layers - sparse
