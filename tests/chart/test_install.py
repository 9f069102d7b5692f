"""A release's life on a real cluster: install, test, upgrade, uninstall, install again."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from localcluster import images as node_images
from localcluster.handle import ClusterHandle
from localcluster.steps import wait_until

from tests.chart.release import CHART, CRD, Object, Release, errors

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
KIND = "inferenceservices"


@pytest.fixture(scope="module")
def crd_goes_again(cluster: ClusterHandle) -> Iterator[None]:
    """Remove the definition afterwards, but only if it was not there before."""
    was_there = cluster.try_kubectl("get", "crd", CRD).returncode == 0
    if was_there and cluster.layout is None:
        pytest.skip("kvscaler is installed on this cluster already: it is left alone")
    yield
    if not was_there:
        cluster.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=60s")


@pytest.fixture
def release(
    cluster: ClusterHandle, images: Mapping[str, str], namespace: str, crd_goes_again: None
) -> Iterator[Release]:
    """A release that can be installed; it goes at the end."""
    made = Release(cluster, images, namespace, "kvscaler")
    made.adopt_definition()
    yield made
    cluster.try_kubectl("delete", KIND, "--all", "--all-namespaces", "--timeout=60s")
    made.uninstall()
    made.return_definition()


def service(namespace: str, name: str = "chat") -> Object:
    """The example's service, small and lone."""
    example: Object = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text("utf-8"))
    example["metadata"] = {"name": name, "namespace": namespace}
    example["spec"]["scaling"]["maxReplicas"] = 1
    example["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"].pop("cpu")
    return example


def condition(cluster: ClusterHandle, namespace: str, name: str, kind: str) -> Object:
    """A condition of a service; empty when it has none yet."""
    status = cluster.get(KIND, name, "-n", namespace).get("status") or {}
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def test_install_leaves_an_operator_a_key_and_no_right_to_read_it(release: Release) -> None:
    printed = release.install()
    assert "kubectl get kvis" in printed
    assert release.helm("test", release.name, "--logs").count("Succeeded") >= 1

    # The hook is gone with its rights; what it made is there.
    left = release.names("jobs,roles,rolebindings,serviceaccounts,pods")
    assert [name for name in left if "hook" in name or "test" in name] == ["pod/kvscaler-test"]
    assert f"secret/{release.name}-admin-key" in release.names("secrets")

    for verb in ("get", "list", "watch", "create", "patch", "delete"):
        assert not release.may(verb, "secrets", "--all-namespaces"), verb
        assert not release.may(verb, "secrets", "-n", release.namespace), verb
    for resource in ("inferenceservices.kvscaler.io", "deployments.apps"):
        assert release.may("patch", resource, "--subresource=scale", "--all-namespaces"), resource
    assert release.may("patch", "pods", "--all-namespaces")
    assert not release.may("delete", "deployments.apps", "--all-namespaces")
    assert not release.may("list", "customresourcedefinitions")
    pod = release.operator_pod()
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    assert errors(release.log()) == []


