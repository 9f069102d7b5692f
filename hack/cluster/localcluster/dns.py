"""CoreDNS: names of Services, and for every other name an immediate 'no such name'."""

from typing import Any

from localcluster import images
from localcluster.api import Api
from localcluster.layout import Layout
from localcluster.steps import step, wait_until

READY_TIMEOUT_SECONDS = 120
NAMESPACE = "kube-system"
DEPLOYMENT = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/coredns"
LABELS = {"k8s-app": "kube-dns"}
DNS_PORT = 1053  # above 1024: the container is not root
METADATA = {"name": "coredns", "namespace": NAMESPACE, "labels": LABELS}
# Pods have no way out, so nothing is forwarded: the last block answers for the rest of the world.
COREFILE = f"""\
.:{DNS_PORT} {{
    errors
    health :8080
    ready :8181
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        ttl 5
    }}
    template ANY ANY . {{
        rcode NXDOMAIN
    }}
}}
"""
RULES = [
    {
        "apiGroups": [""],
        "resources": ["services", "pods", "namespaces"],
        "verbs": ["list", "watch"],
    },
    {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["list", "watch"],
    },
]


def apply(layout: Layout, api: Api) -> None:
    """Apply CoreDNS; done as soon as the API server answers, to be scheduled with the node."""
    core = f"/api/v1/namespaces/{NAMESPACE}"
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    rbac_version = "rbac.authorization.k8s.io/v1"
    role_name = {"name": "system:coredns"}
    api.apply(f"{core}/serviceaccounts", _object("v1", "ServiceAccount", METADATA))
    api.apply(f"{rbac}/clusterroles", _object(rbac_version, "ClusterRole", role_name, rules=RULES))
    api.apply(
        f"{rbac}/clusterrolebindings",
        _object(
            rbac_version,
            "ClusterRoleBinding",
            role_name,
            roleRef={
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": role_name["name"],
            },
            subjects=[{"kind": "ServiceAccount", "name": "coredns", "namespace": NAMESPACE}],
        ),
    )
    api.apply(
        f"{core}/configmaps", _object("v1", "ConfigMap", METADATA, data={"Corefile": COREFILE})
    )
    api.apply(
        f"{core}/services",
        _object("v1", "Service", {**METADATA, "name": "kube-dns"}, spec=_service_spec(layout)),
    )
    api.apply(
        f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments",
        _object("apps/v1", "Deployment", METADATA, spec=_deployment_spec()),
    )


def wait_ready(api: Api) -> None:
    """Wait until the rollout is complete."""

    def rolled_out() -> bool:
        deployment = api.get(DEPLOYMENT)
        return deployment is not None and is_rolled_out(deployment)

    with step("DNS ready"):
        wait_until(rolled_out, "CoreDNS is rolled out", READY_TIMEOUT_SECONDS)


def is_rolled_out(deployment: dict[str, Any]) -> bool:
    status = deployment.get("status", {})
    current: bool = status.get("observedGeneration") == deployment["metadata"]["generation"]
    wanted = deployment["spec"]["replicas"]
    return current and status.get("updatedReplicas") == status.get("readyReplicas") == wanted


def _object(version: str, kind: str, metadata: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _service_spec(layout: Layout) -> dict[str, Any]:
    return {
        "clusterIP": str(layout.dns_address),
        "selector": LABELS,
        "ports": [
            {"name": f"dns-{protocol.lower()}", "port": 53, "targetPort": DNS_PORT}
            | {"protocol": protocol}
            for protocol in ("UDP", "TCP")
        ],
    }


def _deployment_spec() -> dict[str, Any]:
    container = {
        "name": "coredns",
        "image": images.system_image("coredns"),
        "imagePullPolicy": "Never",
        "ports": [
            {"name": f"dns-{protocol.lower()}", "containerPort": DNS_PORT, "protocol": protocol}
            for protocol in ("UDP", "TCP")
        ],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "livenessProbe": {"httpGet": {"path": "/health", "port": 8080}, "failureThreshold": 5},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
    }
    return {
        "replicas": 1,
        "selector": {"matchLabels": LABELS},
        "template": {
            "metadata": {"labels": LABELS},
            "spec": {
                "serviceAccountName": "coredns",
                "priorityClassName": "system-cluster-critical",
                "dnsPolicy": "Default",
                "containers": [container],
                "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
            },
        },
    }
