"""Which layers of a model keep what: from configuration fields to groups of equal layers."""

from dataclasses import dataclass

from kvscaler.models.families import Family, Windows
from kvscaler.models.fields import Fields, shown
from kvscaler.models.layers import LayerGroup, LayerKind, RecurrentState
from kvscaler.models.runs import count_of

_FULL = ("full_attention", "attention", "full", "global", "deepseek_sparse_attention")
_SLIDING = ("sliding_attention", "sliding", "local", "swa")
_CHUNKED = ("chunked_attention",)
_RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "kda")


@dataclass(frozen=True, slots=True)
class Counts:
    """Layers by the past that they keep, and those with none of their own (`other`)."""

    full: int = 0
    sliding: int = 0
    chunked: int = 0
    recurrent: int = 0
    other: int = 0


def layer_counts(fields: Fields, model_type: str, family: Family, layers: int) -> Counts:
    """How many of `layers` are of which kind; faults go to `fields.problems`."""
    if model_type == "deepseek_v4":
        return Counts(full=layers)
    if heads := fields.runs("block_kv_heads"):
        full = layers - count_of(heads, "0")
        return Counts(full=full, other=layers - full)
    if pattern := fields.text("hybrid_override_pattern", "layers_block_type_pattern"):
        return _by_letters(fields, pattern, layers)
    if runs := fields.runs("layer_types", "layer_types_counts", "layers_block_type"):
        return _by_names(fields, runs, layers)
    if model_type == "falcon_h1":
        return Counts(full=layers, recurrent=layers)
    if model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        full = layers // fields.integer("full_attention_interval")
        return Counts(full=full, recurrent=layers - full)
    if model_type == "jamba":
        period, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset")
        full = len(range(offset, layers, period))
        return Counts(full=full, recurrent=layers - full)
    if fields.has("attn_layer_indices"):
        full = len(fields.get("attn_layer_indices"))
        return Counts(full=full, recurrent=layers - full)
    if model_type == "llama4_text" and fields.has("attention_chunk_size"):
        full = layers // fields.integer("no_rope_layer_interval")
        return Counts(full=full, chunked=layers - full)
    return _by_window(fields, family, layers)


def _by_window(fields: Fields, family: Family, layers: int) -> Counts:
    if not fields.has("sliding_window") or family.windows is Windows.IGNORED:
        return Counts(full=layers)
    fields.integer("sliding_window")
    match family.windows:
        case Windows.ALL if fields.flag("use_sliding_window", default=True):
            return Counts(sliding=layers)
        case Windows.FROM_LAYER if fields.flag("use_sliding_window"):
            full = min(layers, fields.integer("max_window_layers", default=layers, least=0))
            return Counts(full=full, sliding=layers - full)
        case Windows.PERIOD:
            full = layers // fields.integer("sliding_window_pattern", "_sliding_window_pattern")
            return Counts(full=full, sliding=layers - full)
        case Windows.LISTED:
            fields.problems.append("sliding_window is given, but no layer_types say which layers")
    return Counts(full=layers)


def _by_names(fields: Fields, runs: tuple[tuple[str, int], ...], layers: int) -> Counts:
    counts = Counts(
        full=count_of(runs, *_FULL),
        sliding=count_of(runs, *_SLIDING),
        chunked=count_of(runs, *_CHUNKED),
        recurrent=count_of(runs, *_RECURRENT),
        other=count_of(runs, "mlp", "moe"),
    )
    known = {*_FULL, *_SLIDING, *_CHUNKED, *_RECURRENT, "mlp", "moe"}
    if strange := sorted({name for name, _ in runs} - known):
        fields.problems.append(f"layer_types names {', '.join(map(shown, strange[:4]))}: not known")
    total = sum(count for _, count in runs)
    if total != layers:
        fields.problems.append(f"layer_types lists {total} layers, num_hidden_layers is {layers}")
    if counts.sliding and not fields.has("sliding_window"):
        fields.problems.append("layer_types has windowed layers, but sliding_window is missing")
    return counts


def _by_letters(fields: Fields, pattern: str, layers: int) -> Counts:
    """Nemotron-H: M a Mamba2 layer, * attention, - a feed-forward, E experts."""
    if set(pattern) - set("M*-E"):
        fields.problems.append(f"hybrid_override_pattern {shown(pattern)} has other letters")
    if len(pattern) != layers:
        fields.problems.append(
            f"hybrid_override_pattern has {len(pattern)} layers, num_hidden_layers is {layers}"
        )
    return Counts(
        full=pattern.count("*"),
        recurrent=pattern.count("M"),
        other=pattern.count("-") + pattern.count("E"),
    )


