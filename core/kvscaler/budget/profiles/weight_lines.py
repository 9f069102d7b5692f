"""The weights' lines, alike for engines that run on torch: files, tables of angles, adapters."""

from dataclasses import dataclass

from kvscaler.budget.lines import Basis, BudgetLine, gib
from kvscaler.budget.rounding import round_up
from kvscaler.budget.settings import ResolvedSettings
from kvscaler.models import LayerKind, ModelArchitecture, Split, dtype_bytes

PLAIN_SPREADS = {"exact": (0.003, 0.006), "8 bits": (0.003, 0.006), "4 bits": (0.01, 0.02)}
MIXED_SPREADS = {"exact": (0.012, 0.017), "8 bits": (0.025, 0.03), "4 bits": (0.01, 0.05)}
"""Shares by which weights may be smaller and larger, by class of what start-up logs print for them.
Checkpoints differ in what they leave in 16 bits, always more than the plain scheme says: hardly in plain
transformers (FP8 within 0.2 %, AWQ 0.3 %), much in models with recurrent layers, a latent or a vision
tower (2 % either way with 8 bits, up to 4 % more with 4 in six of seven logs, 15 % in one). A list of what is left alone makes it exact."""


def spread_of(model: ModelArchitecture) -> tuple[float, float]:
    """How far a model's weight bytes may be off, down and up."""
    scheme = model.quantization
    plain = not model.has_vision and all(
        group.kind not in (LayerKind.RECURRENT, LayerKind.MLA) for group in model.groups
    )
    spreads = PLAIN_SPREADS if plain else MIXED_SPREADS
    if model.stored_bytes is not None:
        return PLAIN_SPREADS["exact"]
    if scheme is None or scheme.stated:
        return spreads["exact"]
    return spreads["8 bits" if scheme.bytes_per_weight >= 1 else "4 bits"]


@dataclass(frozen=True, slots=True)
class Padding:
    """Multiples to which kernels round the inner width and the hidden size of experts."""

    inner: int = 1
    hidden: int = 1
    spread: float = 0.0

    def factor(self, model: ModelArchitecture) -> float:
        """How much larger the experts are than their parameters."""
        if self.inner == self.hidden == 1 or not model.expert_width:
            return 1.0
        inner = round_up(model.expert_width, self.inner) / model.expert_width
        return inner * round_up(model.hidden_size, self.hidden) / model.hidden_size


def weight_lines(
    model: ModelArchitecture,
    settings: ResolvedSettings,
    *,
    split: Split | None = None,
    draft: bool = True,
    expert_padding: Padding = Padding(),
) -> tuple[BudgetLine, ...]:
    """`weights`, and `adapters` where LoRA slots are reserved, on the fullest rank.

    `draft`: the prediction layers that speculate are loaded before the pool is sized.
    """
    split = split or Split(settings.tensor_parallel, settings.pipeline_parallel)
    drafting = draft and bool(settings.draft_layers)
    size = model.rank_weight_bytes(settings.compute_dtype, split, draft=drafting)
    factor = expert_padding.factor(model)
    if factor > 1:
        size += round(
            model.rank_expert_bytes(settings.compute_dtype, settings.tensor_parallel) * (factor - 1)
        )
    size += allocator_slack_bytes(model, settings)
    size += rotary_table_bytes(model, settings) + latent_copy_bytes(model, settings, split)
    offloaded = min(size, settings.weight_offload_bytes)
    size -= offloaded
    below, above = spread_of(model)
    scheme = model.quantization.name if model.quantization else settings.compute_dtype
    note = f"{model.parameters:,} parameters ({scheme})"
    if settings.tensor_parallel > 1:
        note += f", one of {settings.tensor_parallel} ranks"
    if offloaded:
        note += f", {gib(offloaded)} in the host's memory"
    lines = [
        BudgetLine(
            "weights",
            size,
            Basis.COMPUTED,
            int(size * (1 - below)),
            int(size * (1 + above + expert_padding.spread)),
            note,
        )
    ]
    if settings.adapters and settings.adapter_rank:
        lines.append(_adapter_line(model, settings))
    return tuple(lines)


LARGE_ALLOCATION_BYTES = 10 << 20
SEGMENT_BYTES = 2 << 20
SPLIT_BYTES = 1 << 20


def allocator_slack_bytes(model: ModelArchitecture, settings: ResolvedSettings) -> int:
    """What torch's allocator rounds the large matrices of dense layers up by, on one rank.

    Allocations above 10 MiB take segments of 2 MiB; a rest of up to 1 MiB is not split off and counts
    as allocated (`c10/cuda/CUDACachingAllocator.cpp`). It is 0.16 GiB for Qwen 2.5 14B on two ranks
    and nothing for Llama 3.1, whose matrices are powers of two.
    """
    tensor = settings.tensor_parallel
    element = dtype_bytes(settings.compute_dtype)
    if model.quantization is not None:
        element = max(1, round(model.quantization.bytes_per_weight))
    full = [group for group in model.groups if group.key_dim and group.kv_heads]
    if model.experts_per_token or not full:
        return 0
    group = full[0]
    query = model.attention_heads * group.key_dim // tensor
    keys = 2 * group.rank_kv_heads(tensor) * group.key_dim
    inner = model.intermediate_size // tensor
    hidden = model.hidden_size * element
    sizes = ((query + keys) * hidden, query * hidden, 2 * inner * hidden, inner * hidden)
    slack = sum(_rest(size) for size in sizes)
    return slack * sum(group.layers for group in full) // settings.pipeline_parallel


def _rest(size: int) -> int:
    rest = -size % SEGMENT_BYTES
    return rest if size > LARGE_ALLOCATION_BYTES and rest <= SPLIT_BYTES else 0


def rotary_table_bytes(model: ModelArchitecture, settings: ResolvedSettings) -> int:
    """Cosines and sines of every position: `context * rotary_dim` elements, on every rank.

    vLLM `model_executor/layers/rotary_embedding/base.py`; it is the 0.03 GiB by which the logs'
    "model weights take 14.99 GiB" exceeds Llama 3.1 8B's parameters.
    """
    element = dtype_bytes(settings.compute_dtype)
    return min(model.max_context_tokens, 1 << 20) * model.rotary_dim * element


def latent_copy_bytes(model: ModelArchitecture, settings: ResolvedSettings, split: Split) -> int:
    """MLA keeps its expansion in 16 bits beside the quantized one, to absorb it into the query.

    vLLM `model_executor/layers/attention/mla_attention.py`, `process_weights_after_loading`.
    """
    expansion = model.tensor("latent expansion")
    if expansion is None or model.quantization is None:
        return 0
    element = dtype_bytes(settings.compute_dtype)
    return expansion.elements * element // split.ranks(expansion)


def _adapter_line(model: ModelArchitecture, settings: ResolvedSettings) -> BudgetLine:
    """LoRA slots: two matrices of `rank` per linear layer, for each adapter kept on the device."""
    element = dtype_bytes(settings.compute_dtype)
    widths = 0
    for kind in model.tensors:
        if kind.linear and kind.name in ("query", "keys and values", "attention output"):
            widths += model.hidden_size + kind.elements // (model.layers * model.hidden_size)
        elif kind.name == "feed-forward":
            widths += 3 * (model.hidden_size + model.intermediate_size)
    size = settings.adapters * settings.adapter_rank * widths * model.layers * element
    note = f"{settings.adapters} adapters of rank {settings.adapter_rank}"
    return BudgetLine("adapters", size, Basis.COMPUTED, int(size * 0.8), int(size * 1.1), note)
