"""What an engine is told, before and after its own defaults are filled in."""

from dataclasses import dataclass

AUTO = "Auto"
CPU_COMPUTE_DTYPES = (AUTO, "float32", "bfloat16")
"""What our engine can be told to compute in; `Auto` picks the faster one for the CPU."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings as a user gives them; `None` and `Auto` mean the engine's default."""

    memory_utilization_percent: float | None = None
    max_context_tokens: int | None = None
    max_sequences: int | None = None
    step_tokens: int | None = None
    block_tokens: int | None = None
    compute_dtype: str = AUTO
    kv_dtype: str = AUTO
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    """Replicas of attention within the group (SGLang dp-attention); vLLM: whole replicas."""
    context_parallel: int = 1
    """Decode context parallelism: ranks that share the tokens of a sequence."""
    speculative_tokens: int = 0
    """Draft tokens a step, by the model's own prediction layers or a draft without a cache."""
    draft_layers: int = 0
    """Attention layers that the drafter adds to the KV cache."""
    prefix_caching: bool | None = None
    cuda_graphs: bool | None = None
    """`False` runs eagerly: no graph memory."""
    kv_cache_bytes: int | None = None
    """The pool's size given outright (`kv_cache_memory_bytes`)."""
    vision: bool = True
    """Profile the vision tower (`False` for language-model-only serving)."""
    data_parallel_head: bool = False
    """Each attention replica keeps its own head (SGLang `enable_dp_lm_head`)."""
    expert_parallel: bool = False
    """Tokens travel to the experts (SGLang `moe_a2a_backend`): shared experts are on every rank."""
    dense_parallel: int | None = None
    """Ranks that share the layers without experts (SGLang `moe_dense_tp_size`)."""
    weight_offload_bytes: int = 0
    """Weights of each rank that stay in the host's memory (vLLM `cpu_offload_gb`)."""
    adapter_rank: int = 0
    adapters: int = 0
    offline: bool = False
    """Used as a library instead of a server, which has other defaults in vLLM."""


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Settings with every default filled in, as the engine would run with them.

    `max_context_tokens` stays `None` where the pool decides it (see `compute_budget`).
    """

    memory_utilization_percent: float
    max_context_tokens: int | None
    max_sequences: int
    step_tokens: int
    block_tokens: int
    compute_dtype: str
    kv_dtype: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    context_parallel: int = 1
    speculative_tokens: int = 0
    draft_layers: int = 0
    prefix_caching: bool = True
    cuda_graphs: bool = True
    kv_cache_bytes: int | None = None
    vision: bool = True
    data_parallel_head: bool = False
    expert_parallel: bool = False
    dense_parallel: int | None = None
    weight_offload_bytes: int = 0
    adapter_rank: int = 0
    adapters: int = 0
