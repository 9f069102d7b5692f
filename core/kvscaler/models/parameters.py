"""Counting the parameters of a model, kind by kind, from its configuration."""

from kvscaler.models.attention_weights import attention_tensors
from kvscaler.models.families import Family
from kvscaler.models.fields import Fields
from kvscaler.models.recurrent_weights import recurrent_tensors
from kvscaler.models.runs import count_of
from kvscaler.models.shapes import Shapes
from kvscaler.models.tensors import Shard, Stage, TensorKind
from kvscaler.models.vision import vision_parameters


def tensor_kinds(fields: Fields, family: Family, shapes: Shapes) -> tuple[TensorKind, ...]:
    """All weights that an engine loads for text generation (and a vision tower, if there is one)."""
    norms = family.norms * (2 if family.norm_bias else 1) * shapes.hidden
    final = shapes.hidden * (2 if family.norm_bias else 1)
    layers = shapes.layers
    kinds = [
        _embedding(shapes),
        TensorKind("norms", norms * layers + final, "norm", shard=Shard.REPLICATED, linear=False),
        *attention_tensors(fields, family, shapes),
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
    down = dense_elements // matrices
    kinds = [
        TensorKind("feed-forward", dense_elements - down, "model.layers.0.mlp.gate_proj"),
        TensorKind("feed-forward output", down, "model.layers.0.mlp.down_proj"),
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
    shared = fields.integer("n_shared_experts", "num_shared_experts", default=0, least=0)
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
