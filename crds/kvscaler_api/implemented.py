"""What this version acts on. Whatever a user asks for beyond it is said, never silently ignored.

Every field of the spec is either live, or live for some values, or must stay at its default. The
default rule is the strict one: a field that is added to the API and forgotten here is refused.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from kvscaler_api.base import ApiModel
from kvscaler_api.executor import is_modelled
from kvscaler_api.service import InferenceServiceSpec

LIVE = frozenset(
    {
        "replicas",
        "model.servedNames",
        "model.maxContextTokens",
        "model.architecture",
        "engine.image",
        "engine.args",
        "engine.memoryUtilizationPercent",
        "accelerator.name",
        "accelerator.resourceName",
        "cache.blockTokens",
        "cache.prefixCaching",
        "cache.watermarkPercent",
        "objectives",
        "scaling",
        "admission.charge",
        "admission.queue",
        "template",
    }
)
"""Fields (with all below them) that have an effect for every value."""

LIVE_VALUES: dict[str, frozenset[str]] = {
    "engine.type": frozenset({"Kvscaler"}),
    "cache.dtype": frozenset({"Auto"}),
    "admission.mode": frozenset({"Enforce"}),
}
"""Fields that have an effect for some values only."""

LIVE_MODEL_SCHEMES = frozenset({"builtin"})
"""Schemes of `model.uri` that an engine can load from."""

MODELLED_SCHEMES = LIVE_MODEL_SCHEMES | {"hf"}
"""Schemes of what the executor Modelled can stand for: it knows models by the catalogue."""


def not_implemented(spec: InferenceServiceSpec) -> tuple[str, ...]:
    """Paths, such as `spec.routing.mode`, whose values this version does not act on.

    Empty when the whole spec is acted on. For `SpecValid=False/NotImplemented`: no new child is
    made then, and existing Pods and limits stay.
    """
    paths = [path for path, value, default in _leaves(spec) if not _acted_on(path, value, default)]
    schemes = MODELLED_SCHEMES if is_modelled(spec) else LIVE_MODEL_SCHEMES
    if spec.model.scheme not in schemes:
        paths.append("model.uri")
    if spec.scaling.min_replicas < 1:
        paths.append("scaling.minReplicas")
    if spec.model.architecture is not None:
        groups = spec.model.architecture.layers
        if len(groups) > 1 or any(group.kind != "Full" for group in groups):
            paths.append("model.architecture.layers")
    return tuple(sorted(f"spec.{path}" for path in paths))


def _acted_on(path: str, value: Any, default: Any) -> bool:
    if path == "model.uri" or _is_live(path):
        return True
    if path in LIVE_VALUES:
        return value in LIVE_VALUES[path]
    return bool(value == default)


def _is_live(path: str) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:end]) in LIVE for end in range(1, len(parts) + 1))


_REQUIRED = object()


def _leaves(model: ApiModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, value, default) of each field that is no model itself, or whose model is absent."""
    for name, field in type(model).model_fields.items():
        path = f"{prefix}{field.alias or name}"
        value = getattr(model, name)
        default = _REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(value, ApiModel) and default is not None:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value.value if isinstance(value, StrEnum) else value, default
