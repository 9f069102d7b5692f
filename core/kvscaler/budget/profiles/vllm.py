"""How vLLM V1 spends memory on one CUDA device, for uniform attention.

`available KV = total * gpu_memory_utilization - weights - activation peak - non-torch`. The
activation peak is normally the dummy sampler pass over `max_num_seqs` rows of logits: 38.4 to
39.6 bytes x vocabulary x sequences in public start-up logs, independent of context length.
Source: vllm/v1/worker/gpu_worker.py (profile run) and start-up figures in llm-d-planner,
docs/empirical-vllm-memory-results.md (Llama-3.1-8B on H100: 4.76 GiB = 38.9 x 128256 x 1024).
"""

from kvscaler.budget.lines import GIB, Basis, BudgetLine
from kvscaler.budget.settings import AUTO, EngineSettings, ResolvedSettings
from kvscaler.hardware import Accelerator
from kvscaler.models import ModelArchitecture, canonical_dtype, dtype_bytes

SAMPLER_BYTES_PER_LOGIT = 39.0
SAMPLER_BYTES_PER_LOGIT_RANGE = (38.4, 39.6)
NON_TORCH_BYTES = int(0.14 * GIB)
NON_TORCH_RANGE_BYTES = (int(0.02 * GIB), int(0.25 * GIB))
LARGE_CARD_BYTES = 70 * GIB
"""From this size on (A100 excepted) vLLM defaults to 1,024 sequences instead of 256."""
DEFAULT_UTILIZATION_PERCENT = 92.0
"""`gpu_memory_utilization` in vLLM 0.33; 90 before."""


class VllmV1Profile:
    """vLLM V1 with one rank. CUDA graphs are left to the interval of the non-torch line."""

    name = "vllm-v1"

    def resolve(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: EngineSettings
    ) -> ResolvedSettings:
        """vLLM's defaults by card size."""
        memory_bytes = accelerator.memory_bytes or 0
        large = memory_bytes >= LARGE_CARD_BYTES and "a100" not in accelerator.name
        compute = model.native_dtype
        if settings.compute_dtype != AUTO:
            compute = canonical_dtype(settings.compute_dtype)
        return ResolvedSettings(
            memory_utilization_percent=(
                settings.memory_utilization_percent or DEFAULT_UTILIZATION_PERCENT
            ),
            max_context_tokens=settings.max_context_tokens,
            max_sequences=settings.max_sequences or (1024 if large else 256),
            step_tokens=settings.step_tokens or (8192 if large else 2048),
            block_tokens=settings.block_tokens or 16,
            compute_dtype=compute,
            kv_dtype=compute if settings.kv_dtype == AUTO else canonical_dtype(settings.kv_dtype),
        )

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, the larger of sampler pass and forward pass, and non-torch memory."""
        element = dtype_bytes(settings.compute_dtype)
        rows = model.vocab_size * settings.max_sequences
        sampler = int(SAMPLER_BYTES_PER_LOGIT * rows)
        low, high = (int(factor * rows) for factor in SAMPLER_BYTES_PER_LOGIT_RANGE)
        forward = int(
            settings.step_tokens * element * (2 * model.hidden_size + 3 * model.intermediate_size)
        )
        if sampler >= forward:
            note = f"sampler pass of {settings.max_sequences} x {model.vocab_size} logits"
        else:
            note = f"forward pass of {settings.step_tokens} tokens"
            low, high = forward // 2, forward * 2
        return (
            BudgetLine.exact(
                "weights",
                model.weight_bytes(settings.compute_dtype),
                f"{model.parameters:,} parameters x {element} B ({settings.compute_dtype})",
            ),
            BudgetLine("activations", max(sampler, forward), Basis.DEFAULT, low, high, note),
            BudgetLine(
                "non-torch",
                NON_TORCH_BYTES,
                Basis.DEFAULT,
                *NON_TORCH_RANGE_BYTES,
                "driver context, NCCL, libraries",
            ),
        )
