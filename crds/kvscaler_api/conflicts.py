"""Arguments, environment and template settings that contradict a typed field.

The operator's own values win when a Pod is applied, so a second opinion elsewhere would be ignored
without a word. It is refused by a condition instead, with both places named.
"""

from collections.abc import Iterator
from typing import Any

from kvscaler_api.executor import is_modelled, option_faults
from kvscaler_api.metadata import COMPONENT_LABEL, SERVICE_UID_LABEL
from kvscaler_api.service import InferenceServiceSpec
from kvscaler_api.template import ENGINE_CONTAINER, engine_settings, objects

OWNED_SETTINGS: dict[str, str] = {
    "KVSCALER_SERVICE_UID": "the operator's own value",
    "KVSCALER_SERVICE_NAME": "metadata.name",
    "KVSCALER_POD_UID": "the operator's own value",
    "KVSCALER_POD_NAME": "the operator's own value",
    "KVSCALER_NAMESPACE": "metadata.namespace",
    "KVSCALER_MODEL_URI": "spec.model.uri",
    "KVSCALER_SERVED_NAMES": "spec.model.servedNames",
    "KVSCALER_MAX_CONTEXT_TOKENS": "spec.model.maxContextTokens",
    "KVSCALER_BLOCK_TOKENS": "spec.cache.blockTokens",
    "KVSCALER_CACHE_DTYPE": "spec.cache.dtype",
    "KVSCALER_PREFIX_CACHING": "spec.cache.prefixCaching",
    "KVSCALER_MEMORY_BYTES": "spec.accelerator",
    "KVSCALER_MEMORY_UTILIZATION_PERCENT": "spec.engine.memoryUtilizationPercent",
    "KVSCALER_ACCELERATOR": "spec.accelerator.name",
    "KVSCALER_LIMITS": "spec.admission",
    "KVSCALER_ADMIN_KEYS_DIR": "the operator's own value",
    "KVSCALER_DRAIN_TIMEOUT_SECONDS": "spec.scaling.scaleDown.drainTimeout",
    "KVSCALER_HOST": "the operator's own value",
    "KVSCALER_HTTP_PORT": "the fixed ports of a replica",
    "KVSCALER_METRICS_PORT": "the fixed ports of a replica",
    "KVSCALER_ADMIN_PORT": "the fixed ports of a replica",
}
"""Environment of the engine's container that the operator sets, and the field that it comes from.
The flag of each is its name without the prefix, in lower case with dashes."""

OWNED_CONTAINER_FIELDS: dict[str, str] = {
    "image": "spec.engine.image",
    "args": "spec.engine.args",
    "command": "the image's own entry point",
    "readinessProbe": "the operator's own probe",
    "livenessProbe": "the operator's own probe",
    "startupProbe": "the operator's own probe",
    "lifecycle": "the operator's own drain",
}
"""Fields of the engine's container that the operator sets."""

OWNED_POD_FIELDS: dict[str, str] = {
    "terminationGracePeriodSeconds": "spec.scaling.scaleDown.drainTimeout",
    "restartPolicy": "the Deployment's own value",
    "automountServiceAccountToken": "the operator's own value: serving Pods get no token",
}
"""Fields of the Pod that the operator sets."""


def _flag(setting: str) -> str:
    return "--" + setting.removeprefix("KVSCALER_").lower().replace("_", "-")


_OWNED_FLAGS = {_flag(setting): field for setting, field in OWNED_SETTINGS.items()}


def argument_conflicts(spec: InferenceServiceSpec) -> tuple[str, ...]:
    """Arguments and environment that repeat a typed field, or ask our engine for what it has not,
    for `SpecValid=False/ArgConflict`."""
    return (
        *_argument_conflicts(spec),
        *_environment_conflicts(spec),
        *option_faults(spec),
    )


def template_conflicts(spec: InferenceServiceSpec) -> tuple[str, ...]:
    """Template settings that the operator sets itself, for `SpecValid=False/TemplateConflict`."""
    return tuple(_template_conflicts(spec)) if spec.template is not None else ()


def _argument_conflicts(spec: InferenceServiceSpec) -> Iterator[str]:
    for index, argument in enumerate(spec.engine.args):
        field = _OWNED_FLAGS.get(argument.partition("=")[0])
        if field is not None:
            yield f"spec.engine.args[{index}] {argument} repeats {field}: remove it"


def _environment_conflicts(spec: InferenceServiceSpec) -> Iterator[str]:
    for entry in objects(engine_container(spec).get("env")):
        field = OWNED_SETTINGS.get(str(entry.get("name")))
        if field is not None:
            yield (
                f"spec.template: env {entry['name']} of the container {ENGINE_CONTAINER} repeats"
                f" {field}: remove it"
            )


def _template_conflicts(spec: InferenceServiceSpec) -> Iterator[str]:
    assert spec.template is not None
    for key in spec.template.metadata.labels:
        if key in (SERVICE_UID_LABEL, COMPONENT_LABEL):
            yield f"spec.template.metadata.labels: {key} is the operator's own: remove it"
    for key, owner in OWNED_POD_FIELDS.items():
        if key in spec.template.spec:
            yield f"spec.template.spec.{key} contradicts {owner}: remove it"
    container = engine_container(spec)
    for key, owner in OWNED_CONTAINER_FIELDS.items():
        if key in container:
            yield (
                f"spec.template: {key} of the container {ENGINE_CONTAINER} contradicts {owner}:"
                " remove it"
            )
    resource, modelled = spec.accelerator.resource_name, is_modelled(spec)
    wanted = spec.engine.tensor_parallel * spec.engine.pipeline_parallel
    resources = container.get("resources")
    for part in ("limits", "requests"):
        amounts = resources.get(part) if isinstance(resources, dict) else None
        amount = amounts.get(resource) if resource and isinstance(amounts, dict) else None
        if amount is not None and modelled:
            yield (
                f"spec.template: the executor Modelled takes no {resource}, but resources.{part} of"
                f" the container {ENGINE_CONTAINER} asks for {amount}: remove it"
            )
        elif amount is not None and str(amount) != str(wanted):
            yield (
                f"spec.template: resources.{part}[{resource}] of the container"
                f" {ENGINE_CONTAINER} is {amount}, but tensorParallel x pipelineParallel is"
                f" {wanted}: remove it, the operator sets it"
            )


def engine_container(spec: InferenceServiceSpec) -> dict[str, Any]:
    """The template's settings for the engine's container; empty when it has none."""
    return engine_settings(spec.template)
