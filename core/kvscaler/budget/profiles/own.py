"""How our own paged engine spends memory, on a CPU and on CUDA.

The executor keeps to these lines by construction: it computes at most `step_tokens` tokens and
samples at most `max_sequences` rows a step, and gathers keys and values under a scratch cap.
"""

from kvscaler.budget.lines import Basis, BudgetLine
from kvscaler.budget.settings import AUTO, EngineSettings, ResolvedSettings
from kvscaler.hardware import Accelerator
from kvscaler.models import ModelArchitecture, canonical_dtype, dtype_bytes

MIB = 1 << 20

CPU_RUNTIME_BYTES = 620 * MIB
"""Resident set of the server before weights: interpreter, torch's libraries, HTTP, tokenizer.
Measured by `bench/bytes.py`."""
CUDA_CONTEXT_BYTES = 500 * MIB
"""CUDA context and libraries outside torch's allocator (0.13-0.25 GiB in vLLM's start-up
figures at one rank, more before the first kernel of every library is loaded)."""
ATTENTION_SCRATCH_BYTES = 32 * MIB
"""Cap of the buffers into which blocks are gathered for one call of attention."""

DEFAULT_BLOCK_TOKENS = 16
DEFAULT_STEP_TOKENS = 512
DEFAULT_MAX_SEQUENCES = 64
DEFAULT_UTILIZATION_PERCENT = 90.0


def activation_bytes(
    model: ModelArchitecture, settings: ResolvedSettings, compute_bytes: int
) -> int:
    """Peak of a step's temporaries: one layer's widest point, and the logits.

    A layer holds the residual, its normed copy, q/k/v, and gate, up and their product for all
    step tokens; the head holds fp32 logits and one copy for sampling, one row a sequence.
    """
    head_dim, heads = model.head_dim, model.attention_heads
    attention = (heads + 2 * model.kv_heads) * head_dim + heads * head_dim
    per_token = 3 * model.hidden_size + max(attention, 3 * model.intermediate_size)
    logits = settings.max_sequences * model.vocab_size * 4 * 2
    return settings.step_tokens * per_token * compute_bytes + logits


class OwnCpuProfile:
    """Our engine with the Torch executor on a CPU: memory is the container's limit."""

    name = "kvscaler-cpu"

    def resolve(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: EngineSettings
    ) -> ResolvedSettings:
        """Compute in fp32 unless told: only a CPU with bf16 instructions is faster in bf16."""
        return _resolve(settings, default_compute_dtype="float32")

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, activations, attention scratch and the process itself."""
        runtime = BudgetLine(
            "runtime",
            CPU_RUNTIME_BYTES,
            Basis.DEFAULT,
            int(CPU_RUNTIME_BYTES * 0.9),
            int(CPU_RUNTIME_BYTES * 1.1),
            "interpreter, torch libraries, server (measured)",
        )
        return (*_common_lines(model, settings), runtime)


class OwnCudaProfile:
    """Our engine with the Torch executor on one CUDA device."""

    name = "kvscaler-cuda"

    def resolve(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: EngineSettings
    ) -> ResolvedSettings:
        """Compute in the model's own element type unless told."""
        return _resolve(settings, default_compute_dtype=model.native_dtype)

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, activations, attention scratch and the CUDA context."""
        context = BudgetLine(
            "cuda context",
            CUDA_CONTEXT_BYTES,
            Basis.DEFAULT,
            CUDA_CONTEXT_BYTES // 2,
            CUDA_CONTEXT_BYTES * 2,
            "driver context and libraries outside torch's allocator",
        )
        return (*_common_lines(model, settings), context)


def _resolve(settings: EngineSettings, default_compute_dtype: str) -> ResolvedSettings:
    compute = default_compute_dtype
    if settings.compute_dtype != AUTO:
        compute = canonical_dtype(settings.compute_dtype)
    return ResolvedSettings(
        memory_utilization_percent=(
            settings.memory_utilization_percent or DEFAULT_UTILIZATION_PERCENT
        ),
        max_context_tokens=settings.max_context_tokens,
        max_sequences=settings.max_sequences or DEFAULT_MAX_SEQUENCES,
        step_tokens=settings.step_tokens or DEFAULT_STEP_TOKENS,
        block_tokens=settings.block_tokens or DEFAULT_BLOCK_TOKENS,
        compute_dtype=compute,
        kv_dtype=compute if settings.kv_dtype == AUTO else canonical_dtype(settings.kv_dtype),
    )


def _common_lines(model: ModelArchitecture, settings: ResolvedSettings) -> tuple[BudgetLine, ...]:
    element = dtype_bytes(settings.compute_dtype)
    activations = activation_bytes(model, settings, element)
    return (
        BudgetLine.exact(
            "weights",
            model.weight_bytes(settings.compute_dtype),
            f"{model.parameters:,} parameters x {element} B ({settings.compute_dtype})",
        ),
        BudgetLine(
            "activations",
            activations,
            Basis.COMPUTED,
            activations // 4,
            activations,
            f"{settings.step_tokens} step tokens, {settings.max_sequences} rows of logits",
        ),
        BudgetLine(
            "attention scratch",
            ATTENTION_SCRATCH_BYTES,
            Basis.DEFAULT,
            0,
            ATTENTION_SCRATCH_BYTES,
            "cap of gathered keys and values",
        ),
    )
