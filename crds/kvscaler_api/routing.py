"""What stands between clients and replicas."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, WithJsonSchema

from kvscaler_api.base import AS_SET, ApiModel

ResourceMap = Annotated[
    dict[str, int | str],
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 16,
            "additionalProperties": {
                "anyOf": [{"type": "integer"}, {"type": "string"}],
                "x-kubernetes-int-or-string": True,
                "maxLength": 32,
                "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[mkMGTPE]|[eE][0-9]{1,2})?$",
            },
        }
    ),
]


class RoutingMode(StrEnum):
    """Paths from a client to a replica."""

    DIRECT = "Direct"
    ROUTER = "Router"
    GATEWAY = "Gateway"


class ResourcesSpec(ApiModel):
    """Requests and limits of a container."""

    requests: ResourceMap = Field(
        default_factory=dict, description="Resources that the scheduler reserves, by name."
    )
    limits: ResourceMap = Field(
        default_factory=dict, description="Resources that the container may not exceed, by name."
    )


class RouterSpec(ApiModel):
    """The small Deployment that holds and orders requests for all replicas."""

    replicas: int = Field(1, ge=1, le=16, description="Router Pods.")
    resources: ResourcesSpec = Field(
        ResourcesSpec(), description="Requests and limits of each router Pod."
    )


class RoutingSpec(ApiModel):
    """How requests reach the replicas."""

    mode: RoutingMode = Field(
        RoutingMode.DIRECT,
        description=(
            "Direct: the Service leads to the replicas. Router: it leads to a router that keeps one"
            " queue for all replicas. Gateway: an endpoint picker of the Gateway API Inference"
            " Extension chooses the replica."
        ),
    )
    router: RouterSpec = Field(RouterSpec(), description="The router, with mode Router.")
    trusted_headers: tuple[
        Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-z0-9-]+$")], ...
    ] = Field(
        (),
        max_length=16,
        json_schema_extra=AS_SET,
        description=(
            "Request headers, in lower case, that the router believes (such as one with a tenant's"
            " name); all others are data. Set only what a proxy in front overwrites."
        ),
    )
