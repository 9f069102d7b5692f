"""What vLLM spends outside torch's allocator: driver context, libraries, NCCL, and CUDA graphs.

Every range holds what logs print for the figure itself ("non-torch forward increase memory",
"Estimated CUDA graph memory"), class by class; none is fitted to the size of a KV cache.
"""

from kvscaler.budget.lines import GIB, BudgetLine, Range
from kvscaler.budget.profiles import vllm_defaults as defaults
from kvscaler.budget.rounding import ceil_div
from kvscaler.budget.settings import ResolvedSettings
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator
from kvscaler.models import ModelArchitecture

ONE_RANK = {
    "hopper": Range(0.14 * GIB, 0.10 * GIB, 0.25 * GIB),
    "blackwell": Range(0.26 * GIB, 0.12 * GIB, 0.50 * GIB),
    "ampere": Range(0.02 * GIB, 0.0, 0.15 * GIB),
    "ada": Range(0.02 * GIB, 0.0, 0.15 * GIB),
    "": Range(0.10 * GIB, 0.0, 0.30 * GIB),
}
"""One rank by generation: 0.07 to 0.14 in ten logs of H100 (nine in llm-d-planner,
docs/empirical-vllm-memory-results.md), 0.02 on RTX 4090, A100 40 GB and a 16 GB card, 0.26 on RTX PRO
6000. Where the generation is not known, between them."""
NEWER_SMALL = Range(0.16 * GIB, 0.02 * GIB, 0.30 * GIB)
"""Ampere and Ada since sampling kernels of their own came (0.16 on a 16 GB card)."""
TWO_RANKS = Range(0.56 * GIB, 0.50 * GIB, 1.38 * GIB)
"""Over NVLink: 0.54, 0.55 and 0.61 on H100, 0.73 on a 48 GB card, 1.38 on H200."""
MORE_RANKS = Range(1.00 * GIB, 0.60 * GIB, 1.65 * GIB)
"""Four and more over NVLink: 0.63 (GH200), 0.95 (GB200), 1.63 (B300) printed, 1.0 left over on H100."""
MORE_RANKS_2025 = Range(1.80 * GIB, 1.40 * GIB, 2.30 * GIB)
"""The same in V1 before 0.13, whose NCCL keeps larger buffers: 1.5 and 2.4 are left over on four H100, 1.8
on eight H200."""
LINK_UNKNOWN = Range(0.60 * GIB, 0.18 * GIB, 1.50 * GIB)
"""Several ranks of a card of which it is not known whether NVLink or PCIe joins them."""
V0_SEVERAL = Range(0.75 * GIB, 0.55 * GIB, 1.30 * GIB)
"""V0 on several ranks (0.73 on two, 0.71 on four: MapCoder vllm.log)."""
PCIE_RANKS = Range(0.22 * GIB, 0.14 * GIB, 0.40 * GIB)
"""Several ranks over PCIe: no custom all-reduce, small NCCL buffers (0.16-0.25 on T4 and RTX 4090)."""
SMALLER_NCCL = Version(0, 13, 0)
V0_LEAN = Version(0, 7, 0)
SMALL_CARD_BYTES = 40 * GIB
"""Cards below this have no NVLink worth the name."""
V0_ONE_RANK = Range(0.08 * GIB, 0.03 * GIB, 0.26 * GIB)
"""V0 from 0.7 on, one rank: 0.04, 0.05, 0.08 and 0.11 on cards of 12, 16, 48 and 80 GB."""
V0_FIRST = Range(0.35 * GIB, 0.20 * GIB, 0.50 * GIB)
"""V0 before (0.35 in issue 10517 on an RTX 3090, 0.26 on an A100)."""
V0_LARGE_CARD = Range(0.90 * GIB, 0.35 * GIB, 1.80 * GIB)
"""V0 on one large card (1.79 on an H100 in pull request 10511)."""
BEFORE_MEASURED = Range(0.90 * GIB, 0.05 * GIB, 1.80 * GIB)
"""Before 0.6.4 the peak was read from the device's free memory, with torch's fragments and the
context in it (`worker/worker.py`, `determine_num_available_blocks`): 0.05, 1.1 and 2.5 are left over on
cards of 40, 24 and 192 GB."""
UNIFIED = Range(2.5 * GIB, 1.6 * GIB, 3.5 * GIB)
"""On unified memory free memory is the host's, so the process itself and the page cache count: 1.9 to
4.3 GiB are left over in eight logs of GB10 machines."""

