"""Whether a HorizontalPodAutoscaler writes what we would write, so that we do not fight it.

An autoscaler on our Deployment, or on our object while `scaling.mode` is Managed, and we would undo
each other's numbers for ever. We do not watch autoscalers: that would be all of a cluster's for
a rare mistake. Whoever writes a scale leaves a trace in the object's managed fields; only then the
namespace's autoscalers are listed, and while one conflicts, again from time to time. KEDA acts
through an autoscaler that it makes, which its ScaledObject owns.
"""

import logging
from dataclasses import dataclass, replace

from kvscaler_api.scaling import ScalingMode

from kvscaler_operator.gateways.kube import ForbiddenError, KubeGateway
from kvscaler_operator.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    Object,
    Resource,
    controller_of,
    name_of,
    namespace_of,
)
from kvscaler_operator.scale import ScaleTrace, foreign_scale

logger = logging.getLogger(__name__)

AUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
LOOK_AGAIN_SECONDS = 15.0
AUTOSCALER_MANAGER = "kube-controller-manager"
"""Field manager of the controller that acts for all autoscalers."""

Traces = tuple[ScaleTrace | None, ScaleTrace | None]


@dataclass(frozen=True, slots=True)
class AutoscalerLook:
    """What was found at the last look, and at which traces of others that was."""

    traces: Traces = (None, None)
    mode: ScalingMode | None = None
    at: float = float("-inf")
    found: str | None = None


async def conflicting_autoscaler(
    kube: KubeGateway,
    service: Object,
    deployment: Object | None,
    mode: ScalingMode,
    last: AutoscalerLook,
    now: float,
) -> AutoscalerLook:
    """Who scales what is ours to scale; `found` has its kind, name and target in words."""
    on_service = foreign_scale(service) if mode is ScalingMode.MANAGED else None
    on_deployment = foreign_scale(deployment) if deployment is not None else None
    traces: Traces = (on_service, on_deployment)
    news = traces not in (last.traces, (None, None))
    old = mode is not last.mode or abs(now - last.at) >= LOOK_AGAIN_SECONDS
    if not news and not (last.found is not None and old):
        return replace(last, traces=traces, mode=mode)
    targets = [(DEPLOYMENTS, name_of(deployment))] if deployment is not None else []
    if mode is ScalingMode.MANAGED:
        targets.append((INFERENCE_SERVICES, name_of(service)))
    try:
        listing = await kube.list(AUTOSCALERS, namespace_of(service))
    except ForbiddenError as error:
        logger.warning("Autoscalers can't be listed, so only their traces are seen: %s", error)
        return AutoscalerLook(traces, mode, now, _by_trace(traces))
    found = (_words(each, targets) for each in listing.items)
    return AutoscalerLook(traces, mode, now, next((words for words in found if words), None))


def _words(autoscaler: Object, targets: list[tuple[Resource, str]]) -> str | None:
    reference = (autoscaler.get("spec") or {}).get("scaleTargetRef") or {}
    group = str(reference.get("apiVersion", "")).partition("/")[0]
    for resource, name in targets:
        if (group, reference.get("kind"), reference.get("name")) == (
            resource.group,
            resource.kind,
            name,
        ):
            owner = controller_of(autoscaler)
            whose = f" of {owner['kind']} {owner['name']}" if owner else ""
            words = f"HorizontalPodAutoscaler {name_of(autoscaler)}{whose}"
            return f"{words} scales {resource.kind} {name}"
    return None


def _by_trace(traces: Traces) -> str | None:
    for trace, kind in zip(traces, ("the InferenceService", "its Deployment"), strict=True):
        if trace is not None and trace.manager == AUTOSCALER_MANAGER:
            return f"a HorizontalPodAutoscaler scales {kind}"
    return None
