"""How vLLM spends memory on one rank, V0 and V1.

`available KV = total * gpu_memory_utilization - weights - activation peak - non-torch`, and from 0.21
on also minus the estimate of CUDA graphs. Source: vLLM `v1/worker/gpu_worker.py`,
`determine_available_memory`.
"""

from dataclasses import dataclass

from kvscaler.budget.layout import PoolLayout
from kvscaler.budget.lines import BudgetLine
from kvscaler.budget.profiles import vllm_defaults as defaults
from kvscaler.budget.profiles.resolving import compute_dtype_of, kv_dtype_of, resolved
from kvscaler.budget.profiles.vllm_compressed import compressed_layout, is_compressed
from kvscaler.budget.profiles.vllm_memory import activation_line, driver_margin_bytes
from kvscaler.budget.profiles.vllm_overhead import graph_line, non_torch_line
from kvscaler.budget.profiles.vllm_pages import vllm_layout
from kvscaler.budget.profiles.weight_lines import Padding, weight_lines
from kvscaler.budget.settings import EngineSettings, ResolvedSettings
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator
from kvscaler.models import LayerKind, ModelArchitecture, Split

DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class VllmProfile:
    """vLLM at `version`."""

    version: Version = defaults.NEWEST

    @property
    def name(self) -> str:
        """`vllm-v1`, or `vllm-v0` for versions before 0.8."""
        return "vllm-v1" if self.version >= defaults.V1_DEFAULT else "vllm-v0"

    def resolve(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: EngineSettings
    ) -> ResolvedSettings:
        """vLLM's defaults by version and card."""
        compute = compute_dtype_of(model, settings)
        recurrent = any(group.kind is LayerKind.RECURRENT for group in model.groups)
        caching = settings.prefix_caching
        return resolved(
            settings,
            memory_utilization_percent=(
                settings.memory_utilization_percent or defaults.utilization_percent(self.version)
            ),
            max_sequences=(
                settings.max_sequences or defaults.max_sequences(accelerator, self.version)
            ),
            step_tokens=settings.step_tokens or self._step_tokens(model, accelerator, settings),
            block_tokens=settings.block_tokens or _block_tokens(model),
            compute_dtype=compute,
            kv_dtype=kv_dtype_of(settings, compute),
            prefix_caching=not recurrent if caching is None else caching,
        )

    def _step_tokens(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: EngineSettings
    ) -> int:
        """V0 without chunked prefill profiles a prompt of the whole context."""
        if self.version < defaults.V1_DEFAULT:
            context = settings.max_context_tokens or model.max_context_tokens
            chunk = 512 if self.version < defaults.LARGER_CHUNK else 2048
            return context if context <= 32_768 else chunk
        return defaults.step_tokens(accelerator, self.version, settings.offline)

    def usable_bytes(
        self, accelerator: Accelerator, settings: ResolvedSettings, lines: tuple[BudgetLine, ...]
    ) -> int:
        """`gpu_memory_utilization` of the device."""
        return int((accelerator.memory_bytes or 0) * settings.memory_utilization_percent / 100)

    def lines(
        self, model: ModelArchitecture, accelerator: Accelerator, settings: ResolvedSettings
    ) -> tuple[BudgetLine, ...]:
        """Weights, the profiling run's peak, non-torch memory, and graphs where they count."""
        found = [
            *weight_lines(
                model,
                settings,
                split=Split(
                    settings.tensor_parallel,
                    settings.pipeline_parallel,
                    # Data-parallel engines share one group of experts (`fused_moe/config.py`).
                    experts=settings.tensor_parallel * settings.data_parallel,
                ),
                expert_padding=expert_padding(model, accelerator, self.version),
            ),
            activation_line(model, settings, self.version),
            non_torch_line(accelerator, settings, self.version),
        ]
        if settings.cuda_graphs and self.version >= defaults.GRAPHS_COUNTED:
            found.append(graph_line(model, settings))
        return tuple(found)

    def driver_margin_bytes(self, model: ModelArchitecture, settings: ResolvedSettings) -> int:
        """What V0's driver rank has less than the workers whose KV size the log may show."""
        return driver_margin_bytes(model, settings, self.version)

    def layout(self, model: ModelArchitecture, settings: ResolvedSettings) -> PoolLayout:
        """Pages unified over groups (V1); every layer full in V0, which knows no windows."""
        if is_compressed(model.groups):
            return compressed_layout(model, settings)
        chunked = any(group.kind is LayerKind.CHUNKED for group in model.groups)
        hybrid = self.version >= defaults.V1_DEFAULT
        if len(model.groups) > 1 and self.version < defaults.HYBRID_GROUPS:
            hybrid = False
        if chunked and self.version < defaults.CHUNKED_GROUPS:
            hybrid = False
        return vllm_layout(model, settings, hybrid=hybrid)

    def printed_tokens(self, layout: PoolLayout, blocks: int, max_context_tokens: int) -> int:
        """The log's "GPU KV cache size": from 0.21 on concurrency times context."""
        if self.version >= defaults.GRAPHS_COUNTED:
            return int(layout.concurrency(blocks, max_context_tokens) * max_context_tokens)
        return blocks // len(layout.groups) * layout.block_tokens


def _block_tokens(model: ModelArchitecture) -> int:
    latent = any(group.kind is LayerKind.MLA for group in model.groups)
    return defaults.MLA_BLOCK_TOKENS if latent else DEFAULT_BLOCK_TOKENS


MARLIN_PADDING = Padding(128, 256)
TRITON_PADDING = Padding(256, 1)


def expert_padding(model: ModelArchitecture, accelerator: Accelerator, version: Version) -> Padding:
    """MXFP4 experts are padded for their kernel: Triton's on Hopper, Marlin's elsewhere.

    `model_executor/layers/quantization/mxfp4.py`: Marlin rounds the inner width to 128 and the hidden
    size to 256; Triton's swizzle on Hopper the inner width to 256.
    """
    if model.quantization is None or model.quantization.name != "mxfp4":
        return Padding()
    triton = accelerator.architecture == "hopper" and version >= defaults.TRITON_EXPERTS
    return TRITON_PADDING if triton else MARLIN_PADDING
