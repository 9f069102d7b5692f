"""A release of the chart on a cluster, for tests."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kvscaler_operator.keys import SigningKey
from localcluster import build
from localcluster.handle import ClusterHandle

CHART = Path(__file__).parents[2] / "charts" / "kvscaler"
CRD = "inferenceservices.kvscaler.io"
OPERATOR = "app.kubernetes.io/component=operator"
OWNER = ("meta.helm.sh/release-name", "meta.helm.sh/release-namespace")
Object = dict[str, Any]


class Release:
    """A release of the chart in a namespace."""

    def __init__(
        self, cluster: ClusterHandle, images: Mapping[str, str], namespace: str, name: str
    ) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name
        self._former_owner: dict[str, str | None] = {}
        operator, sidecar = (images[image].rsplit(":", 1) for image in ("operator", "sidecar"))
        self.values: Object = {
            "image": {"repository": operator[0], "tag": operator[1]},
            "sidecar": {"image": {"repository": sidecar[0], "tag": sidecar[1]}},
        }

    def try_helm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """helm's result, whatever its exit code."""
        build.ensure("helm")
        return subprocess.run(
            [build.path("helm"), f"--kubeconfig={self.cluster.kubeconfig}",
             f"--kube-context={self.cluster.context}", f"--namespace={self.namespace}",
             *arguments],
            capture_output=True, text=True, check=False, timeout=240,
            input=json.dumps(self.values),
        )  # fmt: skip

    def helm(self, *arguments: str) -> str:
        """helm's output; fails the test with helm's words and the operator's."""
        done = self.try_helm(*arguments)
        if done.returncode != 0:
            pytest.fail(f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}\n{self.log()}")
        return done.stdout

    def install(self) -> str:
        """Install or upgrade with the present values, and wait until the operator is ready."""
        return self.helm(
            "upgrade", "--install", self.name, str(CHART), "--values=-", "--wait",
            "--timeout=120s",
        )  # fmt: skip

    def uninstall(self) -> None:
        """Uninstall, if it is installed."""
        self.helm("uninstall", self.name, "--ignore-not-found", "--wait")

    def kubectl(self, *arguments: str) -> str:
        """kubectl in the release's namespace."""
        return self.cluster.kubectl(*arguments, "--namespace", self.namespace)

    def names(self, kinds: str) -> list[str]:
        """`kind/name` of what is there of these kinds."""
        return self.kubectl("get", kinds, "--output=name").split()

    def log(self) -> str:
        """The operator's log, as far as there is one."""
        done = self.cluster.try_kubectl(
            "logs", "--selector", OPERATOR, "--tail=200", "--namespace", self.namespace
        )
        return done.stdout

    def operator_pod(self) -> Object:
        """The operator's one Pod."""
        pods = [
            pod
            for pod in self.cluster.get("pods", "-l", OPERATOR, "-n", self.namespace)["items"]
            if "deletionTimestamp" not in pod["metadata"]
        ]
        assert len(pods) == 1
        found: Object = pods[0]
        return found

    def key_id(self) -> str:
        """Id of the admin key."""
        pem = self.kubectl(
            "get", "secret", f"{self.name}-admin-key",
            '--output=go-template={{index .data "key.pem" | base64decode}}',
        )  # fmt: skip
        return SigningKey.from_pem(pem.encode(), "the Secret").key_id

    def may(self, *arguments: str) -> bool:
        """Whether the operator's account may do something."""
        account = f"system:serviceaccount:{self.namespace}:{self.name}-operator"
        return (
            self.cluster.try_kubectl("auth", "can-i", *arguments, "--as", account).returncode == 0
        )

    def adopt_definition(self) -> None:
        """Make a definition that an earlier release kept, maybe in another namespace, this one's.

        helm takes no object over from another release, not even from one that is gone.
        """
        done = self.cluster.try_kubectl("get", "crd", CRD, "--output=json")
        if done.returncode == 0:
            annotations = json.loads(done.stdout)["metadata"].get("annotations") or {}
            self._former_owner = {key: annotations.get(key) for key in OWNER}
            self._own_definition({OWNER[0]: self.name, OWNER[1]: self.namespace})

    def return_definition(self) -> None:
        """Give an adopted definition back to the release that it was kept from."""
        if self._former_owner:
            self._own_definition(self._former_owner)

    def _own_definition(self, owner: Mapping[str, str | None]) -> None:
        self.cluster.kubectl(
            "label", "crd", CRD, "app.kubernetes.io/managed-by=Helm", "--overwrite"
        )
        words = [f"{key}={value}" if value else f"{key}-" for key, value in owner.items()]
        self.cluster.kubectl("annotate", "crd", CRD, *words, "--overwrite")


def errors(log: str) -> list[str]:
    """What an operator should not have to say: errors, and rights that it lacks."""
    lines = [line for line in log.splitlines() if line.startswith("{")]
    return [
        line
        for line in lines
        if json.loads(line)["level"] in ("error", "critical") or "forbidden" in line.lower()
    ]
