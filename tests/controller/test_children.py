"""Documents of children, the merge of a user's template, and what counts as a difference."""

import copy
from typing import Any

import pytest
from kvscaler_api.service import InferenceService
from kvscaler_operator.children.admission import admission_map
from kvscaler_operator.children.compare import HASH_ANNOTATION, difference, with_hash
from kvscaler_operator.children.deployment import deployment, pod_template
from kvscaler_operator.children.disruption import disruption_budget
from kvscaler_operator.children.intent import Intent
from kvscaler_operator.children.key_map import key_map
from kvscaler_operator.children.merge import merged
from kvscaler_operator.children.quantity import amount, memory_limit_bytes, same_quantity
from kvscaler_operator.children.services import client_service, replicas_service

from tests.controller.world import service_object


def intent(**spec: Any) -> Intent:
    obj = service_object("ns", "chat", **spec)
    obj["metadata"]["uid"] = "uid-1"
    service = InferenceService.from_wire(obj)
    return Intent(service, "image:1", "Never", 2 << 30, {"k.pem": "PEM"})


def engine(template: dict[str, Any]) -> dict[str, Any]:
    (container,) = (c for c in template["spec"]["containers"] if c["name"] == "engine")
    return dict(container)


def limits_reference(intent: Intent) -> dict[str, str]:
    (entry,) = (e for e in engine(pod_template(intent))["env"] if e["name"] == "KVSCALER_LIMITS")
    return dict(entry["valueFrom"]["configMapKeyRef"])


def environment(template: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in engine(template)["env"]}


def test_the_deployment_document_never_holds_replicas() -> None:
    assert "replicas" not in deployment(intent())["spec"]


def test_the_engine_is_told_everything_by_variables() -> None:
    values = environment(
        pod_template(
            intent(
                model={
                    "uri": "builtin://smollm2-135m",
                    "servedNames": ["a", "b"],
                    "maxContextTokens": 512,
                },
                cache={"blockTokens": 32},
            )
        )
    )
    assert values["KVSCALER_SERVICE_UID"] == "uid-1"
    assert values["KVSCALER_SERVED_NAMES"] == "a,b"
    assert values["KVSCALER_MAX_CONTEXT_TOKENS"] == "512"
    assert values["KVSCALER_BLOCK_TOKENS"] == "32"
    assert values["KVSCALER_MEMORY_BYTES"] == str(2 << 30)
    assert values["KVSCALER_ACCELERATOR"] == "cpu"
    assert values["KVSCALER_DRAIN_TIMEOUT_SECONDS"] == "60"


def test_the_sidecar_understands_what_the_operator_says() -> None:
    from kvscaler_sidecar.config import load

    values = environment(pod_template(intent()))
    values |= {"KVSCALER_POD_UID": "p", "KVSCALER_POD_NAME": "n", "KVSCALER_NAMESPACE": "ns"}
    reference = limits_reference(intent())
    admission = admission_map(intent())
    assert reference["name"] == admission["metadata"]["name"]
    values["KVSCALER_LIMITS"] = admission["data"][reference["key"]]
    settings = load({}, values)
    assert settings.memory_bytes == 2 << 30
    assert settings.max_context_tokens == 2048
    assert settings.limits["charge"] == "Expected"
    assert settings.limits["queue_requests"] == 256


def test_what_admission_may_change_is_not_in_the_pod_template() -> None:
    """Else another bound of a queue would replace every serving Pod."""
    before, after = (
        intent(),
        intent(
            admission={"charge": "WorstCase", "queue": {"maxRequests": 7, "maxWait": "9s"}},
            cache={"watermarkPercent": 11},
        ),
    )
    assert deployment(before) == deployment(after)
    assert admission_map(before)["data"] != admission_map(after)["data"]


