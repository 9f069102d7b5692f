"""Nodes that only pretend, beside a control plane without any real node."""

from pathlib import Path

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

        cluster.kubectl("delete", "deployment", "many", "--cascade=foreground")
        fakes.set_nodes(layout, 0)
        assert cluster.get("nodes")["items"] == []
        assert processes.find(layout.state, build.path("kwok")) is None
    finally:
        standalone.down(tmp_path, "fakes")


def test_more_fake_nodes_than_ranges_is_an_error(tmp_path: Path) -> None:
    layout = Layout("fakes", None, tmp_path, tmp_path / "kubeconfig")
    with pytest.raises(ClusterError, match="251 fake nodes: there can be 0 to 250"):
        fakes.set_nodes(layout, 251)
