"""The InferenceService itself: names of the API, its spec as a whole, and how it is read."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from kvscaler_api.accelerator import AcceleratorSpec
from kvscaler_api.admission import AdmissionSpec
from kvscaler_api.base import ApiModel, Rule
from kvscaler_api.cache import CacheSpec
from kvscaler_api.engine import EngineSpec
from kvscaler_api.metadata import MAX_NAME_LENGTH, ObjectMeta
from kvscaler_api.model import ModelSpec
from kvscaler_api.objectives import ObjectivesSpec
from kvscaler_api.optimization import OptimizationSpec
from kvscaler_api.routing import RoutingMode, RoutingSpec
from kvscaler_api.scaling import ScalingSpec
from kvscaler_api.signals import SignalsSpec
from kvscaler_api.status import InferenceServiceStatus
from kvscaler_api.target import TargetReference
from kvscaler_api.template import PodTemplate

GROUP = "kvscaler.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceService"
PLURAL = "inferenceservices"
SINGULAR = "inferenceservice"
SHORT_NAME = "kvis"
CATEGORY = "kvscaler"

_NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"


class InferenceServiceSpec(ApiModel):
    """What a user wants."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.scaling.minReplicas >= 1 || self.routing.mode == 'Router'",
            "scaling.minReplicas 0 needs routing.mode Router, which holds requests until a"
            " replica has started",
            lambda spec: spec.scaling.min_replicas >= 1 or spec.routing.mode == RoutingMode.ROUTER,
        ),
        Rule(
            "!has(self.targetRef) || (!has(self.template) && !has(self.engine.image)"
            " && size(self.engine.args) == 0)",
            "targetRef scales what already runs: it excludes template, engine.image and"
            " engine.args",
            lambda spec: (
                spec.target_ref is None
                or (spec.template is None and spec.engine.image is None and not spec.engine.args)
            ),
        ),
        Rule(
            "has(self.targetRef) == has(oldSelf.targetRef)"
            " && (!has(self.targetRef) || self.targetRef == oldSelf.targetRef)",
            "targetRef is immutable: make another InferenceService instead",
            holds=None,
        ),
    )

    replicas: Annotated[int, Field(ge=0, le=10_000)] = Field(
        1,
        description=(
            "Replicas that run now: what the scale subresource reads and writes. scaling.mode says"
            " who writes it; leave it out of files that you apply."
        ),
    )
    model: ModelSpec = Field(description="The model to serve.")
    engine: EngineSpec = Field(EngineSpec(), description="The engine that runs the model.")
    accelerator: AcceleratorSpec = Field(
        description="The accelerator of each replica; the memory budget is computed for it."
    )
    cache: CacheSpec = Field(CacheSpec(), description="How keys and values are kept.")
    objectives: ObjectivesSpec = Field(
        ObjectivesSpec(), description="Latency that clients are promised."
    )
    scaling: ScalingSpec = Field(
        description="How many replicas there may be, who decides, and how they go away."
    )
    admission: AdmissionSpec = Field(
        AdmissionSpec(),
        description="What a replica lets in, so that no admitted request runs out of memory.",
    )
    routing: RoutingSpec = Field(RoutingSpec(), description="How requests reach the replicas.")
    optimization: OptimizationSpec = Field(
        OptimizationSpec(), description="What may be turned on instead of adding replicas."
    )
    signals: SignalsSpec = Field(SignalsSpec(), description="Where the load is read.")
    target_ref: TargetReference | None = Field(
        None,
        description=(
            "Scale this object instead of making Pods. It must carry the annotation"
            " kvscaler.io/allow with this service's name. Excludes template; immutable."
        ),
    )
    template: PodTemplate | None = Field(
        None, description="Template of the serving Pods, merged with what the operator sets."
    )


class InferenceService(ApiModel):
    """An LLM service whose replicas and admission limits follow its KV-cache memory."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
            f"metadata.name must have at most {MAX_NAME_LENGTH} characters, as names of children"
            " are made from it",
            lambda service: len(service.metadata.name) <= MAX_NAME_LENGTH,
        ),
        Rule(
            f"self.metadata.name.matches('{_NAME_PATTERN}')",
            "metadata.name must start with a letter and hold only lower-case letters, digits and"
            " -, as a Service is named after it",
            lambda service: re.fullmatch(_NAME_PATTERN, service.metadata.name) is not None,
        ),
    )

    api_version: Literal["kvscaler.io/v1alpha1"] = "kvscaler.io/v1alpha1"
    kind: Literal["InferenceService"] = "InferenceService"
    metadata: ObjectMeta
    spec: InferenceServiceSpec = Field(description="What is wanted.")
    status: InferenceServiceStatus = Field(
        InferenceServiceStatus(), description="What the operator observed and decided."
    )

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that clients may use for the model: those of the spec, or the object's own."""
        return self.spec.model.served_names or (self.metadata.name,)


class InvalidServiceError(ValueError):
    """An object that cannot be read as an InferenceService; the text names field and cause."""


def read_service(value: dict[str, Any]) -> InferenceService:
    """Read an object as the API server returns it.

    Raises InvalidServiceError with one `path: cause` per fault, for `SpecValid=False/Invalid`: it
    can only happen to objects stored under an older or a hand-edited CRD. A status that cannot be
    read (a newer operator wrote it) is taken as empty: everything in it is found again.
    """
    try:
        return InferenceService.from_wire(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        if all(fault["loc"][:1] == ("status",) for fault in faults):
            return read_service({key: part for key, part in value.items() if key != "status"})
        words = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults[:8])
        raise InvalidServiceError("; ".join(words)) from error
