"""The two scale subresources: our object's, and its Deployment's.

Caches lag behind our own writes by a watch event. Until it arrives, what was written counts, so
that one decision is one write.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvscaler_operator.cache import ObjectCache, version_of
from kvscaler_operator.gateways.kube import FIELD_MANAGER, KubeGateway
from kvscaler_operator.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    Object,
    Resource,
    name_of,
    namespace_of,
    uid_of,
)


class ScaleWriter:
    """Reads and writes `spec.replicas` of objects with a scale subresource."""

    def __init__(self, kube: KubeGateway, caches: Mapping[Resource, ObjectCache]) -> None:
        self._kube = kube
        self._caches = caches
        self._written: dict[str, tuple[int, int]] = {}

    def replicas(self, obj: Object) -> int:
        """`spec.replicas` of a cached object, or what was written to it since."""
        written = self._written.get(uid_of(obj))
        if written is not None:
            if version_of(obj) < written[1]:
                return written[0]
            del self._written[uid_of(obj)]
        return int((obj.get("spec") or {}).get("replicas", 1))

    async def write_service(self, obj: Object, replicas: int) -> None:
        """Set the replicas of our own object, as `kubectl scale` would."""
        scale = await self._kube.merge(
            INFERENCE_SERVICES,
            namespace_of(obj),
            name_of(obj),
            {"metadata": {"uid": uid_of(obj)}, "spec": {"replicas": replicas}},
            "scale",
        )
        self._note(uid_of(obj), replicas, scale)

    async def write_deployment(self, deployment: Object, replicas: int) -> None:
        """Set the replicas of a Deployment, and own them through its scale subresource."""
        document = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {
                "name": name_of(deployment),
                "namespace": namespace_of(deployment),
                "uid": uid_of(deployment),
            },
            "spec": {"replicas": replicas},
        }
        scale = await self._kube.apply(DEPLOYMENTS, document, subresource="scale")
        self._note(uid_of(deployment), replicas, scale)

    def _note(self, uid: str, replicas: int, scale: Object) -> None:
        self._written[uid] = (replicas, version_of(scale))

    def forget(self, uid: str) -> None:
        """Forget an object that is gone."""
        self._written.pop(uid, None)


@dataclass(frozen=True, slots=True)
class ScaleTrace:
    """Who set `spec.replicas` through the scale subresource, and when, as the API server has it."""

    manager: str
    time: str


def foreign_scale(obj: Object) -> ScaleTrace | None:
    """Who else owns `spec.replicas` through the scale subresource, if anybody."""
    for entry in obj["metadata"].get("managedFields") or ():
        owns = "f:replicas" in (entry.get("fieldsV1") or {}).get("f:spec", {})
        if owns and entry.get("subresource") == "scale" and entry.get("manager") != FIELD_MANAGER:
            return ScaleTrace(str(entry.get("manager")), str(entry.get("time")))
    return None


def foreign_scaler(obj: Object) -> str | None:
    """The name of who else owns `spec.replicas` through the scale subresource."""
    trace = foreign_scale(obj)
    return None if trace is None else trace.manager
