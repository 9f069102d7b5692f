"""A real API server with the committed CRD, and the smallest object that it accepts."""

import copy
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kvscaler_api.crd import CRD_NAME, packaged_text
from kvscaler_api.service import API_VERSION, GROUP, KIND, PLURAL, VERSION

NAMESPACE = "api-tests"


def merged(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """JSON merge patch (RFC 7386) of two objects."""
    result = copy.deepcopy(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


class Api:
    """InferenceServices on a server; a refusal is the server's message, acceptance is None."""

    def __init__(self, server: Any) -> None:
        self.kubectl: Callable[..., subprocess.CompletedProcess[str]] = server.try_kubectl
        self.client = config.new_client_from_config(str(server.kubeconfig), server.context)
        self.objects = client.CustomObjectsApi(self.client)

    def create(self, value: dict[str, Any], **options: Any) -> dict[str, Any]:
        return self._whole(
            self.objects.create_namespaced_custom_object(
                GROUP, VERSION, NAMESPACE, PLURAL, value, **options
            )
        )

    def refusal(self, value: dict[str, Any]) -> str | None:
        """What the server says against creating an object (by dry run)."""
        return self._refused(lambda: self.create(value, dry_run="All"))

    def change_refusal(self, name: str, spec: dict[str, Any]) -> str | None:
        """What the server says against a merge patch of a stored object's spec (by dry run)."""
        return self._refused(
            lambda: self.objects.patch_namespaced_custom_object(
                GROUP,
                VERSION,
                NAMESPACE,
                PLURAL,
                name,
                {"spec": spec},
                dry_run="All",
                _content_type="application/merge-patch+json",
            )
        )

    def set_status(self, name: str, status: dict[str, Any]) -> dict[str, Any]:
        return self._whole(
            self.objects.patch_namespaced_custom_object_status(
                GROUP,
                VERSION,
                NAMESPACE,
                PLURAL,
                name,
                {"status": status},
                _content_type="application/merge-patch+json",
            )
        )

    def delete_all(self) -> None:
        self.objects.delete_collection_namespaced_custom_object(GROUP, VERSION, NAMESPACE, PLURAL)

    @staticmethod
    def _refused(call: Callable[[], object]) -> str | None:
        try:
            call()
        except ApiException as error:
            return str(json.loads(error.body)["message"])
        return None

    @staticmethod
    def _whole(answer: Any) -> dict[str, Any]:
        assert isinstance(answer, dict)
        return answer


@pytest.fixture(scope="session")
def api(apiserver: Any) -> Api:
    """The server with the packaged CRD established and a namespace for these tests."""
    done = apiserver.try_kubectl("apply", "--server-side", "-f", "-", text=packaged_text())
    assert done.returncode == 0, done.stderr
    created = apiserver.try_kubectl("create", "namespace", NAMESPACE)
    assert created.returncode == 0 or "already exists" in created.stderr, created.stderr
    deadline = time.monotonic() + 30
    established = ("wait", "--for=condition=Established", "--timeout=5s", f"crd/{CRD_NAME}")
    # kubectl wait fails at once while the new object has no status at all.
    while (done := apiserver.try_kubectl(*established)).returncode != 0:
        assert time.monotonic() < deadline, done.stderr
    while apiserver.try_kubectl("explain", "kvis.spec.scaling").returncode != 0:
        assert time.monotonic() < deadline, "the schema was never published"
    return Api(apiserver)


@pytest.fixture
def clean_api(api: Api) -> Iterator[Api]:
    """The server, left without InferenceServices."""
    yield api
    api.delete_all()


@pytest.fixture
def service() -> dict[str, Any]:
    """The smallest InferenceService."""
    return minimal()


def minimal() -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "chat", "namespace": NAMESPACE},
        "spec": {
            "model": {"uri": "builtin://smollm2-135m"},
            "accelerator": {"name": "cpu"},
            "scaling": {"mode": "Managed", "maxReplicas": 5},
        },
    }


@pytest.fixture
def changed(service: dict[str, Any]) -> Any:
    """A function that gives the smallest object with a merge patch of its spec applied."""

    def change(spec: dict[str, Any]) -> dict[str, Any]:
        return merged(service, {"spec": spec})

    return change