def test_the_operator_runs_where_only_restricted_pods_may(release: Release) -> None:
    release.cluster.kubectl(
        "label", "namespace", release.namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    release.install()
    assert release.helm("test", release.name, "--logs").count("Succeeded") >= 1


def test_roles_in_watched_namespaces_are_enough_and_others_are_left_alone(
    release: Release,
) -> None:
    cluster = release.cluster
    with cluster.namespace() as watched, cluster.namespace() as other:
        release.values["watchNamespaces"] = [watched]
        release.install()
        cluster.apply(service(watched), service(other))
        wait_until(
            lambda: cluster.try_kubectl("get", "deployment/chat", "-n", watched).returncode == 0,
            "the service in the watched namespace has a Deployment",
            60,
        )
        wait_until(
            lambda: bool(condition(cluster, watched, "chat", "SpecValid")),
            "its status is written",
            60,
        )
        assert condition(cluster, watched, "chat", "SpecValid")["status"] == "True"
        assert "status" not in cluster.get(KIND, "chat", "-n", other)
        assert cluster.get("deployments", "-n", other)["items"] == []
        assert release.may("create", "deployments.apps", "-n", watched)
        assert not release.may("create", "deployments.apps", "-n", other)
        assert errors(release.log()) == []


def test_an_unusable_key_stops_the_installation_and_leaves_no_rights(
    release: Release,
) -> None:
    release.kubectl("create", "secret", "generic", "kvscaler-admin-key", "--from-literal=key.pem=x")
    done = release.try_helm(
        "install", release.name, str(CHART), "--values=-", "--wait", "--timeout=110s"
    )
    assert done.returncode != 0
    words = release.kubectl("logs", "job/kvscaler-admin-key-hook")
    assert "no unencrypted private key" in words
    assert release.names("roles,rolebindings,deployments") == []
    secret = release.cluster.get("secret", "kvscaler-admin-key", "-n", release.namespace)
    assert secret["data"] == {"key.pem": "eA=="}


def test_upgrading_and_uninstalling_restart_no_serving_pod(release: Release) -> None:
    cluster = release.cluster
    if cluster.layout is None:
        pytest.skip("another tag of the operator's image is made on a local node")
    release.install()
    key_id = release.key_id()
    with cluster.namespace() as namespace:
        cluster.apply(service(namespace))
        ready = lambda: condition(cluster, namespace, "chat", "Ready").get("status") == "True"  # noqa: E731
        wait_until(ready, "the service is Ready", 240)

        def serving() -> tuple[Any, ...]:
            """Everything of the Pods and their Deployment that a restart would change."""
            deployment = cluster.get("deployment", "chat", "-n", namespace)
            pods = cluster.get("pods", "-n", namespace)["items"]
            return (
                deployment["metadata"]["generation"],
                [
                    (
                        pod["metadata"]["uid"],
                        [c["restartCount"] for c in pod["status"]["containerStatuses"]],
                        [c["ready"] for c in pod["status"]["containerStatuses"]],
                    )
                    for pod in pods
                ],
            )

        before = serving()
        assert len(before[1]) == 1
        address = cluster.get("service", "chat", "-n", namespace)["spec"]["clusterIP"]

        reference = f"{release.values['image']['repository']}:{release.values['image']['tag']}"
        newer = f"{release.values['image']['repository']}:another-tag"
        node_images.ctr(cluster.layout, "images", "tag", "--force", reference, newer)
        release.values["image"]["tag"] = "another-tag"
        release.values["sidecar"]["image"]["tag"] = "newer-than-the-services"
        old = release.operator_pod()["metadata"]["uid"]
        release.install()
        pod = release.operator_pod()
        assert pod["metadata"]["uid"] != old
        assert pod["spec"]["containers"][0]["image"] == newer
        assert release.key_id() == key_id
        # Ready again means that it has looked at this service.
        assert (serving(), answer(cluster, address)) == (before, 200)

        release.uninstall()
        assert cluster.try_kubectl("get", "crd", CRD).returncode == 0
        assert cluster.get(KIND, "chat", "-n", namespace)["metadata"]["name"] == "chat"
        assert (serving(), answer(cluster, address)) == (before, 200)

        release.install()
        assert release.key_id() == key_id
        wait_until(ready, "the service is Ready under the new operator", 60)
        assert (serving(), answer(cluster, address)) == (before, 200)
        assert errors(release.log()) == []


def answer(cluster: ClusterHandle, address: str) -> int:
    """Status of one completion, asked from the node."""
    body = json.dumps({"model": "smollm2-135m", "prompt": "Hello", "max_tokens": 2})
    done = cluster.run_on_node(
        "curl", "--silent", "--show-error", "--max-time", "60", "--output", "/dev/null",
        "--write-out", "%{http_code}", "--header", "Content-Type: application/json",
        "--data", body, f"http://{address}:8000/v1/completions",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
