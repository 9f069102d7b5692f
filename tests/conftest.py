"""Fixtures that reach a real API server, shared by every room's tests."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from localcluster import handle, lifecycle, standalone
from localcluster.handle import ClusterHandle
from localcluster.layout import DEFAULT_NAME
from localimages import build as image_build
from localimages import containerd

TREE = Path(__file__).resolve().parent.parent

# A busy machine is no fault of the code. Continuous integration repeats the same examples, so that
# it is red for what changed; everywhere else new ones are looked for.
settings.register_profile(
    "kvscaler",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvscaler")

pytest_plugins = ["tests.chaos.rows", "tests.e2e.installed"]


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ClusterHandle]:
    """etcd and kube-apiserver alone, empty and on ports of their own; needs no root.

    No controller runs: nothing reconciles built-in objects or collects garbage.
    """
    with standalone.temporary("tests") as layout:
        yield handle.local(layout)


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterHandle]:
    """The local cluster, or the one that KVSCALER_TEST_KUBECONFIG and _CONTEXT name.

    A local cluster that was up already stays up; one brought up for the tests goes with them.
    """
    foreign = handle.foreign_from_environment()
    if foreign is not None:
        yield foreign
        return
    was_up = lifecycle.is_up(TREE, DEFAULT_NAME)
    layout = lifecycle.up(TREE, DEFAULT_NAME)
    yield handle.local(layout)
    if not was_up and os.environ.get("KVSCALER_KEEP_CLUSTER") != "1":
        lifecycle.down(TREE, DEFAULT_NAME)


@pytest.fixture(scope="session")
def images(cluster: ClusterHandle) -> Mapping[str, str]:
    """References of this tree's images (`operator`, `sidecar`), built and on the node.

    The first build takes minutes; later ones only add what changed.
    """
    if cluster.layout is None:
        pytest.skip("images are built for a local cluster; this one is not ours to import into")
    references = image_build.build_all()
    containerd.import_images(cluster.layout.containerd_socket, list(references.values()))
    return references


@pytest.fixture
def namespace(cluster: ClusterHandle) -> Iterator[str]:
    """A namespace of the test's own on `cluster`."""
    with cluster.namespace() as name:
        yield name
