"""Rules that hold for everything that the chart makes, whatever the values."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

Object = dict[str, Any]
GRID = [
    {"watchNamespaces": namespaces, "adminKey": {"secretName": secret}, **extra}
    for namespaces, secret, extra in itertools.product(
        ([], ["team-a", "team-b"]),
        ("", "given"),
        (
            {},
            {
                "networkPolicy": {"enabled": True},
                "metrics": {"podMonitor": {"enabled": True}},
                "prometheus": {
                    "servers": {"p": {"url": "http://p", "caSecret": {"name": "a", "key": "b"}}}
                },
            },
        ),
    )
]


@pytest.fixture(params=range(len(GRID)), ids=lambda i: f"values-{i}")
def objects(request, render) -> list[Object]:
    return render(GRID[request.param])


def hook(o: Object) -> str:
    return str((o["metadata"].get("annotations") or {}).get("helm.sh/hook", ""))


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for o in objects:
        spec = (
            o["spec"]
            if o["kind"] == "Pod"
            else (o.get("spec") or {}).get("template", {}).get("spec")
        )
        if spec and o["kind"] != "CustomResourceDefinition":
            yield f"{o['kind']}/{o['metadata']['name']}", spec


def roles(objects: list[Object]) -> list[Object]:
    return [o for o in objects if o["kind"] in ("Role", "ClusterRole")]


def test_pods_meet_pod_security_restricted_and_more(objects):
    seen = 0
    for name, pod in pods(objects):
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] == 65532, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod), name
        assert pod["enableServiceLinks"] is False, name
        allowed = {"configMap", "secret", "emptyDir", "projected"}
        assert {k for v in pod.get("volumes", ()) for k in v} - {"name"} <= allowed, name
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
            assert "memory" in container["resources"]["limits"], name
            seen += 1
    assert seen >= 2


def test_the_operator_runs_once(objects):
    (deployment,) = (o for o in objects if o["kind"] == "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    # A budget for a single Pod would block every drain of its node.
    assert not any(o["kind"] == "PodDisruptionBudget" for o in objects)


def test_no_role_has_wildcards(objects):
    for role in roles(objects):
        for rule in role["rules"]:
            for values in rule.values():
                assert not any("*" in value for value in values), role["metadata"]["name"]


def test_no_lasting_role_knows_secrets(objects):
    lasting = [role for role in roles(objects) if not hook(role)]
    assert len(lasting) >= 3
    for role in lasting:
        for rule in role["rules"]:
            assert not any(r.split("/")[0] == "secrets" for r in rule["resources"])


def test_what_knows_secrets_is_a_hook_for_one_secret_and_dies_with_it(objects):
    for role in roles(objects):
        rules = [rule for rule in role["rules"] if "secrets" in rule["resources"]]
        if not rules:
            continue
        assert role["kind"] == "Role"
        assert hook(role) == "pre-install,pre-upgrade"
        policy = role["metadata"]["annotations"]["helm.sh/hook-delete-policy"].split(",")
        assert {"hook-succeeded", "hook-failed"} <= set(policy)
        (rule,) = rules
        assert rule["resources"] == ["secrets"]
        assert rule["resourceNames"] == ["kvscaler-admin-key"]
        assert set(rule["verbs"]) == {"get", "create", "patch"}


def test_rights_that_give_more_rights_are_not_given(objects):
    dangerous = {"impersonate", "escalate", "bind", "deletecollection"}
    dangerous_resources = {
        "pods/exec", "pods/attach", "pods/ephemeralcontainers", "serviceaccounts/token",
        "roles", "rolebindings", "clusterroles", "clusterrolebindings", "nodes", "nodes/proxy",
    }  # fmt: skip
    for role in roles(objects):
        if role["metadata"]["name"].endswith("-edit"):
            continue  # for people, on InferenceServices alone
        for rule in role["rules"]:
            assert not dangerous & set(rule["verbs"])
            assert not dangerous_resources & set(rule["resources"])
            assert "delete" not in rule["verbs"]


def test_watched_namespaces_get_roles_and_the_cluster_only_one_definition(render):
    objects = render({"watchNamespaces": ["team-a", "team-b"], "rbac": {"aggregateRoles": False}})
    cluster_roles = [o for o in objects if o["kind"] == "ClusterRole"]
    assert [role["rules"] for role in cluster_roles] == [
        [
            {
                "apiGroups": ["apiextensions.k8s.io"],
                "resources": ["customresourcedefinitions"],
                "resourceNames": ["inferenceservices.kvscaler.io"],
                "verbs": ["get"],
            }
        ]
    ]
    everywhere = next(
        o
        for o in render()
        if o["kind"] == "ClusterRole" and o["metadata"]["name"] == "kvscaler-operator"
    )
    for namespace in ("team-a", "team-b"):
        (role,) = (
            o for o in objects if o["kind"] == "Role" and o["metadata"]["namespace"] == namespace
        )
        (binding,) = (
            o
            for o in objects
            if o["kind"] == "RoleBinding" and o["metadata"]["namespace"] == namespace
        )
        assert role["rules"] == everywhere["rules"]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "kvscaler-operator", "namespace": "kvscaler-system"}
        ]


def test_leases_are_the_release_namespaces_alone(objects):
    holders = [
        role for role in roles(objects) for rule in role["rules"] if "leases" in rule["resources"]
    ]
    assert {(r["kind"], r["metadata"].get("namespace")) for r in holders} == {
        ("Role", "kvscaler-system")
    }


def test_only_the_pods_that_talk_to_the_api_get_a_token(objects):
    accounts = [o for o in objects if o["kind"] == "ServiceAccount"]
    assert all(a["automountServiceAccountToken"] is False for a in accounts)
    bound = {s["name"] for o in objects if o["kind"].endswith("RoleBinding") for s in o["subjects"]}
    assert "kvscaler-test" not in bound  # the test's account has no rights
