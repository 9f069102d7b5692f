"""The part of an object's metadata that the operator reads; the API server owns the rest."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from kvscaler_api.base import ApiModel

MAX_NAME_LENGTH = 50
"""A service's name leaves room in 63 characters for the suffixes of its children."""

PAUSED_ANNOTATION = "kvscaler.io/paused"
"""On a service: `"true"` stops every write that the operator would make for it."""

DRAIN_ANNOTATION = "kvscaler.io/drain"
"""On a Pod: JSON record of a drain in progress, from which a restarted operator carries on."""

ALLOW_ANNOTATION = "kvscaler.io/allow"
"""On a `targetRef`'s target: name of the one service that may scale it."""

SERVICE_UID_LABEL = "kvscaler.io/service-uid"
COMPONENT_LABEL = "kvscaler.io/component"


class ObjectMeta(ApiModel):
    """Metadata of an InferenceService."""

    name: Annotated[str, Field(min_length=1)]
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None

    @property
    def paused(self) -> bool:
        """Whether the annotation `kvscaler.io/paused` is set to anything but "false"."""
        return self.annotations.get(PAUSED_ANNOTATION, "false").lower() != "false"


class SecretReference(ApiModel):
    """A Secret in the service's namespace, by name."""

    name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=253,
            pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
            description="Name of the Secret.",
        ),
    ]
