"""What the faults act on: an API server behind a proxy, or a cluster with the chart installed."""

from typing import Any

import pytest

from tests.controller.world import install_definition


@pytest.fixture(scope="session")
def server(apiserver: Any) -> Any:
    """The API server with the CRD; no cluster."""
    install_definition(apiserver)
    return apiserver
