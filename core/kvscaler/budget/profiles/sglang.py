"""How SGLang spends memory: a static fraction of what is free before the weights, for weights and pool.

`pool = free_after_weights - free_before_weights * (1 - mem_fraction_static)`; activations and CUDA
graphs live in the rest. Sources: SGLang `srt/model_executor/model_runner.py` and
`model_runner_kv_cache_mixin.py` (pool size, window and state pools), `srt/server_args.py` (defaults).
"""

from dataclasses import dataclass

from kvscaler.budget.layout import PoolGroup, PoolLayout
from kvscaler.budget.lines import GIB, Basis, BudgetLine
from kvscaler.budget.profiles.resolving import compute_dtype_of, kv_dtype_of, resolved
from kvscaler.budget.profiles.weight_lines import weight_lines
from kvscaler.budget.settings import EngineSettings, ResolvedSettings
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator
from kvscaler.models import LayerKind, ModelArchitecture, dtype_bytes
from kvscaler.models.kv_formats import index_token_bytes, kv_format, layer_token_bytes

NEWEST = Version(0, 5, 23)
COMPUTED_FRACTION = Version(0, 5, 0)
"""From here on the default fraction follows from the card's memory; before, from the ranks."""
WINDOW_RATIO = 0.8
"""`swa_full_tokens_ratio`: tokens of the window pool per token of the full pool."""
STATE_RATIO = 0.9
"""`mamba_full_memory_ratio`: bytes of the state pool per byte of the KV pool."""
CONTEXT_BYTES = {"npu": int(0.25 * GIB), "cuda": int(0.55 * GIB)}
"""Device memory that is gone before weights load: 78.6 of 79.2 GiB are free on an H100, 60.8 to 61.1 of
61.3 on an Ascend die (`avail mem` lines of start-up logs)."""
CONTEXT_SPREAD = 0.45 * GIB
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
        gone = CONTEXT_BYTES.get(self.device, CONTEXT_BYTES["cuda"])
        free = (accelerator.memory_bytes or 0) - gone
        return gone + int(free * settings.memory_utilization_percent / 100)

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, the context, and the pool of recurrent states."""
        attention = max(1, settings.tensor_parallel // settings.data_parallel)
        gone = CONTEXT_BYTES.get(self.device, CONTEXT_BYTES["cuda"])
        found = [
            *weight_lines(model, settings, attention_parallel=attention),
            BudgetLine(
                "context",
                gone,
                Basis.DEFAULT,
                max(0, int(gone - CONTEXT_SPREAD)),
                int(gone + CONTEXT_SPREAD),
                "driver context and libraries, before weights load",
            ),
        ]
        if any(group.kind is LayerKind.RECURRENT for group in model.groups):
            room = self.usable_bytes(accelerator, settings, ()) - sum(x.bytes for x in found)
            states = max(0, int(room * STATE_RATIO / (1 + STATE_RATIO)))
            note = f"pool of recurrent states, {STATE_RATIO:g} bytes per byte of KV cache"
            found.append(BudgetLine("states", states, Basis.COMPUTED, states // 2, states, note))
        return tuple(found)

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
