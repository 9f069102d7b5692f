"""What vLLM does unless told otherwise, by version and class of card.

Sources: vLLM `engine/arg_utils.py` (`get_batch_defaults`), `config/cache.py`
(`gpu_memory_utilization`), pull requests 26859 (FlashInfer sampler off, October 2025), 33538 (Triton
top-k/top-p sampler, February 2026), 40376 (FlashInfer sampler on again, April 2026), and the log line
"CUDA graph memory profiling is enabled (default since v0.21.0)" of `v1/worker/gpu_worker.py`.
"""

from kvscaler.budget.lines import GIB
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator

NEWEST = Version(0, 33, 0)
"""The version assumed when none is given."""
V1_DEFAULT = Version(0, 8, 0)
"""From here on the V1 engine is what runs; before it V0."""
MEASURED_BY_TORCH = Version(0, 6, 4)
"""From here on the profiling run's peak is read from torch's allocator."""
LARGER_CHUNK = Version(0, 7, 0)
"""V0 prefills long contexts in chunks of 512 tokens, of 2,048 from here on."""
GRAPHS_COUNTED = Version(0, 21, 0)
"""From here on the estimate of CUDA-graph memory is taken from the KV cache, and a pool prints
`concurrency * max_model_len` tokens instead of its blocks' tokens."""
HIGHER_UTILIZATION = Version(0, 21, 0)
"""From here on `gpu_memory_utilization` is 0.92 (0.90 in the logs of 0.19 and 0.20, 0.92 in 0.22)."""
SORTLESS_SAMPLER = Version(0, 17, 0)
"""From here on top-k/top-p masking works in place: no sorted copy of the logits."""
KEPT_WORKSPACE = Version(0, 15, 0)
"""From here on unquantized experts run as a modular kernel, whose workspace is kept ("Using TRITON
backend for Unquantized MoE" in logs of 0.15)."""
TRITON_EXPERTS = Version(0, 11, 1)
"""From here on wheels bring triton_kernels (`cmake/external_projects/triton_kernels.cmake`), which MXFP4
experts use on Hopper. Logs of 0.10.1 and 0.11.0 show Marlin there: 65.97 GiB for gpt-oss 120B, against
64.38 with Triton."""
LARGE_CARD_BYTES = 70 * GIB
HUGE_CARD_BYTES = 160 * GIB
MLA_BLOCK_TOKENS = 64
"""MLA attention backends take blocks of 64 tokens (FlashMLA) where others take 16."""
HYBRID_GROUPS = Version(0, 9, 2)
"""From here on windowed layers beside full ones have groups of their own (pull request 17996)."""
CHUNKED_GROUPS = Version(0, 12, 0)
"""From here on chunked attention has groups of its own; before, Llama 4 kept every token."""


def is_large(accelerator: Accelerator) -> bool:
    """Cards of 70 GiB and more get larger batches; the A100 does not, nor do devices with unified
    memory, whose total the driver's management library can't tell (`get_batch_defaults`)."""
    if accelerator.unified or "a100" in accelerator.name:
        return False
    return (accelerator.memory_bytes or 0) >= LARGE_CARD_BYTES


def utilization_percent(version: Version) -> float:
    """`gpu_memory_utilization` in percent."""
    return 92.0 if version >= HIGHER_UTILIZATION else 90.0


def max_sequences(accelerator: Accelerator, version: Version) -> int:
    """`max_num_seqs`: 256, and 1,024 on large cards from the first V1 versions on."""
    if version < V1_DEFAULT:
        return 256
    return 1024 if is_large(accelerator) else 256


def step_tokens(accelerator: Accelerator, version: Version, offline: bool) -> int:
    """`max_num_batched_tokens`."""
    if version < V1_DEFAULT:
        return 2048
    if (accelerator.memory_bytes or 0) >= HUGE_CARD_BYTES and version >= Version(0, 10, 0):
        return 16384
    if is_large(accelerator):
        return 16384 if offline else 8192
    return 8192 if offline else 2048
