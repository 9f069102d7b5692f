"""The scrape configuration of docs/install.md finds serving Pods, on a real Prometheus 3."""

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvscaler_operator.children import deployment, intent
from localcluster import build, images, probes
from localcluster.handle import ClusterHandle
from localcluster.steps import wait_until

pytestmark = pytest.mark.cluster
INSTALL = Path(__file__).parents[2] / "docs" / "install.md"
PORT = 9095
PAGE = """# TYPE kvscaler_ready gauge
kvscaler_ready{namespace="forged",pod="forged"} 1
"""


def documented_configuration() -> dict[str, Any]:
    """The job that the installation page shows, as it stands there."""
    found = re.search(
        r"<!-- scrape configuration: tested as it stands -->\n```yaml\n(.*?)```",
        INSTALL.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert found is not None
    configuration: dict[str, Any] = yaml.safe_load(found.group(1))
    return configuration


class Prometheus:
    """A server in the node's network."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **query: str) -> Any:
        """`data` of an answer of its API."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@pytest.fixture
def prometheus(cluster: ClusterHandle, tmp_path: Path) -> Iterator[Prometheus]:
    """Prometheus with the documented job; only where the API server is gets added."""
    if cluster.layout is None:
        pytest.skip("Prometheus runs beside the node of a local cluster")
    build.ensure("prometheus")
    configuration = documented_configuration()
    for job in configuration["scrape_configs"]:
        for discovery in job["kubernetes_sd_configs"]:
            discovery["kubeconfig_file"] = str(cluster.kubeconfig)
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    listen = f"{cluster.layout.node_address}:{PORT}"
    log = tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [
                "nsenter", f"--net={cluster.layout.network_namespace}", "--",
                str(build.path("prometheus")), f"--config.file={file}",
                f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={listen}",
            ],
            stdout=sink, stderr=sink,
        )  # fmt: skip
    try:
        server = Prometheus(f"http://{listen}")
        wait_until(lambda: server.ready() or process.poll() is not None, "Prometheus answers", 60)
        assert process.poll() is None, log.read_text()[-2000:]
        yield server
    finally:
        process.terminate()
        process.wait(20)


def pod(namespace: str, name: str, labels: dict[str, str], annotations: dict[str, str]) -> Any:
    """A Pod with the ports of a serving Pod, and one page on the port for metrics."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": namespace,
            "name": name,
            "labels": labels,
            "annotations": annotations,
        },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "engine",
                    "image": images.system_image("probe"),
                    "imagePullPolicy": "Never",
                    "args": ["serve", str(intent.STATE_PORT), PAGE],
                    "ports": [{"name": n, "containerPort": p} for n, p in intent.PORTS],
                }
            ],
        },
    }


def test_annotated_pods_are_found_once_with_labels_that_they_do_not_choose(
    cluster: ClusterHandle, namespace: str, prometheus: Prometheus, tmp_path: Path
) -> None:
    cluster.import_image(probes.write_image(tmp_path))
    service = type("Service", (), {"name": "chat", "uid": "0000"})
    labels = intent.labels(service)  # type: ignore[arg-type]
    cluster.apply(
        pod(namespace, "serving", labels, deployment.SCRAPE_ANNOTATIONS),
        pod(namespace, "not-annotated", labels, {}),
        pod(namespace, "another-product", {"app": "x"}, deployment.SCRAPE_ANNOTATIONS),
    )
    for name in ("serving", "not-annotated", "another-product"):
        cluster.kubectl("wait", f"pod/{name}", "-n", namespace, "--for=condition=Ready",
                        "--timeout=60s")  # fmt: skip
    found: list[Any] = []

    def scraped() -> bool:
        found[:] = prometheus.get("query", query=f'kvscaler_ready{{namespace="{namespace}"}}')[
            "result"
        ]
        return bool(found)

    wait_until(scraped, "the serving Pod's page is scraped", 60)
    assert [sample["value"][1] for sample in found] == ["1"]
    assert found[0]["metric"]["pod"] == "serving"
    assert found[0]["metric"]["exported_namespace"] == "forged"  # and steers nothing

    targets = prometheus.get("targets", state="active")["activeTargets"]
    ours = [t for t in targets if t["labels"].get("namespace") == namespace]
    assert [(t["labels"]["pod"], t["health"]) for t in ours] == [("serving", "up")]
    assert ours[0]["scrapeUrl"].endswith(f":{intent.STATE_PORT}/metrics")
    assert ours[0]["scrapeInterval"] == "5s"
