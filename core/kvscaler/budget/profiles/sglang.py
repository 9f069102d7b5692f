"""How SGLang spends memory: a static fraction of what is free before the weights, for weights and pool.

`pool = free_after_weights - free_before_weights * (1 - mem_fraction_static)`; activations and CUDA
graphs live in the rest. Sources: SGLang `srt/model_executor/model_runner.py` and
`model_runner_kv_cache_mixin.py` (pool size, window and state pools), `srt/server_args.py` (defaults).
"""

from dataclasses import dataclass

from kvscaler.budget.layout import PoolGroup, PoolLayout
from kvscaler.budget.lines import GIB, Basis, BudgetLine, Range
from kvscaler.budget.profiles.resolving import compute_dtype_of, kv_dtype_of, resolved
from kvscaler.budget.profiles.weight_lines import weight_lines
from kvscaler.budget.settings import EngineSettings, ResolvedSettings
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator
from kvscaler.models import LayerKind, ModelArchitecture, Split, dtype_bytes
from kvscaler.models.kv_formats import index_token_bytes, kv_format, layer_token_bytes

NEWEST = Version(0, 5, 23)
COMPUTED_FRACTION = Version(0, 5, 0)
"""From here on the default fraction follows from the card's memory; before, from the ranks."""
WINDOW_RATIO = 0.8
"""`swa_full_tokens_ratio`: tokens of the window pool per token of the full pool."""
STATE_RATIO = 0.9
"""`mamba_full_memory_ratio`: bytes of the state pool per byte of the KV pool."""
ONE_RANK = Range(0.6 * GIB, 0.4 * GIB, 0.9 * GIB)
SEVERAL_RANKS = Range(1.75 * GIB, 1.45 * GIB, 2.1 * GIB)
PCIE_RANKS = Range(0.7 * GIB, 0.5 * GIB, 1.0 * GIB)
NPU_RANK = Range(0.3 * GIB, 0.15 * GIB, 0.55 * GIB)
"""Device memory that is gone before weights load ("Load weight begin. avail mem" of public start-up
logs): 78.3 to 78.8 of 79.2 GiB are left on one H100, 77.2 to 77.8 with several ranks over NVLink ("Init
torch distributed ends. mem usage=1.25 GB"), 22.9 of 23.6 on two consumer cards, and 60.8 to 61.1 of 61.3
on an Ascend die, however many."""
NPU_LOADING = Range(0.4 * GIB, 0.05 * GIB, 1.5 * GIB)
"""What loading leaves behind on an Ascend die: 16-bit Qwen3 32B takes 8.01 and 4.15 GiB of "mem usage" on
8 and 16 dies, 0.4 and 0.3 above its weights, in 8 bits 0.5 and 0.3 on 4 and 8; Qwen3 235B 0.03 on 16,
Qwen3 30B and DeepSeek R1 with experts in 8 and 4 bits 1.1 to 1.4 (SGLang logs at shun8686/for_debug)."""
PAGE_TOKENS = {"npu": 128}
"""Tokens of a page where it is not 1 (Ascend backends: 128)."""