def groups_of(
    fields: Fields, counts: Counts, model_type: str, kv_heads: int, head_dim: int, native: str
) -> tuple[LayerGroup, ...]:
    """Groups of layers that keep alike, the unbounded ones first."""
    if model_type == "deepseek_v4":
        return _compressed(fields, counts.full, head_dim)
    if latent := fields.optional("kv_lora_rank"):
        found = [_mla(fields, counts.full, latent)]
        if counts.recurrent:
            state = _state(fields, model_type, native)
            found.append(LayerGroup(LayerKind.RECURRENT, counts.recurrent, 0, 0, 0, state=state))
        return tuple(found)
    value_dim = fields.integer("v_head_dim", default=head_dim)
    global_dim = fields.integer("global_head_dim", default=head_dim)
    global_values = global_dim if fields.has("global_head_dim") else value_dim
    global_heads = fields.integer("num_global_key_value_heads", default=kv_heads)
    window = fields.optional("sliding_window") if counts.sliding else None
    chunk = fields.optional("attention_chunk_size") if counts.chunked else None
    shared = fields.integer("num_kv_shared_layers", default=0, least=0)
    full, sliding = _without_shared(counts, shared)
    found = [
        LayerGroup(LayerKind.FULL, full, global_heads, global_dim, global_values),
        LayerGroup(
            LayerKind.SLIDING,
            sliding,
            fields.integer("swa_num_key_value_heads", default=kv_heads),
            fields.integer("swa_head_dim", default=head_dim),
            fields.integer("swa_v_head_dim", default=value_dim),
            window_tokens=window,
        ),
        LayerGroup(
            LayerKind.CHUNKED, counts.chunked, kv_heads, head_dim, value_dim, window_tokens=chunk
        ),
    ]
    if counts.recurrent:
        state = _state(fields, model_type, native)
        found.append(LayerGroup(LayerKind.RECURRENT, counts.recurrent, 0, 0, 0, state=state))
    return tuple(group for group in found if group.layers)


def _without_shared(counts: Counts, shared: int) -> tuple[int, int]:
    """The last `shared` layers read the cache of earlier ones and own none (Gemma 3n and 4)."""
    total = counts.full + counts.sliding
    if not shared or total <= shared:
        return counts.full, counts.sliding
    full = counts.full - round(counts.full * shared / total)
    return full, total - shared - full


def _compressed(fields: Fields, layers: int, head_dim: int) -> tuple[LayerGroup, ...]:
    """DeepSeek V4: every layer keeps a window of latents; most also one latent per 4 or 128 tokens.

    Those of 4 tokens have an index key each. `compress_ratios` may list prediction layers behind.
    """
    rope = fields.integer("qk_rope_head_dim")
    index = fields.integer("index_head_dim")
    runs = fields.runs("compress_ratios", "compress_ratios_counts")
    known = {int(name): 0 for name, _ in runs if name.isdigit()}
    for name, count in runs:
        if name.isdigit():
            known[int(name)] += count
    if not any(ratio > 1 for ratio in known):
        fields.problems.append("compress_ratios is missing, which says what each layer keeps")
    groups = [
        LayerGroup(
            LayerKind.MLA,
            count,
            1,
            head_dim,
            0,
            rope_dim=rope,
            index_dim=index if ratio == 4 else 0,
            index_layers=count if ratio == 4 else 0,
            tokens_per_state=ratio,
        )
        for ratio, count in sorted(known.items())
        if ratio > 1 and count
    ]
    window = fields.integer("sliding_window")
    groups.append(
        LayerGroup(LayerKind.SLIDING, layers, 1, head_dim, 0, window_tokens=window, rope_dim=rope)
    )
    return tuple(groups)


def _mla(fields: Fields, layers: int, latent: int) -> LayerGroup:
    rope = fields.integer("qk_rope_head_dim")
    index = fields.optional("index_head_dim")
    index_layers = 0
    if index:
        runs = fields.runs("indexer_types", "indexer_types_counts")
        index_layers = count_of(runs, "full") if runs else layers
    return LayerGroup(
        LayerKind.MLA,
        layers,
        1,
        latent + rope,
        0,
        rope_dim=rope,
        index_dim=index or 0,
        index_layers=index_layers,
    )


def _state(fields: Fields, model_type: str, native: str) -> RecurrentState:
    if fields.has("kda_num_heads"):
        # Convolutions of queries, keys and values, and a square state in 32 bits for each head
        # (vLLM `model_executor/layers/mamba/mamba_utils.py`, `kda_state_shape`).
        heads, width = fields.integer("kda_num_heads"), fields.integer("kda_head_dim")
        kernel = fields.integer("kda_conv_kernel")
        return RecurrentState(
            3 * heads * width, kernel, heads * width * width, "float32", heads=heads
        )
    dtype = fields.text("mamba_ssm_dtype", "mamba_ssm_cache_dtype", default="auto")
    if fields.has("linear_num_key_heads"):
        key = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
        heads = fields.integer("linear_num_value_heads")
        value_dim = fields.integer("linear_value_head_dim")
        return RecurrentState(
            2 * key + heads * value_dim,
            fields.integer("linear_conv_kernel_dim"),
            heads * fields.integer("linear_key_head_dim") * value_dim,
            dtype,
            heads,
        )
    if model_type == "jamba":
        inner = fields.integer("mamba_expand") * fields.integer("hidden_size")
        state = fields.integer("mamba_d_state")
        return RecurrentState(
            inner, fields.integer("mamba_d_conv"), inner * state, dtype, heads=inner
        )
    heads = fields.integer("mamba_num_heads", "mamba_n_heads")
    inner = heads * fields.integer("mamba_head_dim", "mamba_d_head")
    state = fields.integer("ssm_state_size", "mamba_d_state")
    groups = fields.integer("n_groups", "mamba_n_groups")
    return RecurrentState(
        inner + 2 * groups * state,
        fields.integer("conv_kernel", "mamba_d_conv"),
        inner * state,
        dtype,
        heads,
    )
