"""A World on the session's API server, in a namespace of the test's own."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from localcluster import fakes, handle, standalone
from localcluster.handle import ClusterHandle

from tests.controller.controlled import ControlledWorld
from tests.controller.world import World, install_definition, make_namespace


@pytest.fixture(scope="session")
def server(apiserver: Any) -> Any:
    """The API server with the CRD."""
    install_definition(apiserver)
    return apiserver


@pytest.fixture
async def world(server: Any, tmp_path: Path) -> AsyncIterator[World]:
    """A World whose operator is not started yet."""
    namespace = make_namespace(server)
    async with World(server.kubeconfig, server.context, namespace, tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ClusterHandle]:
    """A control plane with its controllers, a node that pretends, the CRD and an audit log."""
    with standalone.temporary("controlled", with_controllers=True, audit=True) as layout:
        fakes.set_nodes(layout, 1, attached=True)
        made = handle.local(layout)
        install_definition(made)
        yield made


@pytest.fixture
async def controlled(
    control_plane: ClusterHandle, tmp_path: Path
) -> AsyncIterator[ControlledWorld]:
    """A ControlledWorld whose operator is not started yet."""
    with control_plane.namespace("controlled") as namespace:
        async with ControlledWorld(control_plane, namespace, tmp_path) as made:
            yield made
