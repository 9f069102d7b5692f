"""The kinds of objects that the operator reads or writes, and where the API serves them."""

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as JSON gives it. Typed models of the client are strict where servers newer
or older than the client are not, and slow; so the operator speaks dicts."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind and its place in the API."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """`apps/v1`, or `v1` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(
        self, namespace: str | None = None, name: str | None = None, subresource: str | None = None
    ) -> str:
        """Path below the server; names are checked by the API server before they get here."""
        parts = ["", "apis", self.group] if self.group else ["", "api"]
        parts.append(self.version)
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)


SERVICES = Resource("", "v1", "services", "Service")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
PODS = Resource("", "v1", "pods", "Pod")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
INFERENCE_SERVICES = Resource("kvscaler.io", "v1alpha1", "inferenceservices", "InferenceService")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")
CUSTOM_RESOURCES = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False
)

CHILDREN = (SERVICES, CONFIG_MAPS, DEPLOYMENTS, DISRUPTION_BUDGETS)
"""Kinds that the operator makes."""

WATCHED = (INFERENCE_SERVICES, *CHILDREN, REPLICA_SETS, PODS)
"""Kinds that the operator watches; all but the first by the label of a service's UID."""


def namespace_of(obj: Object) -> str:
    """Namespace of an object; empty for cluster-scoped ones."""
    return str(obj["metadata"].get("namespace", ""))


def name_of(obj: Object) -> str:
    """Name of an object."""
    return str(obj["metadata"]["name"])


def uid_of(obj: Object) -> str:
    """UID of an object that the server has stored."""
    return str(obj["metadata"]["uid"])


def controller_of(obj: Object) -> Object | None:
    """The owner reference of what controls this object, or `None`."""
    for owner in obj["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return dict(owner)
    return None


def controller_uid(obj: Object) -> str | None:
    """UID of the owner that controls this object, or `None`."""
    owner = controller_of(obj)
    return None if owner is None else str(owner["uid"])
