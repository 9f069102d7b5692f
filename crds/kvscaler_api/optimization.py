"""What may be turned on instead of adding replicas."""

from enum import StrEnum

from pydantic import Field

from kvscaler_api.base import AS_SET, ApiModel


class OptimizationMode(StrEnum):
    """How far advice goes."""

    OFF = "Off"
    ADVISE = "Advise"
    APPLY = "Apply"


class Optimization(StrEnum):
    """What can lift a replica's ceiling."""

    PREFIX_CACHING = "PrefixCaching"
    KV_QUANTIZATION = "KVQuantization"
    WEIGHT_QUANTIZATION = "WeightQuantization"
    SPECULATIVE_DECODING = "SpeculativeDecoding"
    PROMPT_COMPRESSION = "PromptCompression"
    KV_OFFLOAD = "KVOffload"
    CONTEXT_CAP = "ContextCap"
    STEP_TOKENS = "StepTokens"


class OptimizationSpec(ApiModel):
    """Advice from the service's own traffic, and what of it may be applied."""

    mode: OptimizationMode = Field(
        OptimizationMode.OFF,
        description=(
            "Off: no advice. Advise: status.recommendations says what would save replicas and how"
            " many. Apply: the ones in allow are applied to one replica first and taken back when"
            ' quality or speed suffers. Quote "Off": YAML takes a bare Off for false.'
        ),
    )
    allow: tuple[Optimization, ...] = Field(
        (),
        max_length=16,
        json_schema_extra=AS_SET,
        description="Optimizations that mode Apply may apply; none is applied without being here.",
    )