def test_pods_are_restricted_get_no_token_and_outlive_their_drain() -> None:
    spec = pod_template(intent())["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["terminationGracePeriodSeconds"] == 90
    assert spec["securityContext"]["runAsNonRoot"] is True
    context = engine({"spec": spec})["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_a_users_template_is_kept_and_ours_wins() -> None:
    template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "x"}},
        "spec": {
            "nodeSelector": {"zone": "b"},
            "automountServiceAccountToken": True,
            "containers": [
                {"name": "helper", "image": "helper:1"},
                {
                    "name": "engine",
                    "image": "mine:2",
                    "resources": {"limits": {"memory": "2Gi", "cpu": "300m"}},
                    "env": [{"name": "HF_HOME", "value": "/cache"}],
                    "securityContext": {"readOnlyRootFilesystem": False},
                    "ports": [{"containerPort": 8000, "name": "web"}],
                },
            ],
            "volumes": [{"name": "cache", "emptyDir": {}}],
        },
    }
    made = pod_template(intent(template=template))
    container = engine(made)
    assert made["metadata"]["labels"]["team"] == "a"
    assert made["metadata"]["annotations"]["note"] == "x"
    assert made["spec"]["nodeSelector"] == {"zone": "b"}
    assert made["spec"]["automountServiceAccountToken"] is False
    assert [c["name"] for c in made["spec"]["containers"]] == ["engine", "helper"]
    assert container["image"] == "image:1"
    assert container["resources"]["limits"] == {"memory": "2Gi", "cpu": "300m"}
    assert {"name": "HF_HOME", "value": "/cache"} in container["env"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert [p["name"] for p in container["ports"] if p["containerPort"] == 8000] == ["http"]
    assert {v["name"] for v in made["spec"]["volumes"]} >= {"cache", "kvscaler-admin-keys"}


def test_the_accelerator_resource_is_requested() -> None:
    spec = {"name": "nvidia-h100-80gb-hbm3", "resourceName": "nvidia.com/gpu"}
    made = pod_template(intent(accelerator=spec))
    assert engine(made)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert engine(made)["resources"]["limits"]["memory"] == "2Gi"


def test_a_claim_is_mounted_read_only() -> None:
    made = pod_template(intent(model={"uri": "pvc://weights/llama"}))
    (mount,) = (m for m in engine(made)["volumeMounts"] if m["mountPath"].startswith("/models"))
    assert mount["readOnly"] is True
    volume = next(v for v in made["spec"]["volumes"] if v["name"] == mount["name"])
    assert volume["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}


def test_services_select_by_the_services_uid() -> None:
    both = [client_service(intent()), replicas_service(intent())]
    assert [s["metadata"]["name"] for s in both] == ["chat", "chat-replicas"]
    for service in both:
        assert service["spec"]["selector"] == {
            "kvscaler.io/service-uid": "uid-1",
            "kvscaler.io/component": "engine",
        }
    assert both[1]["spec"]["clusterIP"] == "None"
    assert both[1]["spec"]["publishNotReadyAddresses"] is True


def test_the_disruption_budget_never_blocks_broken_pods() -> None:
    spec = disruption_budget(intent())["spec"]
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_every_child_is_owned_without_blocking_deletion() -> None:
    for document in (deployment(intent()), client_service(intent()), key_map(intent())):
        (owner,) = document["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("uid-1", True)
        assert owner["blockOwnerDeletion"] is False


def test_a_merge_changes_neither_side() -> None:
    theirs = {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}]}
    ours = {"containers": [{"name": "a", "env": [{"name": "Y", "value": "2"}]}]}
    before = copy.deepcopy((theirs, ours))
    result = merged(theirs, ours)
    assert result["containers"][0]["env"] == [
        {"name": "X", "value": "1"},
        {"name": "Y", "value": "2"},
    ]
    assert (theirs, ours) == before


def live_of(document: dict[str, Any]) -> dict[str, Any]:
    """What a server would store: the document with defaults, and quantities rewritten."""
    live = copy.deepcopy(with_hash(document))
    live["metadata"]["uid"] = "uid-live"
    live["status"] = {"replicas": 1}
    live["spec"]["replicas"] = 3
    for container in live["spec"]["template"]["spec"]["containers"]:
        container["terminationMessagePath"] = "/dev/termination-log"
        container.setdefault("resources", {}).setdefault("limits", {})["cpu"] = "500m"
    return live


def test_defaults_of_the_server_are_no_difference() -> None:
    limits = {"resources": {"limits": {"memory": "2Gi", "cpu": "0.5"}}}
    template = {"spec": {"containers": [{"name": "engine", **limits}]}}
    document = deployment(intent(template=template))
    assert difference(with_hash(document), live_of(document)) is None


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        (lambda d: d["metadata"]["labels"].pop("kvscaler.io/service-uid"), "metadata.labels"),
        (
            lambda d: d["spec"]["template"]["spec"]["containers"][0].update(image="other"),
            "spec.template.spec.containers[engine].image",
        ),
        (
            lambda d: d["spec"]["template"]["spec"]["containers"][0]["env"].pop(0),
            "spec.template.spec.containers[engine].env",
        ),
        (lambda d: d["metadata"]["ownerReferences"].clear(), "metadata.ownerReferences"),
        (lambda d: d["metadata"]["annotations"].pop(HASH_ANNOTATION), "metadata.annotations"),
    ],
)
def test_edits_of_our_fields_are_differences(edit: Any, where: str) -> None:
    document = deployment(intent())
    live = live_of(document)
    edit(live)
    found = difference(with_hash(document), live)
    assert found is not None and found.startswith(where)


def test_quantities_are_compared_as_amounts() -> None:
    assert same_quantity("0.5", "500m")
    assert same_quantity("1Gi", "1024Mi")
    assert same_quantity(1, "1")
    assert not same_quantity("1Gi", "1G")
    assert not same_quantity("many", "many")
    assert amount("1.5Gi") == 3 << 29
    assert memory_limit_bytes({"resources": {"limits": {"memory": "300Mi"}}}) == 300 << 20
    assert memory_limit_bytes({"resources": None}) is None
    assert memory_limit_bytes({"resources": {"limits": {"memory": "lots"}}}) is None
