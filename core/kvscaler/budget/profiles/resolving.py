"""Element types that several engines resolve alike."""

from kvscaler.budget.settings import AUTO, EngineSettings
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
