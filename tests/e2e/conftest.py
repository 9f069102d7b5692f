"""The chart, installed once for all tests here, and one small service with the real model."""

from collections.abc import AsyncIterator, Iterator, Mapping

import pytest
from localcluster.handle import ClusterHandle

from hack.demo.kube import Kube
from tests.chart.release import CRD, OPERATOR, Release
from tests.e2e.live import Live, Streams, example

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


@pytest.fixture(scope="session")
def shared_service(cluster: ClusterHandle, release: Release) -> Iterator[tuple[str, str]]:
    """Namespace and name of a service that many tests use, one after the other."""
    with cluster.namespace("kvscaler-e2e") as namespace:
        cluster.apply(example(namespace, "chat"))
        yield namespace, "chat"
        # Streams are over: nobody needs the grace that a drain gives.
        cluster.try_kubectl("delete", "kvis", "--all", "-n", namespace, "--timeout=60s")
        cluster.try_kubectl(
            "delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0"
        )


@pytest.fixture
async def kube(cluster: ClusterHandle, release: Release) -> AsyncIterator[Kube]:
    async with Kube(cluster.kubeconfig, cluster.context) as opened:
        yield opened


@pytest.fixture
async def chat(kube: Kube, cluster: ClusterHandle, shared_service: tuple[str, str]) -> Live:
    """The shared service with one ready replica, as every test must leave it."""
    live = Live(kube, cluster, *shared_service)
    await live.until_ready(1)
    return live


@pytest.fixture
async def streams() -> AsyncIterator[Streams]:
    async with Streams() as opened:
        yield opened
