"""What vLLM spends beside weights and KV cache at the peak of its profiling run.

The profiling run computes `max_num_batched_tokens` dummy tokens, then samples for `max_num_seqs` of
them; the larger of both passes is reserved (`v1/worker/gpu_model_runner.py`, `profile_run` and
`_dummy_sampler_run`). Constants that are not derived from shapes carry an interval: the range that
public start-up logs show for the printed figure itself, none is fitted to a KV size.
"""

from kvscaler.budget.lines import Basis, BudgetLine, Range, gib
from kvscaler.budget.profiles import vllm_defaults as defaults
from kvscaler.budget.settings import ResolvedSettings
from kvscaler.budget.version import Version
from kvscaler.models import ModelArchitecture, dtype_bytes

SORTING_SAMPLER = Range(39.0, 38.3, 39.7)
"""Bytes per logit of the sampler that sorts: 2 (bf16) + 4 (fp32) + 4 and 8 (sorted values and int64
indices) + the segmented sort's buffers and the cumulative sum. The range is of the printed peaks of
seven models (llm-d-planner, docs/empirical-vllm-memory-results.md: 38.4-39.6)."""
IN_PLACE_SAMPLER = Range(14.0, 13.5, 20.0)
"""Bytes per logit without a sort: 2 (bf16 logits) + 4 (fp32 copy) + 4 (probabilities) + 4 (noise).
`v1/sample/ops/topk_topp_sampler.py`, `forward_native` after `apply_top_k_top_p_triton`; 15.6 and 20.7 in two
logs of 1,024 sequences, the latter with logits gathered from eight ranks."""
V0_SAMPLER = Range(39.3, 38.3, 41.5)
"""V0 profiles with top-k and top-p set, so it sorts too, on the driver rank alone (`worker/model_runner.py`,
`profile_run`; 41.2 in the log of pull request 10511)."""

FORWARD_HIDDEN = Range(6.0, 4.5, 7.5)
"""Copies of the hidden state that live at the peak of a layer: residual, normed input and all-reduce
buffers in full, attention's query, values and output divided among ranks; half of each."""
V0_FORWARD_HIDDEN = Range(3.0, 2.5, 4.0)
"""The same in V0 on one rank (2.9 between two contexts of one log, issue 10517), and as much again for
all-reduce on several (workers' printed peaks of 0.19, 0.06 and 0.03 GiB: issue 13061, MapCoder vllm.log)."""
EXPERT_CHUNK_TOKENS = 16_384
"""Experts work through a step in chunks (`VLLM_FUSED_MOE_CHUNK_SIZE`)."""
VISION_PATCH_BYTES = Range(10.0, 5.0, 20.0)
"""Bytes per patch and width unit of a vision tower's largest item at its peak layer: qkv, the
feed-forward's inner state, residual and norm in 16 bits."""
_ANY_RESOLUTION = ("qwen", "kimi")
"""Families whose processors take images of any resolution, up to the whole encoder budget."""
VISION_PATCHES = 65_536
"""Patches of the largest image or video of Qwen-VL-type processors (16,384 tokens after merging)."""


def activation_line(
    model: ModelArchitecture, settings: ResolvedSettings, version: Version
) -> BudgetLine:
    """The larger of sampler pass, forward pass and vision pass, and the experts' workspace."""
    passes = [sampler_pass(model, settings, version), forward_pass(model, settings, version)]
    if model.has_vision and settings.vision and model.model_type.startswith(_ANY_RESOLUTION):
        passes.append(vision_pass(model, settings))
    size, low, high, note = max(passes)
    kept = expert_workspace_bytes(model, settings, version)
    if kept:
        note += f", beside the experts' workspace of {gib(kept)}"
    low = max(low, _floor(passes))
    return BudgetLine("activations", size + kept, Basis.DEFAULT, low + kept, high + kept, note)


def expert_workspace_bytes(
    model: ModelArchitecture, settings: ResolvedSettings, version: Version
) -> int:
    """Two buffers that Triton's experts keep from the profiling run on, so that they add to any pass.

    `tokens * top_k * (max(inner, hidden) + max(2 * inner, hidden))` elements
    (`model_executor/layers/fused_moe/`, `TritonExperts.workspace_shapes`; `v1/worker/workspace.py`).
    Experts of 4 bits go through other kernels, but not those of their drafter, which stay in 16 bits.
    """
    scheme = model.quantization
    if not model.experts_per_token or version < defaults.KEPT_WORKSPACE:
        return 0
    if scheme is not None and scheme.bytes_per_weight < 1 and not settings.draft_layers:
        return 0
    inner = model.expert_width // settings.tensor_parallel
    hidden = int(model.facts.get("moe_latent_size") or model.hidden_size)
    width = max(inner, hidden) + max(2 * inner, hidden)
    tokens = min(settings.step_tokens, EXPERT_CHUNK_TOKENS)
    return tokens * model.experts_per_token * width * dtype_bytes(settings.compute_dtype)


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
    model: ModelArchitecture,
    settings: ResolvedSettings,
    version: Version = defaults.NEWEST,
    hidden: Range = FORWARD_HIDDEN,
) -> tuple[int, int, int, str]:
    """Bytes of one layer's forward pass over a full step, with bounds and a note.

    Per token: gate, up and their product (`3 * inner / tp`), or the experts' (`top_k` of them), and
    a few copies of the hidden state.
    """
    tensor = settings.tensor_parallel
    inner = 3 * model.intermediate_size / tensor
    if expert_workspace_bytes(model, settings, version):
        inner = 0.0
    elif model.experts_per_token:
        width = model.expert_width / tensor
        both = max(2 * width, model.hidden_size) + width
        inner = max(inner, model.experts_per_token * both)
    if version < defaults.V1_DEFAULT:
        hidden, share = V0_FORWARD_HIDDEN, 1.0 if tensor == 1 else 2.0
    else:
        share = 0.5 + 0.5 / tensor
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
