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
from kvscaler.budget.lines import GIB, Basis, BudgetLine, Range
from kvscaler.budget.profiles.resolving import compute_dtype_of, kv_dtype_of, resolved
from kvscaler.budget.profiles.vllm_memory import FORWARD_HIDDEN, forward_pass
from kvscaler.budget.profiles.weight_lines import weight_lines
from kvscaler.budget.rounding import ceil_div
from kvscaler.budget.settings import EngineSettings, ResolvedSettings
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator
from kvscaler.models import LayerKind, ModelArchitecture
from kvscaler.models.kv_formats import index_token_bytes, kv_format, layer_token_bytes

CONTEXT = Range(0.6 * GIB, 0.3 * GIB, 1.2 * GIB)
"""Driver context and libraries."""
TRT_CONTEXT = Range(1.3 * GIB, 1.1 * GIB, 1.6 * GIB)
"""With the inputs, outputs and plugins' workspaces of the execution context: 1.2, 1.2, 1.5 and 1.6 are left
over in four logs (TensorRT-LLM issues 224, 1188, 2268; tensorrtllm_backend docs/multimodal.md)."""
TRT_HIDDEN = Range(6.0, 5.0, 7.0)
"""Copies of the hidden state in an engine's planned activations (within 0.2 in issues 224 and 2268)."""
NO_BUFFERS = Range(0, 0, 0)
TGI_CONTEXT = Range(1.1 * GIB, 0.5 * GIB, 2.2 * GIB)
"""With the warm-up's fragments."""


@dataclass(frozen=True, slots=True)
class FreeShareProfile:
    """An engine whose pool is a share of free memory."""

    name: str
    share_percent: float
    block_tokens: int
    step_tokens: int
    max_sequences: int
    context: Range
    """Driver context, libraries and buffers of a fixed size."""
    hidden: Range = FORWARD_HIDDEN
    """Copies of the hidden state that live at a layer's peak."""
    logit_bytes: Range = NO_BUFFERS
    """Bytes of runtime and decoder buffers per vocabulary entry and sequence."""
    input_tokens: int | None = None
    """Engines built for `max_batch_size * max_input_len` tokens at once: the default input length."""
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
            step_tokens=settings.step_tokens or self._step_tokens(settings),
            block_tokens=settings.block_tokens or self.block_tokens,
            compute_dtype=compute,
            kv_dtype=kv_dtype_of(settings, compute),
        )

    def _step_tokens(self, settings: EngineSettings) -> int:
        if self.input_tokens is None:
            return self.step_tokens
        return self.input_tokens * (settings.max_sequences or self.max_sequences)

    def usable_bytes(
        self, accelerator: Accelerator, settings: ResolvedSettings, lines: tuple[BudgetLine, ...]
    ) -> int:
        """All lines, and the share of what they leave."""
        device = accelerator.memory_bytes or 0
        used = sum(line.bytes for line in lines)
        share = settings.memory_utilization_percent / 100
        if self.of_device:
            return int(device * share)
        return min(device, used + int((device - used) * share))

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, activations and buffers, context."""
        size, low, high, note = forward_pass(model, settings, hidden=self.hidden)
        found = [
            *weight_lines(model, settings),
            BudgetLine("activations", size, Basis.DEFAULT, low, high, note),
        ]
        buffers = self.logit_bytes.times(model.vocab_size * settings.max_sequences)
        if buffers.value:
            note = f"buffers of {settings.max_sequences} x {model.vocab_size} logits"
            found.append(buffers.line("buffers", note))
        context = "driver context, libraries, fixed buffers"
        return (*found, self.context.line("context", context))

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


RUNTIME_LOGITS = Range(28.5, 26.0, 31.0)
"""Runtime (9) and decoder (19.5) buffers of TensorRT-LLM's C++ runtime per vocabulary entry and
sequence: "2.66 GB for runtime buffers, 5.76 GB for decoder" at 151,936 entries and the default of
2,048 sequences (TensorRT-LLM issue 1188), 3 and 5 GB at 128,256 (tensorrtllm_backend issue 636)."""
TORCH_LOGITS = Range(6.0, 2.0, 12.0)
"""The PyTorch runtime's sampler: logits in 16 and 32 bits."""
BATCHES = ((Version(0, 14, 0), 2048), (Version(0, 11, 0), 256), (Version(0, 8, 0), 1))
"""`trtllm-build --max_batch_size` by default: 256 from 0.11 on and 2,048 from 0.14 on (release notes,
"API Changes"), 1 in the first `trtllm-build`, and 8 in the scripts before it."""
SCRIPT_BATCH = 8
TOKENS_AT_ONCE = Version(0, 11, 0)
"""From here on `max_num_tokens` is 8,192 by default; before, an engine was built for
`max_batch_size * max_input_len`, the latter 1,024 by default."""
TORCH_RUNTIME = Version(1, 0, 0)
"""From here on the PyTorch runtime is the default, whose sampler needs no such buffers."""


def tensorrt_llm(version: Version | None) -> FreeShareProfile:
    """TensorRT-LLM: engine, execution context, runtime and decoder buffers come first."""
    known = version or TORCH_RUNTIME
    return FreeShareProfile(
        "tensorrt-llm",
        90.0,
        block_tokens=64 if known < Version(0, 17, 0) else 32,
        step_tokens=8192,
        max_sequences=next((size for least, size in BATCHES if known >= least), SCRIPT_BATCH),
        context=TRT_CONTEXT,
        hidden=TRT_HIDDEN,
        logit_bytes=RUNTIME_LOGITS if known < TORCH_RUNTIME else TORCH_LOGITS,
        input_tokens=None if known >= TOKENS_AT_ONCE else 1024,
    )


def lmdeploy(version: Version | None) -> FreeShareProfile:
    """LMDeploy: the share is taken right after weights, before activations exist."""
    return FreeShareProfile("lmdeploy", 80.0, 64, 1, 256, CONTEXT)


def tgi(version: Version | None) -> FreeShareProfile:
    """TGI: after a warm-up with the largest prefill."""
    return FreeShareProfile("tgi", 95.0, 1, 4096, 128, TGI_CONTEXT, of_device=True)
