"""What vLLM spends beside weights and KV cache: the peak of its profiling run, and what torch does
not see.

The profiling run computes `max_num_batched_tokens` dummy tokens, then samples for `max_num_seqs` of
them; the larger of both passes is reserved (`v1/worker/gpu_model_runner.py`, `profile_run` and
`_dummy_sampler_run`). Constants that are not derived from shapes carry an interval: the range that
public start-up logs show for the printed figure itself, none is fitted to a KV size.
"""

from dataclasses import dataclass

from kvscaler.budget.lines import GIB, Basis, BudgetLine
from kvscaler.budget.profiles import vllm_defaults as defaults
from kvscaler.budget.settings import ResolvedSettings
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator
from kvscaler.models import ModelArchitecture, dtype_bytes


@dataclass(frozen=True, slots=True)
class Constant:
    """A fitted constant and the range in which it was seen."""

    value: float
    low: float
    high: float


SORTING_SAMPLER = Constant(39.0, 38.3, 39.7)
"""Bytes per logit of the sampler that sorts: 2 (bf16) + 4 (fp32) + 4 and 8 (sorted values and int64
indices) + the segmented sort's buffers and the cumulative sum. The range is of the printed peaks of
seven models (llm-d-planner, docs/empirical-vllm-memory-results.md: 38.4-39.6)."""
IN_PLACE_SAMPLER = Constant(14.0, 13.5, 16.0)
"""Bytes per logit without a sort: 2 (bf16 logits) + 4 (fp32 copy) + 4 (probabilities) + 4 (noise).
`v1/sample/ops/topk_topp_sampler.py`, `forward_native` after `apply_top_k_top_p_triton`."""
V0_SAMPLER = Constant(39.3, 38.3, 41.5)
"""V0 profiles with top-k and top-p set, so it sorts too, on the driver rank alone (`worker/model_runner.py`,
`profile_run`; 41.2 in the log of pull request 10511)."""

FORWARD_HIDDEN = Constant(6.0, 3.0, 9.0)
"""Copies of the hidden state that live at the peak of a layer: residual, normed input and all-reduce
buffers in full, attention's query, values and output divided among ranks; half of each."""
V0_FORWARD_HIDDEN = Constant(3.0, 2.0, 5.0)
"""The same in V0 on one rank (2.9 between two contexts of one log, issue 10517), and as much again for
all-reduce on several (workers' printed peaks of 0.19, 0.06 and 0.03 GiB: issue 13061, MapCoder vllm.log)."""
VISION_PATCH_BYTES = Constant(10.0, 5.0, 20.0)
"""Bytes per patch and width unit of a vision tower's largest item at its peak layer: qkv, the
feed-forward's inner state, residual and norm in 16 bits."""
_ANY_RESOLUTION = ("qwen", "kimi")
"""Families whose processors take images of any resolution, up to the whole encoder budget."""
VISION_PATCHES = 65_536
"""Patches of the largest image or video of Qwen-VL-type processors (16,384 tokens after merging)."""

NON_TORCH = {
    1: Constant(0.15 * GIB, 0.02 * GIB, 0.60 * GIB),
    2: Constant(0.60 * GIB, 0.15 * GIB, 1.40 * GIB),
    4: Constant(1.00 * GIB, 0.25 * GIB, 1.90 * GIB),
}
"""Context, libraries and NCCL by tensor-parallel size: printed 0.02-0.25 at one rank, 0.17-0.75 at
two and four (vllm issues 10517, 13061; MapCoder vllm.log; jupiter-glm52 server.out). Logs that print
only the KV size leave up to 1.4 GiB at two and 0.3 to 2.3 at four and eight ranks over NVLink."""
PCIE_NON_TORCH = Constant(0.25 * GIB, 0.08 * GIB, 0.75 * GIB)
"""Several ranks over PCIe: no custom all-reduce, small NCCL buffers (0.16-0.25 on T4 and RTX 4090)."""
SMALL_CARD_BYTES = 40 * GIB
"""Cards below this have no NVLink worth the name."""
V0_NON_TORCH = Constant(0.35 * GIB, 0.1 * GIB, 1.8 * GIB)
"""V0 on one rank (0.35 in issue 10517, 1.79 in pull request 10511)."""
OLD_NON_TORCH = Constant(0.9 * GIB, 0.1 * GIB, 2.6 * GIB)
"""Before 0.6.4 the peak was read from the device's free memory, with torch's fragments and the
context in it (`worker/worker.py`, `determine_num_available_blocks`)."""
UNIFIED_NON_TORCH = Constant(2.5 * GIB, 1.2 * GIB, 4.4 * GIB)
"""On unified memory free memory is the host's, so the process itself and the page cache count: 1.9 to
4.3 GiB are left over in eight logs of GB10 machines."""

GRAPH_BASE = Constant(0.04 * GIB, 0.02 * GIB, 0.1 * GIB)
GRAPH_EACH = Constant(0.011 * GIB, 0.003 * GIB, 0.02 * GIB)
"""CUDA graphs: a base and a size per captured batch size (0.06 GiB at 3 sizes, 0.13-0.22 at 11 and
19, 0.5-0.96 at 51, as printed by vLLM 0.19-0.27)."""


