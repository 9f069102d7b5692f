"""Settings that several engines resolve alike."""

from typing import Any

from kvscaler.budget.settings import AUTO, EngineSettings, ResolvedSettings
from kvscaler.models import ModelArchitecture, canonical_dtype
from kvscaler.models.kv_formats import kv_format


def compute_dtype_of(model: ModelArchitecture, settings: EngineSettings) -> str:
    """The type of activations: the model's own unless told; fp32 checkpoints are run in bf16."""
    if settings.compute_dtype != AUTO:
        return canonical_dtype(settings.compute_dtype)
    return "bfloat16" if model.native_dtype == "float32" else model.native_dtype


def kv_dtype_of(settings: EngineSettings, compute_dtype: str) -> str:
    """The format of the cache: that of activations unless told."""
    if settings.kv_dtype.casefold() == AUTO.casefold():
        return compute_dtype
    return kv_format(settings.kv_dtype).name


def resolved(settings: EngineSettings, **decided: Any) -> ResolvedSettings:
    """`decided` fields, and the rest as the user gave them."""
    caching = settings.prefix_caching
    given: dict[str, Any] = {
        "max_context_tokens": settings.max_context_tokens,
        "tensor_parallel": settings.tensor_parallel,
        "pipeline_parallel": settings.pipeline_parallel,
        "data_parallel": settings.data_parallel,
        "context_parallel": settings.context_parallel,
        "speculative_tokens": settings.speculative_tokens,
        "draft_layers": settings.draft_layers,
        "prefix_caching": True if caching is None else caching,
        "cuda_graphs": settings.cuda_graphs is not False,
        "kv_cache_bytes": settings.kv_cache_bytes,
        "vision": settings.vision,
        "data_parallel_head": settings.data_parallel_head,
        "expert_parallel": settings.expert_parallel,
        "dense_parallel": settings.dense_parallel,
        "weight_offload_bytes": settings.weight_offload_bytes,
        "adapter_rank": settings.adapter_rank,
        "adapters": settings.adapters,
    }
    return ResolvedSettings(**(given | decided))
