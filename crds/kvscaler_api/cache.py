"""How the engine keeps keys and values."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvscaler_api.base import ApiModel, Rule, Ruled


class CacheDtype(StrEnum):
    """Element type of the KV cache."""

    AUTO = "Auto"
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"
    FP8 = "FP8"
    INT8 = "INT8"


class PrefixCaching(StrEnum):
    """Whether blocks of finished requests are kept for the next one with the same beginning."""

    ENABLED = "Enabled"
    DISABLED = "Disabled"


_POWER_OF_TWO = Rule(
    "self in [1, 2, 4, 8, 16, 32, 64, 128, 256]",
    "must be a power of two up to 256",
    lambda tokens: tokens & (tokens - 1) == 0,
)


class CacheSpec(ApiModel):
    """The KV cache of each replica."""

    dtype: CacheDtype = Field(
        CacheDtype.AUTO,
        description=(
            "Element type of keys and values. Auto follows the computation and never quantizes;"
            " FP8 and INT8 halve the bytes per token at some cost in quality."
        ),
    )
    block_tokens: Annotated[int, Ruled(_POWER_OF_TWO)] = Field(
        16,
        ge=1,
        le=256,
        description="Tokens per block, the unit in which memory is given out and counted.",
    )
    prefix_caching: PrefixCaching = Field(
        PrefixCaching.ENABLED,
        description=(
            "Enabled keeps the blocks of finished requests until their memory is needed, so that"
            " requests with a common beginning compute it once."
        ),
    )
    watermark_percent: int = Field(
        5,
        ge=0,
        le=50,
        description=(
            "Share in percent of the blocks that admission leaves free, as room for requests that"
            " grow longer than expected."
        ),
    )
