"""What a service promises its clients."""

from typing import Annotated

from pydantic import Field

from kvscaler_api.base import ApiModel
from kvscaler_api.quantities import Duration, Percent


class ObjectivesSpec(ApiModel):
    """Latency objectives and the share of requests that must meet them."""

    time_to_first_token_seconds: Annotated[float, Duration("1ms", "1h")] = Field(
        2.0,
        alias="timeToFirstToken",
        description=(
            "Longest time from a request's arrival to its first token, such as 2s. Time spent"
            " waiting for admission counts."
        ),
    )
    time_per_output_token_seconds: Annotated[float, Duration("1ms", "1m")] = Field(
        0.05,
        alias="timePerOutputToken",
        description=(
            "Longest mean time between two output tokens of a request, such as 50ms. It bounds how"
            " many sequences a replica decodes at once: with a loose value memory binds first."
        ),
    )
    attainment: Annotated[float, Percent(positive=True)] = Field(
        0.99,
        description=(
            "Share of all offered requests that must meet both objectives, such as 99% or 99.9%."
            " Refused, timed out and broken requests count as misses."
        ),
    )
