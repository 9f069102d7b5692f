"""Facts about models: architecture, KV layout, weights by kind, and where they come from."""

from kvscaler.models.architecture import ModelArchitecture
from kvscaler.models.dtypes import canonical_dtype, dtype_bytes
from kvscaler.models.errors import ModelNotUnderstood, UnknownModel
from kvscaler.models.files import read_model
from kvscaler.models.inline import inline_architecture, inline_group
from kvscaler.models.layers import LayerGroup, LayerKind, RecurrentState
from kvscaler.models.quantization import Quantization
from kvscaler.models.tensors import TensorKind
from kvscaler.models.weights import Split

__all__ = [
    "LayerGroup",
    "LayerKind",
    "ModelArchitecture",
    "ModelNotUnderstood",
    "Quantization",
    "RecurrentState",
    "Split",
    "TensorKind",
    "UnknownModel",
    "canonical_dtype",
    "dtype_bytes",
    "inline_architecture",
    "inline_group",
    "read_model",
]
