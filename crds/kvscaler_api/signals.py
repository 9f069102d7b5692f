"""Where a service's load is read, besides its own replicas."""

from pydantic import Field

from kvscaler_api.base import ApiModel

DEFAULT_PROMETHEUS = "default"


class SignalsSpec(ApiModel):
    """Sources of signals."""

    prometheus: str = Field(
        DEFAULT_PROMETHEUS,
        min_length=1,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        description=(
            "Name of a Prometheus server in the operator's own configuration. Never a URL: the"
            " operator calls no address that a user wrote."
        ),
    )
