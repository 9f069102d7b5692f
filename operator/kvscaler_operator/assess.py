"""From a spec to the memory budget of one replica: which facts, which device, does it fit.

Facts of the model come from the spec, then the catalogue, then what a replica read from the
model's files. The formula itself is `kvscaler.budget`; here is only where its inputs come from.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from kvscaler import hardware
from kvscaler.budget import (
    AdmissionPolicy,
    BudgetUnknown,
    EngineSettings,
    KVBudget,
    UnknownEngine,
    compute_budget,
    profile_for,
)
from kvscaler.budget.settings import AUTO
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator, UnknownAccelerator
from kvscaler.models import (
    LayerGroup,
    LayerKind,
    ModelArchitecture,
    ModelNotUnderstood,
    UnknownModel,
    catalogue,
    inline_architecture,
    inline_group,
)
from kvscaler.models.architecture import Scalar
from kvscaler.performance import StepTimeUnknown, step_time_on
from kvscaler_api.conflicts import engine_container
from kvscaler_api.executor import is_modelled, wanted_compute_dtype
from kvscaler_api.model import ArchitectureSpec
from kvscaler_api.model import LayerGroup as LayerGroupSpec
from kvscaler_api.reasons import Reason
from kvscaler_api.service import InferenceServiceSpec
from kvscaler_api.status_budget import FactsSource

from kvscaler_operator.children.quantity import memory_limit_bytes

Facts = Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause and its words, for a condition."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Assessment:
    """What is known of one replica's memory before and while it runs.

    Without `obstacle` a replica may be started. `budget` is absent while facts are awaited: then
    the first Pod reads them and refuses by itself what does not fit.
    """

    memory_bytes: int | None
    accelerator: Accelerator | None = None
    architecture: ModelArchitecture | None = None
    source: FactsSource | None = None
    model_name: str | None = None
    budget: KVBudget | None = None
    obstacle: Finding | None = None
    awaiting: Finding | None = None


def admission_policy(spec: InferenceServiceSpec) -> AdmissionPolicy:
    """What the spec decides about admission."""
    return AdmissionPolicy(
        mode=spec.admission.mode,
        charge=spec.admission.charge,
        queue_requests=spec.admission.queue.max_requests,
        max_wait_seconds=spec.admission.queue.max_wait_seconds,
        watermark_percent=float(spec.cache.watermark_percent),
    )


def assess(
    spec: InferenceServiceSpec, reported: Facts | None, compute_dtype: str | None
) -> Assessment:
    """Facts, device and budget of one replica.

    `reported` are facts that a replica read from the model's files; `compute_dtype` is what a
    running replica computes in (it picks the faster one for the CPU that it finds).
    """
    try:
        accelerator = _accelerator(spec)
    except UnknownAccelerator as error:
        return Assessment(None, obstacle=Finding(Reason.UNKNOWN_ACCELERATOR, str(error)))
    if accelerator.memory_bytes is None:
        message = (
            f"accelerator {accelerator.name} is the memory of the container, and the container "
            "engine of spec.template has no memory limit: set resources.limits.memory"
        )
        return Assessment(None, accelerator, obstacle=Finding(Reason.MEMORY_LIMIT_MISSING, message))
    memory = accelerator.memory_bytes
    try:
        architecture, source, name = _architecture(spec, reported)
    except UnknownModel as error:
        message = f"{error}. The first replica reads the facts from the model's files"
        awaiting = Finding(Reason.AWAITING_MODEL_FACTS, message)
        return Assessment(memory, accelerator, awaiting=awaiting)
    except ModelNotUnderstood as error:
        obstacle = Finding(Reason.ARCHITECTURE_NOT_UNDERSTOOD, str(error))
        return Assessment(memory, accelerator, obstacle=obstacle)
    return _with_budget(
        spec, Assessment(memory, accelerator, architecture, source, name), compute_dtype
    )


def _with_budget(
    spec: InferenceServiceSpec, known: Assessment, compute_dtype: str | None
) -> Assessment:
    assert known.accelerator is not None and known.architecture is not None
    settings = EngineSettings(
        memory_utilization_percent=float(spec.engine.memory_utilization_percent),
        max_context_tokens=spec.model.max_context_tokens,
        block_tokens=spec.cache.block_tokens,
        kv_dtype=spec.cache.dtype.value,
        compute_dtype=wanted_compute_dtype(spec) or compute_dtype or AUTO,
        tensor_parallel=spec.engine.tensor_parallel,
    )
    budget = obstacle = None
    try:
        profile = profile_for(_engine(spec), known.accelerator)
        budget = compute_budget(known.architecture, known.accelerator, profile, settings)
    except (BudgetUnknown, UnknownEngine, ModelNotUnderstood) as error:
        obstacle = Finding(Reason.DOES_NOT_FIT, str(error))
    if budget is not None and not budget.fit.fits:
        obstacle = Finding(Reason.DOES_NOT_FIT, budget.fit.message)
    if budget is not None and is_modelled(spec):
        try:
            step_time_on(
                known.architecture, known.accelerator, budget.compute_dtype, budget.kv_dtype
            )
        except StepTimeUnknown as error:
            words = f"the executor Modelled can't stand for it: {error}"
            obstacle = Finding(Reason.UNKNOWN_ACCELERATOR, words)
    return Assessment(
        known.memory_bytes,
        known.accelerator,
        known.architecture,
        known.source,
        known.model_name,
        budget,
        obstacle,
    )


def _engine(spec: InferenceServiceSpec) -> str:
    """The engine's type and, where the tag of its image tells it, its version."""
    tag = (spec.engine.image or "").partition("@")[0].rpartition("/")[2].partition(":")[2]
    version = Version.parse(tag)
    return spec.engine.type.value if version is None else f"{spec.engine.type.value}@{version}"


