"""The Deployment of serving Pods.

Its document never holds `spec.replicas`: a field that is once applied and then left out is reset
to 1 by the API server. Replicas are set at creation and afterwards only through the scale
subresource (see `replicas.py`).
"""

from kvscaler_api.engine import EngineType
from kvscaler_api.executor import is_modelled
from kvscaler_api.template import ENGINE_CONTAINER

from kvscaler_operator.children.admission import ADMISSION_KEY
from kvscaler_operator.children.intent import (
    DRAIN_GRACE_SECONDS,
    KEYS_DIRECTORY,
    PORTS,
    STATE_PORT,
    Intent,
    admission_config_map_name,
    document,
    keys_config_map_name,
    labels,
    selector,
)
from kvscaler_operator.children.merge import merged
from kvscaler_operator.resources import DEPLOYMENTS, Object

KEYS_VOLUME = "kvscaler-admin-keys"
TEMPORARY_VOLUME = "kvscaler-tmp"
REVISION_HISTORY = 3
PROGRESS_DEADLINE_SECONDS = 3600
"""Large weights take long to load; a Pod that crashes is seen from its own status much earlier."""
SCRAPE_ANNOTATIONS = {
    "prometheus.io/scrape": "true",
    "prometheus.io/port": str(STATE_PORT),
    "prometheus.io/path": "/metrics",
}


def deployment(intent: Intent) -> Object:
    """The Deployment without its replicas."""
    spec = {
        "selector": {"matchLabels": selector(intent.uid)},
        "revisionHistoryLimit": REVISION_HISTORY,
        "progressDeadlineSeconds": PROGRESS_DEADLINE_SECONDS,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": pod_template(intent),
    }
    return document(intent, DEPLOYMENTS, intent.name, {"spec": spec})


def pod_template(intent: Intent) -> Object:
    """The user's template with our labels, our container's keys and restricted defaults."""
    spec = intent.service.spec
    theirs: Object = {"metadata": {}, "spec": {}}
    if spec.template is not None:
        theirs = {
            "metadata": {
                "labels": dict(spec.template.metadata.labels),
                "annotations": dict(spec.template.metadata.annotations),
            },
            "spec": spec.template.spec,
        }
    drain_seconds = int(spec.scaling.scale_down.drain_timeout_seconds)
    ours: Object = {
        "metadata": {"labels": labels(intent)},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": drain_seconds + DRAIN_GRACE_SECONDS,
            "containers": [_container(intent)],
            "volumes": _volumes(intent),
        },
    }
    return dict(merged(_defaulted(theirs), ours))


def _defaulted(theirs: Object) -> Object:
    """Defaults that a user may override: PSA `restricted`, and discovery by annotation."""
    pod_defaults = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    container_defaults = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    defaults = {
        "metadata": {"annotations": SCRAPE_ANNOTATIONS},
        "spec": {
            "enableServiceLinks": False,
            "securityContext": pod_defaults,
            "containers": [{"name": ENGINE_CONTAINER, "securityContext": container_defaults}],
        },
    }
    return dict(merged(defaults, theirs))


def _container(intent: Intent) -> Object:
    spec = intent.service.spec
    container: Object = {
        "name": ENGINE_CONTAINER,
        "image": intent.image,
        "imagePullPolicy": intent.image_pull_policy,
        "args": ["serve", *spec.engine.args],
        "env": _environment(intent),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in PORTS],
        "startupProbe": _probe("/health/ready", period=1, failures=3600),
        "readinessProbe": _probe("/health/ready", period=2, failures=2),
        "livenessProbe": _probe("/health/live", period=10, failures=6),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": KEYS_VOLUME, "mountPath": KEYS_DIRECTORY, "readOnly": True},
            {"name": TEMPORARY_VOLUME, "mountPath": "/tmp"},  # noqa: S108 - a volume of the Pod
        ],
    }
    # What is modelled needs no accelerator, so that it runs where there is none.
    if spec.accelerator.resource_name is not None and not is_modelled(spec):
        amount = str(spec.engine.tensor_parallel * spec.engine.pipeline_parallel)
        container["resources"] = {"limits": {spec.accelerator.resource_name: amount}}
    claim = _claim(intent)
    if claim is not None:
        container["volumeMounts"].append(
            {"name": "kvscaler-model", "mountPath": f"/models/{claim}", "readOnly": True}
        )
    return container


def _probe(path: str, *, period: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "metrics"},
        "periodSeconds": period,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def _volumes(intent: Intent) -> list[Object]:
    # Optional: a replica can serve before it can be told anything, and the ConfigMap may follow.
    keys = {"name": keys_config_map_name(intent.name), "optional": True}
    volumes: list[Object] = [
        {"name": KEYS_VOLUME, "configMap": keys},
        {"name": TEMPORARY_VOLUME, "emptyDir": {}},
    ]
    claim = _claim(intent)
    if claim is not None:
        source = {"claimName": claim, "readOnly": True}
        volumes.append({"name": "kvscaler-model", "persistentVolumeClaim": source})
    return volumes


def _claim(intent: Intent) -> str | None:
    model = intent.service.spec.model
    if model.scheme != "pvc":
        return None
    return model.uri.removeprefix("pvc://").partition("/")[0]


def _environment(intent: Intent) -> list[Object]:
    service, spec = intent.service, intent.service.spec
    assert spec.engine.type is EngineType.KVSCALER
    values: dict[str, str] = {
        "KVSCALER_SERVICE_UID": intent.uid,
        "KVSCALER_SERVICE_NAME": intent.name,
        "KVSCALER_MODEL_URI": spec.model.uri,
        "KVSCALER_SERVED_NAMES": ",".join(service.served_names),
        "KVSCALER_BLOCK_TOKENS": str(spec.cache.block_tokens),
        "KVSCALER_CACHE_DTYPE": spec.cache.dtype.value,
        "KVSCALER_PREFIX_CACHING": spec.cache.prefix_caching.value,
        "KVSCALER_MEMORY_BYTES": str(intent.memory_bytes),
        "KVSCALER_MEMORY_UTILIZATION_PERCENT": str(spec.engine.memory_utilization_percent),
        "KVSCALER_ADMIN_KEYS_DIR": KEYS_DIRECTORY,
        "KVSCALER_DRAIN_TIMEOUT_SECONDS": f"{spec.scaling.scale_down.drain_timeout_seconds:g}",
    }
    if spec.accelerator.name is not None:
        values["KVSCALER_ACCELERATOR"] = spec.accelerator.name
    if spec.model.max_context_tokens is not None:
        values["KVSCALER_MAX_CONTEXT_TOKENS"] = str(spec.model.max_context_tokens)
    fields = {
        "KVSCALER_POD_UID": "metadata.uid",
        "KVSCALER_POD_NAME": "metadata.name",
        "KVSCALER_NAMESPACE": "metadata.namespace",
    }
    literal: list[Object] = [{"name": name, "value": value} for name, value in values.items()]
    admission = {"name": admission_config_map_name(intent.name), "key": ADMISSION_KEY}
    return [
        *literal,
        {"name": "KVSCALER_LIMITS", "valueFrom": {"configMapKeyRef": admission}},
        *(
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ),
    ]
