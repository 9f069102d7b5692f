"""The Pod template that a service's replicas are made from.

A typed PodTemplateSpec would make the CRD larger than a client can apply, and would lag behind
every Kubernetes release. The spec is kept as it is written; the operator checks it by a dry run of
the Deployment, and the fields of its own container win by server-side apply.
"""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from kvscaler_api.base import ApiModel

ENGINE_CONTAINER = "engine"
"""Name of the container that the operator fills in; a template's settings for it are merged."""

StringMap = Annotated[
    dict[str, str],
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 64,
            "additionalProperties": {"type": "string", "maxLength": 4096},
        }
    ),
]
PreservedObject = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]


class TemplateMetadata(ApiModel):
    """Labels and annotations of the Pods."""

    labels: StringMap = Field(
        default_factory=dict,
        description="More labels for the Pods. Keys under kvscaler.io/ belong to the operator.",
    )
    annotations: StringMap = Field(default_factory=dict, description="Annotations for the Pods.")


class PodTemplate(ApiModel):
    """A PodTemplateSpec, kept as written."""

    metadata: TemplateMetadata = Field(
        TemplateMetadata(), description="Labels and annotations of the Pods."
    )
    spec: PreservedObject = Field(
        default_factory=dict,
        description=(
            "A PodSpec. Settings for the engine go to the container named engine (resources, env,"
            " volumeMounts ...); other containers, volumes, tolerations, node selectors and so on"
            " are kept as they are."
        ),
    )


def engine_settings(template: PodTemplate | None) -> dict[str, Any]:
    """The template's settings for the engine's container; empty when it has none."""
    if template is None:
        return {}
    for container in objects(template.spec.get("containers")):
        if container.get("name") == ENGINE_CONTAINER:
            return container
    return {}


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """The objects of a list that a user wrote; what is no object is left to the dry run."""
    if isinstance(value, list):
        yield from (entry for entry in value if isinstance(entry, dict))
