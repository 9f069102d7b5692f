"""Facts of a model's architecture that decide how much memory it needs."""

from kvscaler.models.architecture import LayerGroup, LayerKind, ModelArchitecture
from kvscaler.models.dtypes import canonical_dtype, dtype_bytes
from kvscaler.models.errors import ModelNotUnderstood, UnknownModel

__all__ = [
    "LayerGroup",
    "LayerKind",
    "ModelArchitecture",
    "ModelNotUnderstood",
    "UnknownModel",
    "canonical_dtype",
    "dtype_bytes",
]
