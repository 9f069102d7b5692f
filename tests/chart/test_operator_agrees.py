"""What the chart passes to the operator is what the operator takes, and the other way round."""

from pathlib import Path
from typing import Any

import pytest
from kvscaler_operator import settings
from kvscaler_operator.children import intent

Object = dict[str, Any]


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {o["metadata"]["name"]: o for o in objects if o["kind"] == kind}


def container(objects: list[Object]) -> Object:
    (deployment,) = of_kind(objects, "Deployment").values()
    found: Object = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def test_the_operator_reads_what_the_chart_writes(render, tmp_path: Path) -> None:
    objects = render(
        {
            "watchNamespaces": ["a", "b"],
            "signals": {"paths": "direct"},
            "log": {"format": "text", "level": "debug"},
            "sidecar": {"image": {"repository": "r/s", "tag": "t", "pullPolicy": "Never"}},
            "prometheus": {
                "servers": {"p": {"url": "https://p", "caSecret": {"name": "s", "key": "k"}}}
            },
        }
    )
    read = settings.parse_arguments(container(objects)["args"])
    assert read.namespaces == ("a", "b")
    assert {path.value for path in read.signal_paths} == {"direct"}
    assert (read.release_namespace, read.lease_name) == ("kvscaler-system", "kvscaler-operator")
    assert (read.sidecar_image, read.image_pull_policy) == ("r/s:t", "Never")
    assert (read.log_format, read.log_level) == ("text", "debug")
    mounts = {m["name"]: m["mountPath"] for m in container(objects)["volumeMounts"]}
    assert str(read.key_file) == f"{mounts['admin-key']}/key.pem"
    assert str(read.prometheus_config) == f"{mounts['config']}/prometheus.yaml"

    file = tmp_path / "prometheus.yaml"
    (config,) = of_kind(objects, "ConfigMap").values()
    file.write_text(config["data"]["prometheus.yaml"])
    (server,) = settings.prometheus_servers(file).values()
    assert (server.name, server.url) == ("p", "https://p")
    assert str(server.ca_file) == f"{mounts['prometheus-p']}/ca.crt"


def test_no_server_is_a_file_that_the_operator_reads(render, tmp_path: Path) -> None:
    file = tmp_path / "prometheus.yaml"
    (config,) = of_kind(render(), "ConfigMap").values()
    file.write_text(config["data"]["prometheus.yaml"])
    assert settings.prometheus_servers(file) == {}


def test_ports_are_the_operators(render) -> None:
    objects = render()
    read = settings.parse_arguments(container(objects)["args"])
    ports = {p["name"]: p["containerPort"] for p in container(objects)["ports"]}
    assert ports == {"metrics": read.metrics_port, "probes": read.probe_port}
    (service,) = of_kind(objects, "Service").values()
    assert [p["targetPort"] for p in service["spec"]["ports"]] == ["metrics"]


def test_the_lease_role_is_for_the_operators_lease(render) -> None:
    objects = render()
    read = settings.parse_arguments(container(objects)["args"])
    rules = of_kind(objects, "Role")["kvscaler-operator-lease"]["rules"]
    assert [rule.get("resourceNames") for rule in rules] == [None, [read.lease_name]]


@pytest.mark.parametrize("api", ["--api-versions=monitoring.coreos.com/v1/PodMonitor"])
def test_serving_pods_carry_what_pod_monitor_and_network_policy_select(render, api) -> None:
    objects = render({"networkPolicy": {"enabled": True}}, api)
    service = type("Service", (), {"name": "s", "uid": "u"})
    labels = intent.labels(service)  # type: ignore[arg-type]
    monitor = of_kind(objects, "PodMonitor")["kvscaler-serving"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["podMetricsEndpoints"][0]["port"] in dict(intent.PORTS)
    (policy,) = of_kind(objects, "NetworkPolicy").values()
    (to_pods,) = (rule for rule in policy["spec"]["egress"] if "to" in rule)
    assert to_pods["to"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    assert {p["port"] for p in to_pods["ports"]} == {intent.STATE_PORT, intent.ADMIN_PORT}
