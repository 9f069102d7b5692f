"""What each replica lets in, and what waits."""

from typing import Annotated

from kvscaler.protocol.limits import AdmissionMode, ChargePolicy
from pydantic import Field

from kvscaler_api.base import ApiModel
from kvscaler_api.quantities import Duration


class QueueSpec(ApiModel):
    """Requests that wait in a replica because their memory does not fit yet."""

    max_requests: int = Field(
        256,
        ge=1,
        le=1_000_000,
        description="Most requests that wait in one replica; one more is refused with 429.",
    )
    max_wait_seconds: Annotated[float, Duration("1ms", "1h")] = Field(
        30.0,
        alias="maxWait",
        description=(
            "Longest time that a request waits for admission, such as 30s; then it is refused with"
            " 429 and a Retry-After."
        ),
    )


class AdmissionSpec(ApiModel):
    """How the memory that a request will take is weighed before it is let in."""

    mode: AdmissionMode = Field(
        AdmissionMode.ENFORCE,
        description=(
            "Enforce queues and refuses what does not fit. Observe only counts what it would"
            ' refuse. Off lets everything through to the engine. Quote "Off": YAML takes a bare'
            " Off for false."
        ),
    )
    charge: ChargePolicy = Field(
        ChargePolicy.EXPECTED,
        description=(
            "Output tokens that a request is charged for before its length is known. WorstCase:"
            " its max_tokens. Expected: what finished requests took on average, at most its"
            " max_tokens. PromptOnly: none."
        ),
    )
    queue: QueueSpec = Field(QueueSpec(), description="Bounds of each replica's queue.")
