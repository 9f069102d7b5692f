"""Scaling something that already runs, instead of making Pods from a template."""

from pydantic import Field

from kvscaler_api.base import ApiModel


class TargetReference(ApiModel):
    """An object of the same namespace with a scale subresource."""

    api_version: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^([a-z0-9.-]+/)?v[0-9]+((alpha|beta)[0-9]+)?$",
        description="API version of the target, such as apps/v1.",
    )
    kind: str = Field(
        min_length=1,
        max_length=63,
        pattern=r"^[A-Z][A-Za-z0-9]*$",
        description="Kind of the target, such as Deployment or StatefulSet.",
    )
    name: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        description="Name of the target.",
    )
