"""Pods that check one thing each, for tests of networks, names and limits (components/probe)."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localcluster import build, images, oci
from localcluster.handle import ClusterHandle
from localcluster.steps import wait_until

POD_TIMEOUT_SECONDS = 120
SERVER_PORT = 8080


class Probes:
    """Runs the probe in Pods of one namespace; its image must be on the node."""

    def __init__(self, cluster: ClusterHandle, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def start(self, name: str, *arguments: str, limits: dict[str, str] | None = None) -> None:
        """Create a Pod that runs `probe ARGUMENTS...` once."""
        container = {
            "name": "probe",
            "image": images.system_image("probe"),
            "imagePullPolicy": "Never",
            "args": list(arguments),
            "resources": {"limits": limits or {}},
        }
        spec = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
        }
        metadata = {"name": name, "namespace": self.namespace, "labels": {"app": name}}
        self.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def serve(self, name: str, text: str) -> str:
        """A server of `text` behind a Service of the same name, port 80; the Service's address.

        Returns when the Pod runs and the Service has been given its address.
        """
        self.start(name, "serve", str(SERVER_PORT), text)
        metadata = {"name": name, "namespace": self.namespace}
        ports = [{"port": 80, "targetPort": SERVER_PORT}]
        spec = {"selector": {"app": name}, "ports": ports}
        self.cluster.apply(
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}
        )
        self.wait(name, lambda pod: pod["status"].get("phase") == "Running")
        service = self.cluster.get("service", name, "--namespace", self.namespace)
        address: str = service["spec"]["clusterIP"]
        return address

    def run(
        self, name: str, *arguments: str, limits: dict[str, str] | None = None
    ) -> tuple[dict[str, Any], str]:
        """Run a Pod to its end; the container's `terminated` state and what it printed."""
        self.start(name, *arguments, limits=limits)
        pod = self.wait(name, lambda pod: pod["status"].get("phase") in ("Succeeded", "Failed"))
        printed = self.cluster.kubectl("logs", name, "--namespace", self.namespace)
        ended: dict[str, Any] = pod["status"]["containerStatuses"][0]["state"]["terminated"]
        return ended, printed.strip()

    def wait(self, name: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the Pod fulfils `condition`; the Pod."""
        pod: dict[str, Any] = {}

        def holds() -> bool:
            pod.update(self.cluster.get("pod", name, "--namespace", self.namespace))
            return condition(pod)

        wait_until(holds, f"Pod {name} is as expected", POD_TIMEOUT_SECONDS)
        return pod


def write_image(folder: Path) -> Path:
    """Write the probe's image as an archive into `folder`."""
    build.ensure("probe")
    archive = folder / "probe.tar"
    oci.write_archive(archive, images.system_image("probe"), build.path("probe"), ())
    return archive


def from_this_machine(*arguments: str) -> tuple[bool, str]:
    """Run the probe outside of every cluster: whether it succeeded, and what it printed."""
    build.ensure("probe")
    command: list[str | Path] = [build.path("probe"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout.strip()