def non_torch_line(
    accelerator: Accelerator, settings: ResolvedSettings, version: Version
) -> BudgetLine:
    """Memory outside torch's allocator on one rank."""
    if accelerator.unified:
        return _line("non-torch", UNIFIED_NON_TORCH, "driver context; the host's share")
    ranks = settings.tensor_parallel * settings.pipeline_parallel
    if version < defaults.MEASURED_BY_TORCH:
        return _line("non-torch", OLD_NON_TORCH, "driver context, libraries, fragments")
    if version < defaults.V1_DEFAULT and ranks == 1:
        return _line("non-torch", V0_NON_TORCH, "driver context, libraries")
    over_pcie = accelerator.link == "pcie" or (accelerator.memory_bytes or 0) < SMALL_CARD_BYTES
    if ranks > 1 and over_pcie:
        return _line(
            "non-torch", PCIE_NON_TORCH, f"driver context, NCCL of {ranks} ranks over PCIe"
        )
    size = max(tp for tp in NON_TORCH if tp <= ranks)
    return _line("non-torch", NON_TORCH[size], f"driver context, libraries, NCCL of {ranks} ranks")


def graph_line(settings: ResolvedSettings) -> BudgetLine:
    """CUDA graphs, as estimated before capture (from 0.21 on)."""
    sizes = captured_sizes(settings.max_sequences)
    low, value, high = (
        int(getattr(GRAPH_BASE, part) + sizes * getattr(GRAPH_EACH, part))
        for part in ("low", "value", "high")
    )
    note = f"{sizes} captured batch sizes"
    return BudgetLine("cuda graphs", value, Basis.DEFAULT, low, high, note)


def captured_sizes(max_sequences: int) -> int:
    """Batch sizes captured: 1, 2, 4, then by 8 up to 256 and by 16 up to `min(2 * S, 512)`."""
    top = min(2 * max_sequences, 512)
    few = sum(1 for size in (1, 2, 4) if size <= top)
    return few + min(top, 255) // 8 + max(0, (top - 256) // 16 + 1)


def activation_line(
    model: ModelArchitecture, settings: ResolvedSettings, version: Version
) -> BudgetLine:
    """The larger of sampler pass, forward pass and vision pass."""
    passes = [sampler_pass(model, settings, version), forward_pass(model, settings, version)]
    if model.has_vision and settings.vision and model.model_type.startswith(_ANY_RESOLUTION):
        passes.append(vision_pass(model, settings))
    size, low, high, note = max(passes)
    return BudgetLine("activations", size, Basis.DEFAULT, max(low, _floor(passes)), high, note)


def _floor(passes: list[tuple[int, int, int, str]]) -> int:
    return max(low for _, low, _, _ in passes)


def sampler_pass(
    model: ModelArchitecture, settings: ResolvedSettings, version: Version
) -> tuple[int, int, int, str]:
    """Bytes, lower and upper bound of sampling for `max_num_seqs` sequences, and a note."""
    constant = SORTING_SAMPLER
    if version < defaults.V1_DEFAULT:
        constant = V0_SAMPLER
    elif version >= defaults.SORTLESS_SAMPLER:
        constant = IN_PLACE_SAMPLER
    rows = min(settings.max_sequences, settings.step_tokens)
    rows = max(1, rows)
    logits = model.vocab_size * rows
    return (
        int(constant.value * logits),
        int(constant.low * logits),
        int(constant.high * logits),
        f"sampler pass of {rows} x {model.vocab_size} logits",
    )


def forward_pass(
    model: ModelArchitecture, settings: ResolvedSettings, version: Version = defaults.NEWEST
) -> tuple[int, int, int, str]:
    """Bytes of one layer's forward pass over a full step, with bounds and a note.

    Per token: gate, up and their product (`3 * inner / tp`), or the experts' (`top_k` of them), and
    a few copies of the hidden state.
    """
    tensor = settings.tensor_parallel
    inner = 3 * model.intermediate_size / tensor
    if model.experts_per_token:
        width = model.expert_width / tensor
        both = max(2 * width, model.hidden_size) + width
        inner = max(inner, model.experts_per_token * both)
    if version < defaults.V1_DEFAULT:
        hidden, share = V0_FORWARD_HIDDEN, 1.0 if tensor == 1 else 2.0
    else:
        hidden, share = FORWARD_HIDDEN, 0.5 + 0.5 / tensor
    tokens = settings.step_tokens * dtype_bytes(settings.compute_dtype)
    size, low, high = (
        int(tokens * (inner + copies * share * model.hidden_size))
        for copies in (hidden.value, hidden.low, hidden.high)
    )
    return size, low, high, f"forward pass of {settings.step_tokens} tokens"


def vision_pass(model: ModelArchitecture, settings: ResolvedSettings) -> tuple[int, int, int, str]:
    """Bytes of encoding the largest image, with bounds and a note."""
    units = VISION_PATCHES * 1152
    return (
        int(units * VISION_PATCH_BYTES.value),
        int(units * VISION_PATCH_BYTES.low),
        int(units * VISION_PATCH_BYTES.high),
        "vision tower on the largest image",
    )


def _line(name: str, constant: Constant, note: str) -> BudgetLine:
    return BudgetLine(
        name, int(constant.value), Basis.DEFAULT, int(constant.low), int(constant.high), note
    )


def driver_margin_bytes(
    model: ModelArchitecture, settings: ResolvedSettings, version: Version
) -> int:
    """By how much less V0's driver rank has for its pool than the workers, which do not sample.

    The pool is sized by the tightest rank, while each worker prints its own KV size
    (`worker/worker.py`, `determine_num_available_blocks`).
    """
    if version >= defaults.V1_DEFAULT or settings.tensor_parallel == 1:
        return 0
    sampler = sampler_pass(model, settings, version)[0]
    return max(0, sampler - forward_pass(model, settings, version)[0])
