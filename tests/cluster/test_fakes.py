"""Nodes that only pretend, beside a control plane without any real node."""

import copy
from pathlib import Path
from typing import Any

import pytest
from localcluster import build, fakes, handle, processes, standalone, steps
from localcluster.layout import Layout
from localcluster.steps import ClusterError

pytestmark = pytest.mark.cluster

MANY = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "many", "namespace": "default"},
    "spec": {
        "replicas": 40,
        "selector": {"matchLabels": {"app": "many"}},
        "template": {
            "metadata": {"labels": {"app": "many"}},
            "spec": {
                "tolerations": [{"key": fakes.LABEL, "operator": "Exists"}],
                "containers": [
                    {
                        "name": "engine",
                        "image": "docker.io/local/none:1",
                        "resources": {"limits": {"nvidia.com/gpu": "2"}},
                    }
                ],
            },
        },
    },
}


def test_pods_run_on_fake_nodes_as_far_as_their_accelerators_go(tmp_path: Path) -> None:
    layout = standalone.up(tmp_path, "fakes")
    try:
        cluster = handle.local(layout)
        fakes.set_nodes(layout, 9)
        cluster.apply(MANY)

        def ready() -> int:
            status = cluster.get("deployment", "many")["status"]
            return int(status.get("readyReplicas", 0))

        # 9 nodes with 8 accelerators hold 36 Pods of 2.
        steps.wait_until(lambda: ready() == 36, "36 Pods are ready", 60)
        assert cluster.get("deployment", "many")["status"]["unavailableReplicas"] == 4
        pods = cluster.get("pods")["items"]
        addresses = {pod["status"]["podIP"] for pod in pods if pod["status"].get("podIP")}
        assert len(addresses) == 36

        # One whose readiness somebody else tells runs, and is not ready at any moment.
        told: Any = copy.deepcopy(MANY)
        told["metadata"]["name"] = told["spec"]["selector"]["matchLabels"]["app"] = "told"
        told["spec"]["replicas"] = 1
        told["spec"]["template"]["metadata"] = {
            "labels": {"app": "told"},
            "annotations": {"kvscaler.io/fake-readiness": "told"},
        }
        told["spec"]["template"]["spec"]["containers"][0].pop("resources")
        cluster.apply(told)

        def running() -> list[dict[str, Any]]:
            pods = cluster.get("pods", "-l", "app=told")["items"]
            return [pod for pod in pods if pod["status"]["phase"] == "Running"]

        steps.wait_until(running, "the Pod runs", 60)
        (pod,) = running()
        conditions = {c["type"]: c["status"] for c in pod["status"]["conditions"]}
        assert conditions["Ready"] == conditions["ContainersReady"] == "False"
        (container,) = pod["status"]["containerStatuses"]
        assert (container["ready"], container["started"]) == (False, False)
        assert "readyReplicas" not in cluster.get("deployment", "told")["status"]

        cluster.kubectl("delete", "deployment", "many", "told", "--cascade=foreground")
        fakes.set_nodes(layout, 0)
        assert cluster.get("nodes")["items"] == []
        assert processes.find(layout.state, build.path("kwok")) is None
    finally:
        standalone.down(tmp_path, "fakes")


def test_more_fake_nodes_than_ranges_is_an_error(tmp_path: Path) -> None:
    layout = Layout("fakes", None, tmp_path, tmp_path / "kubeconfig")
    with pytest.raises(ClusterError, match="251 fake nodes: there can be 0 to 250"):
        fakes.set_nodes(layout, 251)
