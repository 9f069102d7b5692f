"""Weights of recurrent layers: gated DeltaNet, Kimi delta attention, Mamba2 and Mamba1.

Shapes as in transformers: `models/qwen3_next`, `models/nemotron_h`, `models/jamba`; Kimi's as in vLLM
`model_executor/layers/kda.py`.
"""

from kvscaler.models.fields import Fields
from kvscaler.models.tensors import Shard, TensorKind

IN_PATH = "model.layers.0.linear_attn.in_proj_qkvz"
OUT_PATH = "model.layers.0.linear_attn.out_proj"


def recurrent_tensors(
    fields: Fields, model_type: str, hidden: int, layers: int
) -> list[TensorKind]:
    """The kinds of tensors of `layers` recurrent layers; none when there are no such layers."""
    if not layers:
        return []
    if fields.has("linear_num_key_heads"):
        into, small, out, replicated = _delta_net(fields, hidden)
    elif fields.has("kda_num_heads"):
        into, small, out, replicated = _kimi_delta(fields, hidden)
    elif model_type == "jamba":
        into, small, out, replicated = _mamba1(fields, hidden)
    else:
        into, small, out, replicated = _mamba2(fields, hidden)
    return [
        TensorKind("recurrent input", layers * into, IN_PATH),
        TensorKind("recurrent output", layers * out, OUT_PATH),
        TensorKind("recurrent parameters", layers * small, "conv1d", linear=False),
        TensorKind("recurrent norms", layers * replicated, "norm", Shard.REPLICATED, linear=False),
    ]


def _delta_net(fields: Fields, hidden: int) -> tuple[int, int, int, int]:
    keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
    heads = fields.integer("linear_num_value_heads")
    value_dim = fields.integer("linear_value_head_dim")
    values = heads * value_dim
    into = hidden * (2 * keys + 2 * values + 2 * heads)
    small = (2 * keys + values) * fields.integer("linear_conv_kernel_dim") + 2 * heads
    return into, small, values * hidden, value_dim


def _kimi_delta(fields: Fields, hidden: int) -> tuple[int, int, int, int]:
    """Queries, keys and values; a decay and a gate of low rank each; a rate per head."""
    heads, width = fields.integer("kda_num_heads"), fields.integer("kda_head_dim")
    inner = heads * width
    into = hidden * (3 * inner + heads) + 2 * (hidden + inner) * width
    small = 3 * inner * fields.integer("kda_conv_kernel") + heads + inner
    return into, small, inner * hidden, width


def _mamba2(fields: Fields, hidden: int) -> tuple[int, int, int, int]:
    heads = fields.integer("mamba_num_heads", "mamba_n_heads")
    inner = heads * fields.integer("mamba_head_dim", "mamba_d_head")
    state = fields.integer("ssm_state_size", "mamba_d_state")
    groups = fields.integer("n_groups", "mamba_n_groups")
    mixed = inner + 2 * groups * state
    into = hidden * (inner + mixed + heads)
    small = mixed * (fields.integer("conv_kernel", "mamba_d_conv") + 1) + 3 * heads + inner
    return into, small, inner * hidden, 0


def _mamba1(fields: Fields, hidden: int) -> tuple[int, int, int, int]:
    inner = fields.integer("mamba_expand") * hidden
    state = fields.integer("mamba_d_state")
    rank = fields.integer("mamba_dt_rank", default=-(-hidden // 16))
    into = hidden * 2 * inner + inner * (rank + 2 * state) + rank * inner
    small = inner * (fields.integer("mamba_d_conv") + 3 + state)
    return into, small, inner * hidden, rank + 2 * state
