"""The chart, installed once for every test on the cluster, whatever its folder.

One operator serves a whole cluster, so there can be one release only: tests here and the chaos
tests share it, and its fixtures are a plugin of the root's conftest.
"""

from collections.abc import AsyncIterator, Iterator, Mapping

import pytest
from localcluster.handle import ClusterHandle

from hack.demo.kube import Kube
from tests.chart.release import CRD, OPERATOR, Release
from tests.e2e.live import Streams

NO_PROMETHEUS = "http://prometheus.kvscaler-nowhere.svc:9090"
"""Nobody serves it: all tests here run on the direct path, and one looks at how that is told."""


@pytest.fixture(scope="session")
def release(cluster: ClusterHandle, images: Mapping[str, str]) -> Iterator[Release]:
    """The chart in a namespace of its own; everything goes at the end."""
    others = cluster.get("deployments", "-A", "-l", OPERATOR)["items"]
    if others:
        where = others[0]["metadata"]["namespace"]
        pytest.fail(f"another operator runs in namespace {where} of this cluster: uninstall it")
    definition_was_there = cluster.try_kubectl("get", "crd", CRD).returncode == 0
    with cluster.namespace("kvscaler-e2e") as namespace:
        made = Release(cluster, images, namespace, "kvscaler")
        made.values["prometheus"] = {"servers": {"default": {"url": NO_PROMETHEUS}}}
        made.adopt_definition()
        made.install()
        yield made
        cluster.try_kubectl("delete", "kvis", "--all", "-A", "--timeout=60s")
        made.uninstall()
        made.return_definition()
    if not definition_was_there:
        cluster.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=60s")


@pytest.fixture
async def kube(cluster: ClusterHandle, release: Release) -> AsyncIterator[Kube]:
    """Reads of the cluster, with the operator installed."""
    async with Kube(cluster.kubeconfig, cluster.context) as opened:
        yield opened


@pytest.fixture
async def streams() -> AsyncIterator[Streams]:
    """Streaming clients."""
    async with Streams() as opened:
        yield opened