GRAPH_BASE = Range(0.02 * GIB, 0.01 * GIB, 0.05 * GIB)
GRAPH_LAYER = Range(0.0003 * GIB, 0.00012 * GIB, 0.00046 * GIB)
"""CUDA graphs: a base, and so much for each captured batch size and layer, whose kernels a graph holds. vLLM
0.19 to 0.27 estimates 0.06 GiB at 3 sizes of 78 layers, 0.14 at 11 of 30 and 19 of 48, 0.55 and 0.51 at 51
of 28 and 32, 0.69 at 23 of 88, 0.96 and 0.91 at 51 of 64 and 80."""


def non_torch_line(
    accelerator: Accelerator, settings: ResolvedSettings, version: Version
) -> BudgetLine:
    """Memory outside torch's allocator on one rank."""
    ranks = settings.tensor_parallel * settings.pipeline_parallel
    found, note = _non_torch(accelerator, ranks, version)
    return found.line("non-torch", note)


def _non_torch(accelerator: Accelerator, ranks: int, version: Version) -> tuple[Range, str]:
    small = (accelerator.memory_bytes or 0) < SMALL_CARD_BYTES
    if accelerator.unified:
        return UNIFIED, "driver context; the host's share"
    if version < defaults.MEASURED_BY_TORCH:
        return BEFORE_MEASURED, "driver context, libraries, fragments"
    if ranks == 1:
        if version < defaults.V1_DEFAULT:
            first = V0_FIRST if small else V0_LARGE_CARD
            return V0_ONE_RANK if version >= V0_LEAN else first, "driver context, libraries"
        found = ONE_RANK.get(accelerator.architecture, ONE_RANK[""])
        if version >= defaults.SORTLESS_SAMPLER and accelerator.architecture in ("ampere", "ada"):
            found = NEWER_SMALL
        return found, "driver context, libraries"
    if accelerator.link == "pcie" or small:
        return PCIE_RANKS, f"driver context, NCCL of {ranks} ranks over PCIe"
    if version < defaults.V1_DEFAULT:
        return V0_SEVERAL, f"driver context, libraries, NCCL of {ranks} ranks"
    if not accelerator.link:
        return LINK_UNKNOWN, f"driver context, libraries, NCCL of {ranks} ranks"
    several = MORE_RANKS if version >= SMALLER_NCCL else MORE_RANKS_2025
    return TWO_RANKS if ranks < 4 else several, f"driver context, libraries, NCCL of {ranks} ranks"


def graph_line(model: ModelArchitecture, settings: ResolvedSettings) -> BudgetLine:
    """CUDA graphs, as estimated before capture (from 0.21 on)."""
    sizes = captured_sizes(settings.max_sequences * (1 + settings.speculative_tokens))
    layers = ceil_div(model.layers, settings.pipeline_parallel)
    each = GRAPH_LAYER.times(sizes * layers)
    whole = Range(
        GRAPH_BASE.value + each.value, GRAPH_BASE.low + each.low, GRAPH_BASE.high + each.high
    )
    return whole.line("cuda graphs", f"{sizes} captured batch sizes of {layers} layers")


def captured_sizes(batch_tokens: int) -> int:
    """Batch sizes captured: 1, 2, 4, then by 8 up to 256 and by 16 up to `min(2 * B, 512)`, with the
    tokens of a decode step of all sequences as B (`config/vllm.py`, `_set_cudagraph_sizes`)."""
    top = min(2 * batch_tokens, 512)
    few = sum(1 for size in (1, 2, 4) if size <= top)
    return few + min(top, 255) // 8 + max(0, (top - 256) // 16 + 1)
