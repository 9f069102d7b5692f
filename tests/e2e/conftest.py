"""One small service with the real model, which many tests use (the chart: `installed`)."""

from collections.abc import Iterator

import pytest
from localcluster.handle import ClusterHandle

from hack.demo.kube import Kube
from tests.chart.release import Release
from tests.e2e.live import Live, example


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
async def chat(kube: Kube, cluster: ClusterHandle, shared_service: tuple[str, str]) -> Live:
    """The shared service with one ready replica, as every test must leave it."""
    live = Live(kube, cluster, *shared_service)
    await live.until_ready(1)
    return live
