"""What the cluster's own tests need beside the session's cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster import handle, lifecycle, probes
from localcluster.handle import ClusterHandle
from localcluster.probes import Probes


@pytest.fixture(scope="session")
def probe_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return probes.write_image(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def cluster_with_probe(cluster: ClusterHandle, probe_archive: Path) -> ClusterHandle:
    if cluster.layout is None:
        pytest.skip("these tests import an image, which needs a local cluster")
    cluster.import_image(probe_archive)
    return cluster


@pytest.fixture
def probe(cluster_with_probe: ClusterHandle, namespace: str) -> Probes:
    return Probes(cluster_with_probe, namespace)


@pytest.fixture
def second_cluster(tmp_path: Path) -> Iterator[ClusterHandle]:
    """Another cluster, as if from a working tree that is only this test's."""
    layout = lifecycle.up(tmp_path, "second")
    yield handle.local(layout)
    lifecycle.down(tmp_path, "second")
