"""What the chart makes of its values."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

CHART = Path(__file__).parents[2] / "charts" / "kvscaler"
GOLDEN = Path(__file__).parent / "golden"
PODMONITORS = "--api-versions=monitoring.coreos.com/v1/PodMonitor"
Object = dict[str, Any]


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {o["metadata"]["name"]: o for o in objects if o["kind"] == kind}


def the_operator(objects: list[Object]) -> Object:
    (deployment,) = of_kind(objects, "Deployment").values()
    return deployment


def arguments(objects: list[Object]) -> list[str]:
    args: list[str] = the_operator(objects)["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


def servers(objects: list[Object]) -> Any:
    (config,) = of_kind(objects, "ConfigMap").values()
    return yaml.safe_load(config["data"]["prometheus.yaml"])["servers"]


def test_helm_lint_finds_nothing(chart):
    done = chart.helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


GOLDEN_CASES = {
    "default": {},
    "namespaces": {"watchNamespaces": ["team-a", "team-b"], "rbac": {"aggregateRoles": False}},
}
SHOWN = ("Deployment", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_workload_and_rights_are_as_recorded(case, render):
    """KVSCALER_UPDATE_GOLDEN=1 records them anew: read the difference before committing it."""
    shown = []
    for o in render(GOLDEN_CASES[case]):
        if o["kind"] in SHOWN and (case == "default" or o["kind"] != "Deployment"):
            o["metadata"].pop("labels")
            shown.append(o)
    text = yaml.safe_dump_all(shown, sort_keys=False)
    path = GOLDEN / f"{case}.yaml"
    if os.environ.get("KVSCALER_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_images_by_tag_digest_and_default(render):
    default = render()
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert f"--sidecar-image=docker.io/local/kvscaler-sidecar:{version}" in arguments(default)

    digest = "sha256:" + "a" * 64
    set_ = render(
        {
            "image": {"repository": "r.example/op", "tag": "t1", "digest": digest},
            "sidecar": {"image": {"repository": "r.example/side", "tag": "t2"}},
        }
    )
    images = {
        c["image"]
        for o in set_
        for c in (o.get("spec", {}).get("template", o).get("spec") or {}).get("containers", ())
    }
    assert images == {f"r.example/op@{digest}"}  # operator, hook and test: one image
    assert "--sidecar-image=r.example/side:t2" in arguments(set_)


def test_prometheus_servers_become_a_file_and_mounted_credentials(render):
    objects = render(
        {
            "prometheus": {
                "servers": {
                    "default": {"url": "http://prometheus.monitoring:9090"},
                    "tenant": {
                        "url": "https://front.example",
                        "headers": {"X-Scope-OrgID": "team"},
                        "bearerTokenSecret": {"name": "reader", "key": "t"},
                        "caConfigMap": {"name": "roots", "key": "bundle.pem"},
                        "clientCertificateSecret": {"name": "client"},
                    },
                }
            }
        }
    )
    folder = "/etc/kvscaler/prometheus/tenant"
    assert servers(objects) == {
        "default": {"url": "http://prometheus.monitoring:9090"},
        "tenant": {
            "url": "https://front.example",
            "headers": {"X-Scope-OrgID": "team"},
            "bearerTokenFile": f"{folder}/token",
            "caFile": f"{folder}/ca.crt",
            "certificateFile": f"{folder}/tls.crt",
            "keyFile": f"{folder}/tls.key",
        },
    }
    pod = the_operator(objects)["spec"]["template"]["spec"]
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert "prometheus-default" not in volumes
    paths = [
        (source.get("secret") or source["configMap"])["items"]
        for source in volumes["prometheus-tenant"]["projected"]["sources"]
    ]
    assert [(item["key"], item["path"]) for items in paths for item in items] == [
        ("t", "token"),
        ("bundle.pem", "ca.crt"),
        ("tls.crt", "tls.crt"),
        ("tls.key", "tls.key"),
    ]
    mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    assert mounts["prometheus-tenant"] == folder


def test_changed_servers_restart_the_operator(render):
    def checksum(url: str) -> str:
        objects = render({"prometheus": {"servers": {"default": {"url": url}}}})
        template = the_operator(objects)["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum("http://a") == checksum("http://a") != checksum("http://b")


def test_pod_monitors_only_where_the_kind_exists_or_they_are_demanded(render):
    def monitors(enabled: Any, *args: str) -> int:
        values = {"metrics": {"podMonitor": {"enabled": enabled}}}
        return len(of_kind(render(values, *args), "PodMonitor"))

    assert [monitors("auto"), monitors("auto", PODMONITORS)] == [0, 2]
    assert [monitors(True), monitors("true"), monitors(False, PODMONITORS)] == [2, 2, 0]


def test_pod_monitor_selects_serving_pods_in_the_watched_namespaces(render):
    values = {
        "watchNamespaces": ["team-a"],
        "metrics": {"podMonitor": {"labels": {"scrape": "here"}}},
    }
    monitors = of_kind(render(values, PODMONITORS), "PodMonitor")
    serving = monitors["kvscaler-serving"]
    assert serving["metadata"]["labels"]["scrape"] == "here"
    assert serving["spec"]["namespaceSelector"] == {"matchNames": ["team-a"]}
    everywhere = of_kind(render({}, PODMONITORS), "PodMonitor")["kvscaler-serving"]["spec"]
    assert everywhere["namespaceSelector"] == {"any": True}
    # Exported labels must never pass for target labels.
    assert "honorLabels" not in everywhere["podMetricsEndpoints"][0]


def test_crd_is_the_generated_one_kept_or_not_or_absent(render):
    generated = yaml.safe_load((CHART / "files" / "crd.yaml").read_text())
    (kept,) = of_kind(render(), "CustomResourceDefinition").values()
    assert kept == generated
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (loose,) = of_kind(render({"crds": {"keep": False}}), "CustomResourceDefinition").values()
    assert "annotations" not in loose["metadata"]
    assert loose["spec"] == generated["spec"]
    assert of_kind(render({"crds": {"enabled": False}}), "CustomResourceDefinition") == {}


def test_a_key_of_ones_own_means_no_hook(render):
    objects = render({"adminKey": {"secretName": "mine", "secretKey": "ed25519"}})
    assert not any(
        "pre-install" in (o["metadata"].get("annotations") or {}).get("helm.sh/hook", "")
        for o in objects
    )
    volumes = the_operator(objects)["spec"]["template"]["spec"]["volumes"]
    (key,) = (v["secret"] for v in volumes if v["name"] == "admin-key")
    assert (key["secretName"], key["items"]) == ("mine", [{"key": "ed25519", "path": "key.pem"}])


def test_pod_settings_are_passed_on(render):
    values = {
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "podAnnotations": {"a": "1"},
        "podLabels": {"l": "2"},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://p"}],
        "extraArgs": ["--workers=8"],
        "imagePullSecrets": [{"name": "pull"}],
        "serviceAccount": {"create": False, "name": "given"},
        "resources": {"limits": {"memory": "1Gi"}},
    }
    objects = render(values)
    template = the_operator(objects)["spec"]["template"]
    pod, container = template["spec"], template["spec"]["containers"][0]
    assert pod["nodeSelector"] == values["nodeSelector"]
    assert pod["tolerations"] == values["tolerations"]
    assert pod["affinity"] == values["affinity"]
    assert pod["priorityClassName"] == values["priorityClassName"]
    assert pod["serviceAccountName"] == "given"
    assert pod["imagePullSecrets"] == values["imagePullSecrets"]
    assert template["metadata"]["annotations"]["a"] == "1"
    assert template["metadata"]["labels"]["l"] == "2"
    assert container["env"][-1] == values["extraEnv"][0]
    assert container["args"][-1] == "--workers=8"
    assert container["resources"]["limits"] == {"memory": "1Gi"}
    assert "kvscaler-operator" not in of_kind(objects, "ServiceAccount")


def test_network_policy_names_what_the_operator_needs(render):
    assert of_kind(render(), "NetworkPolicy") == {}
    values = {
        "networkPolicy": {"enabled": True, "apiServerPorts": [6443]},
        "prometheus": {"servers": {"a": {"url": "http://p:9099/x"}, "b": {"url": "https://q"}}},
    }
    (policy,) = of_kind(render(values), "NetworkPolicy").values()
    ports = [sorted(p["port"] for p in rule["ports"]) for rule in policy["spec"]["egress"]]
    assert ports == [[53, 53], [6443], [9090, 9443], [9099], [443]]
    deployment = the_operator(render(values))
    assert policy["spec"]["podSelector"] == deployment["spec"]["selector"]


def test_view_and_edit_are_aggregated_and_nobody_edits_status(render):
    roles = of_kind(render(), "ClusterRole")
    view, edit = roles["kvscaler-view"], roles["kvscaler-edit"]
    aggregate = "rbac.authorization.k8s.io/aggregate-to-"
    assert view["metadata"]["labels"][f"{aggregate}view"] == "true"
    assert f"{aggregate}view" not in edit["metadata"]["labels"]
    assert {v for rule in view["rules"] for v in rule["verbs"]} == {"get", "list", "watch"}
    assert not any("inferenceservices/status" in rule["resources"] for rule in edit["rules"])
    assert "kvscaler-view" not in of_kind(
        render({"rbac": {"aggregateRoles": False}}), "ClusterRole"
    )


@pytest.mark.parametrize(
    ("release", "values", "name"),
    [
        ("kvscaler", {}, "kvscaler-operator"),
        ("prod", {}, "prod-kvscaler-operator"),
        ("prod", {"nameOverride": "kv"}, "prod-kv-operator"),
        ("prod", {"fullnameOverride": "scaler"}, "scaler-operator"),
        ("r" * 53, {}, "r" * 40 + "-operator"),
    ],
)
def test_names_follow_the_release(chart, release, values, name):
    objects = chart.render(values, release=release)
    assert the_operator(objects)["metadata"]["name"] == name
    assert f"--lease-name={name}" in arguments(objects)
    assert all(len(o["metadata"]["name"]) <= 63 for o in objects)


WRONG = {
    "a key that does not exist": {"replicaCount": 2},
    "a nested key that does not exist": {"image": {"repositori": "x"}},
    "a number for a tag": {"image": {"tag": 1.5}},
    "a digest that is none": {"image": {"digest": "latest"}},
    "an unknown path": {"signals": {"paths": "direct,telepathy"}},
    "a server without an address": {"prometheus": {"servers": {"default": {}}}},
    "an address without a scheme": {"prometheus": {"servers": {"default": {"url": "prom:9090"}}}},
    "a name that no service can give": {
        "prometheus": {"servers": {"My Prom": {"url": "http://p"}}}
    },
    "two sources of one CA": {
        "prometheus": {
            "servers": {
                "p": {
                    "url": "https://p",
                    "caSecret": {"name": "a", "key": "b"},
                    "caConfigMap": {"name": "a", "key": "b"},
                }
            }
        }
    },
    "the same namespace twice": {"watchNamespaces": ["a", "a"]},
    "a namespace that can't exist": {"watchNamespaces": ["Team_A"]},
    "namespaces as text": {"watchNamespaces": "a,b"},
    "text for a switch": {"crds": {"keep": "yes"}},
    "less time to end than ending takes": {"terminationGracePeriodSeconds": 5},
    "a port beyond all ports": {"networkPolicy": {"apiServerPorts": [70000]}},
    "an unknown pull policy": {"sidecar": {"image": {"pullPolicy": "Sometimes"}}},
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_values_are_refused(what, chart):
    done = chart.try_render(WRONG[what])
    assert done.returncode == 1
    assert "values don't meet the specifications of the schema" in done.stderr


def test_the_table_in_the_readme_is_current():
    done = subprocess.run(
        [sys.executable, str(CHART.parents[1] / "hack" / "chart-values"), "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_object_of_the_schema_is_closed():
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)

    def check(values: Any, schema: Object, path: str) -> None:
        assert schema.get("additionalProperties") is False or not schema.get("properties"), path
        for key, value in values.items():
            known = schema["properties"][key]
            if "$ref" in known:
                known = definitions[known["$ref"].rsplit("/", 1)[1]]
            if isinstance(value, dict) and "properties" in known:
                check(value, known, f"{path}.{key}")

    definitions = schema["definitions"]
    check(values, schema, "")
