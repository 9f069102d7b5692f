"""Engines that give the pool a share of what is free once everything else stands.

`pool = share * (device - weights - activations - context)`; they differ in the share, the size of a
block, and what they allocate before. One module, because the rule is one:

* TensorRT-LLM: 0.9 of free memory after the engine (`KvCacheConfig.free_gpu_memory_fraction`,
  `cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp`), blocks of 32 tokens (64 before 0.17).
* LMDeploy: 0.8 of free memory after weights (`cache_max_entry_count`,
  `lmdeploy/turbomind/` and `pytorch/engine/executor/base.py`), blocks of 64 tokens.
* TGI: what 0.95 of the device leaves after warm-up
  (`server/text_generation_server/models/flash_causal_lm.py`, `TGI_WIGGLE_ROOM`), blocks of one token.
"""

from dataclasses import dataclass

from kvscaler.budget.layout import PoolGroup, PoolLayout
from kvscaler.budget.lines import GIB, Basis, BudgetLine
from kvscaler.budget.profiles.resolving import compute_dtype_of, kv_dtype_of, resolved
from kvscaler.budget.profiles.vllm_memory import forward_pass
from kvscaler.budget.profiles.weight_lines import weight_lines
from kvscaler.budget.rounding import ceil_div
from kvscaler.budget.settings import EngineSettings, ResolvedSettings
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator
from kvscaler.models import LayerKind, ModelArchitecture
from kvscaler.models.kv_formats import index_token_bytes, kv_format, layer_token_bytes

CONTEXT = (int(0.6 * GIB), int(0.3 * GIB), int(1.2 * GIB))
"""Driver context, libraries and the runtime's own buffers: a default and the range around it."""


@dataclass(frozen=True, slots=True)
class FreeShareProfile:
    """An engine whose pool is a share of free memory."""

    name: str
    share_percent: float
    block_tokens: int
    step_tokens: int
    max_sequences: int
    fixed_buffers_bytes: tuple[int, int, int] = (0, 0, 0)
    """Buffers beside activations: expected, least, most."""
    logit_bytes: float = 0.0
    """Bytes of runtime and decoder buffers per vocabulary entry and sequence."""
    of_device: bool = False
    """The share is of the whole device, less what is used, instead of what is free."""

    def resolve(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: EngineSettings
    ) -> ResolvedSettings:
        """The engine's defaults."""
        compute = compute_dtype_of(model, settings)
        return resolved(
            settings,
            memory_utilization_percent=settings.memory_utilization_percent or self.share_percent,
            max_sequences=settings.max_sequences or self.max_sequences,
            step_tokens=settings.step_tokens or self.step_tokens,
            block_tokens=settings.block_tokens or self.block_tokens,
            compute_dtype=compute,
            kv_dtype=kv_dtype_of(settings, compute),
        )

    def usable_bytes(
        self, accelerator: Accelerator, settings: ResolvedSettings, lines: tuple[BudgetLine, ...]
    ) -> int:
        """All lines, and the share of what they leave."""
        device = accelerator.memory_bytes or 0
        used = sum(line.bytes for line in lines)
        share = settings.memory_utilization_percent / 100
        if self.of_device:
            return int(device * share)
        return used + int((device - used) * share)

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, activations and buffers, context."""
        size, low, high, note = forward_pass(model, settings)
        extra, extra_low, extra_high = self.fixed_buffers_bytes
        logits = model.vocab_size * settings.max_sequences
        extra += int(logits * self.logit_bytes)
        extra_high += int(logits * self.logit_bytes * 1.2)
        value, least, most = CONTEXT
        return (
            *weight_lines(model, settings),
            BudgetLine(
                "activations", size + extra, Basis.DEFAULT, low + extra_low, high + extra_high, note
            ),
            BudgetLine(
                "context", value, Basis.DEFAULT, least, most, "driver context and libraries"
            ),
        )

    def layout(self, model: ModelArchitecture, settings: ResolvedSettings) -> PoolLayout:
        """Blocks over all layers that keep tokens; windows are not given back."""
        form = kv_format(settings.kv_dtype)
        size = 0.0
        layers = 0
        for group in model.groups:
            if group.kind is LayerKind.RECURRENT:
                continue
            count = ceil_div(group.layers, settings.pipeline_parallel)
            size += count * layer_token_bytes(group, form, settings.tensor_parallel)
            size += group.index_layers * index_token_bytes(group)
            layers += count
        block = PoolGroup(LayerKind.FULL, layers, settings.block_tokens)
        total = max(1, round(size * settings.block_tokens))
        return PoolLayout((block,), total, settings.step_tokens)

    def printed_tokens(self, layout: PoolLayout, blocks: int, max_context_tokens: int) -> int:
        """Tokens of all blocks."""
        return blocks * layout.block_tokens


RUNTIME_LOGIT_BYTES = 28.5
"""Runtime (9) and decoder (19.5) buffers of TensorRT-LLM's C++ runtime per vocabulary entry and
sequence: "2.66 GB for runtime buffers, 5.76 GB for decoder" at 151,936 entries and the default of
2,048 sequences (TensorRT-LLM issue 1188), 3 and 5 GB at 128,256 (tensorrtllm_backend issue 636)."""
LARGE_BATCH = Version(0, 11, 0)
"""From here on `trtllm-build --max_batch_size` is 2,048 by default."""
TORCH_RUNTIME = Version(1, 0, 0)
"""From here on the PyTorch runtime is the default, whose sampler needs no such buffers."""


def tensorrt_llm(version: Version | None) -> FreeShareProfile:
    """TensorRT-LLM: engine, execution context, runtime and decoder buffers come first."""
    known = version or TORCH_RUNTIME
    block = 64 if known < Version(0, 17, 0) else 32
    batch = 2048 if known >= LARGE_BATCH else 8
    logit = RUNTIME_LOGIT_BYTES if known < TORCH_RUNTIME else 6.0
    buffers = (int(0.6 * GIB), int(0.1 * GIB), int(2 * GIB))
    return FreeShareProfile("tensorrt-llm", 90.0, block, 8192, batch, buffers, logit)


def lmdeploy(version: Version | None) -> FreeShareProfile:
    """LMDeploy: the share is taken right after weights, before activations exist."""
    return FreeShareProfile("lmdeploy", 80.0, 64, 1, 256)


def tgi(version: Version | None) -> FreeShareProfile:
    """TGI: after a warm-up with the largest prefill."""
    buffers = (int(0.5 * GIB), 0, int(1.5 * GIB))
    return FreeShareProfile("tgi", 95.0, 1, 4096, 128, buffers, of_device=True)
