"""From model, accelerator and engine to the budget: the formula that everything starts from."""

from dataclasses import replace

from kvscaler.budget.fit import SMALLEST_CONTEXT_TOKENS, fit_of
from kvscaler.budget.interval import kv_interval
from kvscaler.budget.layout import PoolLayout
from kvscaler.budget.lines import Fit, KVBudget, gib
from kvscaler.budget.profile import EngineProfile
from kvscaler.budget.settings import EngineSettings, ResolvedSettings
from kvscaler.hardware import Accelerator
from kvscaler.models import ModelArchitecture


class BudgetUnknown(ValueError):
    """A budget can't be computed: a fact that it needs is missing."""


def compute_budget(
    model: ModelArchitecture,
    accelerator: Accelerator,
    profile: EngineProfile,
    settings: EngineSettings | None = None,
) -> KVBudget:
    """The KV budget of one rank of a replica, which is that of every rank.

    With `max_context_tokens` unset, the context is the model's own or what the pool holds,
    whichever is less. Raises `BudgetUnknown` when the accelerator's memory is not known; a
    budget that does not fit is returned with `fit.fits` false and the reason in words.
    """
    if accelerator.memory_bytes is None:
        raise BudgetUnknown(
            f"accelerator {accelerator.name!r} has no memory of its own; "
            "give spec.accelerator.memory, or a memory limit on the engine's container"
        )
    _check_memory(accelerator)
    asked = settings or EngineSettings()
    _check(asked)
    resolved = profile.resolve(model, accelerator, asked)
    lines = profile.lines(model, accelerator, resolved)
    usable = profile.usable_bytes(accelerator, resolved, lines)
    overhead = sum(line.bytes for line in lines)
    if resolved.kv_cache_bytes is not None:
        usable = overhead + resolved.kv_cache_bytes
    kv_bytes = usable - overhead
    layout = profile.layout(model, resolved)
    blocks = layout.blocks_in(kv_bytes)
    context, needed_tokens = _context(model, resolved, layout, blocks)
    fit = fit_of(
        device_bytes=accelerator.memory_bytes,
        overhead_bytes=overhead,
        layout=layout,
        blocks=blocks,
        needed_tokens=needed_tokens,
        kv_bytes=kv_bytes,
        utilization_percent=resolved.memory_utilization_percent,
    )
    if usable > accelerator.memory_bytes:
        fit = _too_large(accelerator, usable, overhead, kv_bytes, fit)
    low = high = kv_bytes
    if resolved.kv_cache_bytes is None:
        low, high = kv_interval(accelerator, usable, lines, kv_bytes)
    return KVBudget(
        model_digest=model.digest,
        accelerator=accelerator.name,
        engine=profile.name,
        device_bytes=accelerator.memory_bytes,
        utilization_percent=resolved.memory_utilization_percent,
        usable_bytes=usable,
        lines=lines,
        kv_bytes=kv_bytes,
        kv_low_bytes=low,
        kv_high_bytes=high,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        blocks=blocks,
        max_context_tokens=context,
        max_sequences=max(1, min(resolved.max_sequences, blocks)),
        step_tokens=resolved.step_tokens,
        compute_dtype=resolved.compute_dtype,
        kv_dtype=resolved.kv_dtype,
        fit=fit,
        layout=layout,
        ranks=resolved.tensor_parallel * resolved.pipeline_parallel,
    )


def _too_large(
    accelerator: Accelerator, usable: int, overhead: int, kv_bytes: int, fit: Fit
) -> Fit:
    """A pool of a stated size beside the lines exceeds the device."""
    device = accelerator.memory_bytes or 0
    return replace(
        fit,
        fits=False,
        shortfall_bytes=usable - device,
        message=f"does not fit by {gib(usable - device)}: {gib(overhead)} for weights and overhead and "
        f"{gib(kv_bytes)} of KV cache are more than the {gib(device)} of {accelerator.name}",
    )


def _check_memory(accelerator: Accelerator) -> None:
    memory = accelerator.memory_bytes
    if isinstance(memory, bool) or not isinstance(memory, int) or not 0 < memory < 1 << 60:
        raise BudgetUnknown(
            f"the memory of accelerator {accelerator.name[:60]!r} is {memory!r:.40}, not a whole "
            "number of bytes above 0"
        )


def _check(settings: EngineSettings) -> None:
    for name, least in (
        ("tensor_parallel", 1), ("pipeline_parallel", 1), ("data_parallel", 1),
        ("context_parallel", 1), ("speculative_tokens", 0), ("draft_layers", 0),
        ("max_context_tokens", 1), ("max_sequences", 1), ("step_tokens", 1), ("block_tokens", 1),
        ("adapters", 0), ("adapter_rank", 0), ("kv_cache_bytes", 0), ("weight_offload_bytes", 0),
        ("dense_parallel", 1),
    ):  # fmt: skip
        value = getattr(settings, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 60:
            raise BudgetUnknown(f"{name} is {value!r:.40}, not a whole number of {least} or more")
    percent = settings.memory_utilization_percent
    if percent is not None and not (isinstance(percent, (int, float)) and 0 < percent <= 100):
        raise BudgetUnknown(
            f"memory_utilization_percent is {percent!r:.40}, not above 0 and at most 100"
        )


def _context(
    model: ModelArchitecture, resolved: ResolvedSettings, layout: PoolLayout, blocks: int
) -> tuple[int, int]:
    """The longest context, and the tokens of the request that has to fit."""
    if resolved.max_context_tokens is not None:
        return resolved.max_context_tokens, resolved.max_context_tokens
    longest = layout.longest(blocks, model.max_context_tokens)
    needed = min(SMALLEST_CONTEXT_TOKENS, model.max_context_tokens)
    return max(longest, needed), needed
