"""The weights' lines, alike for engines that run on torch: files, tables of angles, adapters."""

from kvscaler.budget.lines import Basis, BudgetLine
from kvscaler.budget.settings import ResolvedSettings
from kvscaler.models import ModelArchitecture, dtype_bytes

QUANTIZED_SPREAD = 0.02
"""Quantized checkpoints differ in what they leave in 16 bits; stated ignore lists make it smaller."""
NATIVE_SPREAD = 0.003


def weight_lines(
    model: ModelArchitecture, settings: ResolvedSettings, *, attention_parallel: int | None = None
) -> tuple[BudgetLine, ...]:
    """`weights`, and `adapters` where LoRA slots are reserved, on the fullest rank."""
    size = model.rank_weight_bytes(
        settings.compute_dtype,
        tensor=settings.tensor_parallel,
        pipeline=settings.pipeline_parallel,
        attention=attention_parallel,
        draft=bool(settings.draft_layers),
    )
    size += rotary_table_bytes(model, settings) + latent_copy_bytes(model, settings)
    spread = NATIVE_SPREAD if model.quantization is None else QUANTIZED_SPREAD
    scheme = model.quantization.name if model.quantization else settings.compute_dtype
    note = f"{model.parameters:,} parameters ({scheme})"
    if settings.tensor_parallel > 1:
        note += f", one of {settings.tensor_parallel} ranks"
    lines = [
        BudgetLine(
            "weights",
            size,
            Basis.COMPUTED,
            int(size * (1 - spread)),
            int(size * (1 + spread)),
            note,
        )
    ]
    if settings.adapters and settings.adapter_rank:
        lines.append(_adapter_line(model, settings))
    return tuple(lines)


def rotary_table_bytes(model: ModelArchitecture, settings: ResolvedSettings) -> int:
    """Cosines and sines of every position: `context * rotary_dim` elements, on every rank.

    vLLM `model_executor/layers/rotary_embedding/base.py`; it is the 0.03 GiB by which the logs'
    "model weights take 14.99 GiB" exceeds Llama 3.1 8B's parameters.
    """
    element = dtype_bytes(settings.compute_dtype)
    return min(model.max_context_tokens, 1 << 20) * model.rotary_dim * element


def latent_copy_bytes(model: ModelArchitecture, settings: ResolvedSettings) -> int:
    """MLA keeps its expansion in 16 bits beside the quantized one, to absorb it into the query.

    vLLM `model_executor/layers/attention/mla_attention.py`, `process_weights_after_loading`.
    """
    expansion = model.tensor("latent expansion")
    if expansion is None or model.quantization is None:
        return 0
    element = dtype_bytes(settings.compute_dtype)
    return expansion.elements * element // settings.tensor_parallel


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
