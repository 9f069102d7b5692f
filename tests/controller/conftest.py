"""A World on the session's API server, in a namespace of the test's own."""

import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kvscaler_api.crd import packaged_text

from tests.controller.world import World


@pytest.fixture(scope="session")
def server(apiserver: Any) -> Any:
    """The API server with the CRD."""
    apiserver.kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", "-", text=packaged_text()
    )
    deadline = time.monotonic() + 30
    while apiserver.try_kubectl("get", "kvis", "--all-namespaces").returncode != 0:
        assert time.monotonic() < deadline, "the CRD is not served"
    return apiserver


@pytest.fixture
async def world(server: Any, tmp_path: Path) -> AsyncIterator[World]:
    """A World whose operator is not started yet."""
    namespace = f"controller-{secrets.token_hex(3)}"
    server.kubectl("create", "namespace", namespace)
    # Its controller does not run here, and no Pod is created without it.
    server.kubectl("create", "serviceaccount", "default", "-n", namespace)
    async with World(server.kubeconfig, server.context, namespace, tmp_path) as made:
        yield made
