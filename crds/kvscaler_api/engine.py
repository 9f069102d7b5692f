"""Which engine runs the model, and what it is given to run with."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvscaler_api.base import AS_ATOMIC, ApiModel, Rule


class EngineType(StrEnum):
    """Engines that a service can run."""

    KVSCALER = "Kvscaler"
    VLLM = "VLLM"
    SGLANG = "SGLang"
    TGI = "TGI"
    TENSORRT_LLM = "TensorRTLLM"
    LMDEPLOY = "LMDeploy"
    LLAMA_CPP = "LlamaCpp"


class EngineSpec(ApiModel):
    """The engine in each replica."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.type != 'Kvscaler' || (self.tensorParallel == 1 && self.pipelineParallel == 1)",
            "the engine Kvscaler runs on one accelerator: tensorParallel and pipelineParallel"
            " must be 1",
            lambda engine: (
                engine.type != EngineType.KVSCALER
                or engine.tensor_parallel == engine.pipeline_parallel == 1
            ),
        ),
    )

    type: EngineType = Field(
        EngineType.KVSCALER,
        description=(
            "Kvscaler runs the model in the sidecar's own paged engine. The others run their own"
            " image behind the sidecar, which then enforces the limits as a gate."
        ),
    )
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\s]+$")] | None = Field(
        None,
        description=(
            "Image of the engine. Absent means, for Kvscaler, the sidecar image that the operator"
            " was installed with, pinned in status.sidecarImage."
        ),
    )
    args: tuple[Annotated[str, Field(max_length=1024)], ...] = Field(
        (),
        max_length=64,
        json_schema_extra=AS_ATOMIC,
        description=(
            "More arguments for the engine. One that repeats a typed field of this object is"
            " refused with SpecValid=False/ArgConflict."
        ),
    )
    memory_utilization_percent: int = Field(
        90,
        ge=1,
        le=99,
        description=(
            "Share in percent of the accelerator's memory that the engine may use in all: weights,"
            " activations, overhead and KV cache. What is left is for everything else on it."
        ),
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Accelerators that each layer is split over. More than 1 needs another engine.",
    )
    pipeline_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description=(
            "Stages that the layers are spread over. A replica takes tensorParallel x"
            " pipelineParallel accelerators."
        ),
    )