def _accelerator(spec: InferenceServiceSpec) -> Accelerator:
    wanted = spec.accelerator
    if wanted.name is None:
        assert wanted.memory_bytes is not None
        bandwidth = wanted.bandwidth_bytes_per_second
        return hardware.custom(wanted.memory_bytes, None if bandwidth is None else float(bandwidth))
    accelerator = hardware.find(wanted.name)
    if accelerator.memory_bytes is not None:
        return accelerator
    limit = memory_limit_bytes(engine_container(spec))
    return accelerator if limit is None else accelerator.with_memory(limit)


def _architecture(
    spec: InferenceServiceSpec, reported: Facts | None
) -> tuple[ModelArchitecture, FactsSource, str | None]:
    if spec.model.architecture is not None:
        return _inline(spec.model.architecture), FactsSource.INLINE, None
    try:
        entry = catalogue.find(spec.model.uri)
    except UnknownModel:
        if reported is None:
            raise
        return ModelArchitecture.from_config(reported), FactsSource.REPLICA, None
    return entry.architecture, FactsSource.CATALOGUE, entry.name


def _inline(spec: ArchitectureSpec) -> ModelArchitecture:
    return inline_architecture(
        tuple(_layers(group) for group in spec.layers),
        weights_bytes=spec.weights_bytes,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        attention_heads=spec.attention_heads,
        vocab_size=spec.vocabulary_size,
        max_context_tokens=spec.max_context_tokens,
        facts=json.loads(json.dumps(spec.to_wire())),
    )


def _layers(group: LayerGroupSpec) -> LayerGroup:
    """A group of the API as the core computes with it; its rules ensure that the widths are there."""
    width = group.latent_dim if group.latent_dim is not None else group.head_dim or 0
    latent = group.latent_dim is not None
    return inline_group(
        LayerKind(group.kind.value.casefold()),
        group.count,
        kv_heads=1 if latent else group.kv_heads or 0,
        key_dim=width,
        value_dim=0 if latent else width,
        window_tokens=group.window_tokens,
        state_bytes=group.state_bytes,
    )
