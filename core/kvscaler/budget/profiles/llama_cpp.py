"""How llama.cpp spends memory: no pool to size, `n_ctx` cells are allocated as asked.

Sources: llama.cpp `src/llama-kv-cache.cpp` and `llama-kv-cache-iswa.cpp` (layers with a window get
`window + ubatch` cells, padded to 256), `llama-memory-recurrent.cpp` (states in 32 bits per sequence),
`llama-context.cpp` (the compute buffer is dominated by `ubatch` rows of logits in 32 bits).
"""

from dataclasses import dataclass

from kvscaler.budget.layout import PoolGroup, PoolLayout
from kvscaler.budget.lines import Basis, BudgetLine
from kvscaler.budget.profiles.resolving import resolved
from kvscaler.budget.profiles.weight_lines import weight_lines
from kvscaler.budget.rounding import ceil_div, round_up
from kvscaler.budget.settings import AUTO, EngineSettings, ResolvedSettings
from kvscaler.hardware import Accelerator
from kvscaler.models import LayerKind, ModelArchitecture
from kvscaler.models.kv_formats import kv_format, layer_token_bytes, state_bytes

MIB = 1 << 20
DEFAULT_CONTEXT_TOKENS = 4096
UBATCH_TOKENS = 512
CELL_PADDING = 256
FLOAT_BYTES = 4
COMPUTE_EXTRA = (12 * MIB, 4 * MIB, 320 * MIB)
"""Beside the logits: 5 to 15 MiB with everything on one device, more where layers are split."""
CONTEXT = (300 * MIB, 150 * MIB, 600 * MIB)
"""CUDA context and cuBLAS workspace of each device."""


@dataclass(frozen=True, slots=True)
class LlamaCppProfile:
    """llama.cpp with all layers on the device, split by layer over `pipeline_parallel` devices."""

    name: str = "llama.cpp"

    def resolve(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: EngineSettings
    ) -> ResolvedSettings:
        """f16 cache, one slot; `-c` is the total over slots."""
        asked = settings.kv_dtype.casefold()
        form = kv_format("float16" if asked in (AUTO.casefold(), "auto") else settings.kv_dtype)
        context = settings.max_context_tokens or min(
            DEFAULT_CONTEXT_TOKENS, model.max_context_tokens
        )
        found = resolved(
            settings,
            memory_utilization_percent=100.0,
            max_context_tokens=context,
            max_sequences=settings.max_sequences or 1,
            step_tokens=settings.step_tokens or UBATCH_TOKENS,
            block_tokens=1,
            compute_dtype="float16" if model.native_dtype == "float16" else "bfloat16",
            kv_dtype=form.name,
        )
        layout = self.layout(model, found)
        cells = context * layout.block_bytes + layout.fixed_bytes
        kept = settings.kv_cache_bytes if settings.kv_cache_bytes is not None else cells
        return resolved(
            settings,
            memory_utilization_percent=100.0,
            max_context_tokens=context,
            max_sequences=found.max_sequences,
            step_tokens=found.step_tokens,
            block_tokens=1,
            compute_dtype=found.compute_dtype,
            kv_dtype=found.kv_dtype,
            kv_cache_bytes=kept,
        )

    def usable_bytes(
        self, accelerator: Accelerator, settings: ResolvedSettings, lines: tuple[BudgetLine, ...]
    ) -> int:
        """The whole device; the cells that were asked for take what they need of it."""
        return accelerator.memory_bytes or 0

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, the compute buffer, recurrent states and the context."""
        logits = model.vocab_size * settings.step_tokens * FLOAT_BYTES
        extra, least, most = COMPUTE_EXTRA
        found = [
            *weight_lines(model, settings),
            BudgetLine(
                "compute buffer",
                logits + extra,
                Basis.COMPUTED,
                logits + least,
                logits + most,
                f"logits of {settings.step_tokens} tokens in 32 bits",
            ),
            BudgetLine("context", *_default(CONTEXT), "driver context and libraries"),
        ]
        states = sum(
            ceil_div(group.layers, settings.pipeline_parallel)
            * state_bytes(group, FLOAT_BYTES)
            * settings.max_sequences
            for group in model.groups
        )
        if states:
            found.append(BudgetLine.exact("states", states, "recurrent states of all slots"))
        return tuple(found)

    def layout(self, model: ModelArchitecture, settings: ResolvedSettings) -> PoolLayout:
        """A cell a token over full layers; window layers have their own, few, fixed cells."""
        form = kv_format(settings.kv_dtype)
        size = fixed = 0.0
        layers = 0
        context = settings.max_context_tokens or DEFAULT_CONTEXT_TOKENS
        for group in model.groups:
            if group.kind is LayerKind.RECURRENT:
                continue
            token = ceil_div(group.layers, 1) * layer_token_bytes(group, form)
            token /= settings.pipeline_parallel
            window = group.window_tokens
            if group.kind is LayerKind.SLIDING and window is not None and window < context:
                cells = round_up(window + settings.step_tokens, CELL_PADDING)
                fixed += token * min(context, cells)
            else:
                size += token
                layers += group.layers
        block = PoolGroup(LayerKind.FULL, layers, 1)
        return PoolLayout(
            (block,), max(1, round(size)), settings.step_tokens, fixed_bytes=round(fixed)
        )

    def printed_tokens(self, layout: PoolLayout, blocks: int, max_context_tokens: int) -> int:
        """Cells."""
        return blocks


def _default(values: tuple[int, int, int]) -> tuple[int, Basis, int, int]:
    value, low, high = values
    return value, Basis.DEFAULT, low, high
