"""What the children of a service are made from, and the metadata that all of them carry.

A child is ours when its controller is our object, by UID. Its labels serve selectors and watches
and prove nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvscaler_api.metadata import COMPONENT_LABEL, SERVICE_UID_LABEL
from kvscaler_api.service import API_VERSION, KIND, InferenceService

from kvscaler_operator.resources import Object, Resource

ENGINE_COMPONENT = "engine"
HTTP_PORT = 8000
STATE_PORT = 9090
ADMIN_PORT = 9443
PORTS = (("http", HTTP_PORT), ("metrics", STATE_PORT), ("admin", ADMIN_PORT))
"""Ports of every serving Pod, by name."""
KEYS_DIRECTORY = "/etc/kvscaler/keys"
DRAIN_GRACE_SECONDS = 30
"""What the grace period of a Pod adds to the drain timeout."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A service that is to have children.

    `memory_bytes` is the accelerator memory that the engine is given: what the budget was computed
    for. `public_keys` maps file names to PEM.
    """

    service: InferenceService
    image: str
    image_pull_policy: str
    memory_bytes: int
    public_keys: Mapping[str, str]

    @property
    def name(self) -> str:
        """Name of the service and of most children."""
        return self.service.metadata.name

    @property
    def namespace(self) -> str:
        """Namespace of the service and all children."""
        return self.service.metadata.namespace

    @property
    def uid(self) -> str:
        """UID of the service."""
        return self.service.metadata.uid


def replicas_service_name(name: str) -> str:
    """Name of the headless Service."""
    return f"{name}-replicas"


def keys_config_map_name(name: str) -> str:
    """Name of the ConfigMap with the public keys."""
    return f"{name}-admin-keys"


def admission_config_map_name(name: str) -> str:
    """Name of the ConfigMap with what the spec says about admission."""
    return f"{name}-admission"


def selector(uid: str) -> dict[str, str]:
    """Labels that select the serving Pods; a Deployment's selector can never change."""
    return {SERVICE_UID_LABEL: uid, COMPONENT_LABEL: ENGINE_COMPONENT}


def labels(intent: Intent) -> dict[str, str]:
    """Labels of every child: the selector's, and those that Kubernetes recommends."""
    return {
        "app.kubernetes.io/name": "kvscaler",
        "app.kubernetes.io/instance": intent.name,
        "app.kubernetes.io/component": ENGINE_COMPONENT,
        "app.kubernetes.io/managed-by": "kvscaler-operator",
        **selector(intent.uid),
    }


def document(intent: Intent, resource: Resource, name: str, body: Object) -> Object:
    """A child of the service: `body` with kind, metadata and the owner reference.

    The owner does not block its own deletion: that would need the right to change finalizers.
    """
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {
            "name": name,
            "namespace": intent.namespace,
            "labels": labels(intent),
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": intent.name,
                    "uid": intent.uid,
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ],
        },
        **body,
    }