@dataclass(frozen=True, slots=True)
class SglangProfile:
    """SGLang at `version` on a kind of device (`cuda`, `rocm`, `npu`)."""

    device: str = "cuda"
    version: Version = NEWEST
    name: str = "sglang"

    def resolve(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: EngineSettings
    ) -> ResolvedSettings:
        """SGLang's defaults by card and ranks."""
        compute = compute_dtype_of(model, settings)
        ranks = settings.tensor_parallel * settings.pipeline_parallel
        chunk, graphs = _batch_defaults(accelerator, settings.tensor_parallel)
        chunk = settings.step_tokens or chunk
        percent = settings.memory_utilization_percent
        if percent is None:
            percent = self._fraction_percent(accelerator, chunk, graphs, ranks)
        return resolved(
            settings,
            memory_utilization_percent=percent,
            max_sequences=settings.max_sequences or 2048,
            step_tokens=chunk,
            block_tokens=settings.block_tokens or PAGE_TOKENS.get(self.device, 1),
            compute_dtype=compute,
            kv_dtype=kv_dtype_of(settings, compute),
        )

    def _fraction_percent(
        self, accelerator: Accelerator, chunk: int, graphs: int, ranks: int
    ) -> float:
        if self.version < COMPUTED_FRACTION:
            for least, percent in ((16, 79.0), (8, 81.0), (4, 85.0), (2, 87.0)):
                if ranks >= least:
                    return percent
            return 88.0
        memory_mib = (accelerator.memory_bytes or 0) / (1 << 20)
        reserved = 512 + chunk * 1.5 + graphs * 2 + ranks / 8 * 1024
        return round(100 * max(0.1, (memory_mib - reserved) / memory_mib), 1)

    def usable_bytes(
        self, accelerator: Accelerator, settings: ResolvedSettings, lines: tuple[BudgetLine, ...]
    ) -> int:
        """The fraction of what is free before weights load, and what was gone before."""
        gone = int(self._context(accelerator, settings).value)
        free = (accelerator.memory_bytes or 0) - gone
        share = settings.memory_utilization_percent / 100
        return min(accelerator.memory_bytes or 0, gone + int(free * share))

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, the context, and the pool of recurrent states."""
        found = [
            # A drafter is loaded after the pool, into what the fraction leaves free.
            *weight_lines(model, settings, split=split_of(settings), draft=False),
            self._context(accelerator, settings).line(
                "context", "driver context and libraries, before weights load"
            ),
        ]
        if self.device == "npu":
            found.append(NPU_LOADING.line("loading", "what loading weights leaves behind"))
        if any(group.kind is LayerKind.RECURRENT for group in model.groups):
            room = self.usable_bytes(accelerator, settings, ()) - sum(x.bytes for x in found)
            states = max(0, int(room * STATE_RATIO / (1 + STATE_RATIO)))
            note = f"pool of recurrent states, {STATE_RATIO:g} bytes per byte of KV cache"
            found.append(BudgetLine("states", states, Basis.COMPUTED, states // 2, states, note))
        return tuple(found)

    def _context(self, accelerator: Accelerator, settings: ResolvedSettings) -> Range:
        if self.device == "npu":
            return NPU_RANK
        if settings.tensor_parallel * settings.pipeline_parallel == 1:
            return ONE_RANK
        return PCIE_RANKS if accelerator.link == "pcie" else SEVERAL_RANKS

    def layout(self, model: ModelArchitecture, settings: ResolvedSettings) -> PoolLayout:
        """One token's keys and values a cell, in pages; a window pool grows along by its ratio."""
        form = kv_format(settings.kv_dtype)
        attention = max(1, settings.tensor_parallel // settings.data_parallel)
        size = 0.0
        layers = 0
        for group in model.groups:
            if group.kind is LayerKind.RECURRENT:
                continue
            count = -(-group.layers // settings.pipeline_parallel)
            token = layer_token_bytes(group, form, attention)
            windowed = group.kind in (LayerKind.SLIDING, LayerKind.CHUNKED)
            ratio = WINDOW_RATIO if windowed and len(model.groups) > 1 else 1.0
            size += count * token * ratio
            size += group.index_layers * self._index_bytes(model, group.index_dim)
            layers += count
        page = settings.block_tokens
        block = PoolGroup(LayerKind.FULL, layers, page * settings.context_parallel)
        return PoolLayout((block,), max(1, round(size * page)), settings.step_tokens)

    def _index_bytes(self, model: ModelArchitecture, index_dim: int) -> int:
        """Ascend keeps index keys in 16 bits, others in fp8 with a scale."""
        if not index_dim:
            return 0
        if self.device == "npu":
            return index_dim * dtype_bytes(model.native_dtype)
        return max(index_token_bytes(group) for group in model.groups)

    def printed_tokens(self, layout: PoolLayout, blocks: int, max_context_tokens: int) -> int:
        """`max_total_num_tokens`."""
        return blocks * layout.block_tokens


def split_of(settings: ResolvedSettings) -> Split:
    """How SGLang divides a model: with data-parallel attention embeddings are on every rank, and the
    head is shared by all unless each replica keeps its own; shared experts are not divided where
    tokens travel to the experts (`models/deepseek_v2.py`)."""
    attention = max(1, settings.tensor_parallel // settings.data_parallel)
    replicas = settings.data_parallel > 1
    return Split(
        settings.tensor_parallel,
        settings.pipeline_parallel,
        attention=attention,
        shared_experts=1 if settings.expert_parallel else None,
        dense=settings.dense_parallel,
        embeddings=1 if replicas else None,
        head=attention if settings.data_parallel_head else None,
    )


def _batch_defaults(accelerator: Accelerator, tensor_parallel: int) -> tuple[int, int]:
    """`chunked_prefill_size` and `cuda_graph_max_bs` by memory (`server_args.py`)."""
    gib = (accelerator.memory_bytes or 0) / GIB
    few = tensor_parallel < 4
    if gib < 20:
        return 2048, 8 if few else 16
    if gib < 35:
        return 2048, 24 if few else 80
    if gib < 60:
        return 4096, 32 if few else 160
    if gib < 90:
        return 8192, 256 if few else 512
    if gib < 160:
        return 8192, 256 if few else 512
    return 16384, 512
