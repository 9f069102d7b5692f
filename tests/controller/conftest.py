"""A World on the session's API server, in a namespace of the test's own."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

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
