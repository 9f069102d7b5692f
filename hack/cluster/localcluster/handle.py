"""A cluster in the hands of a test: its kubeconfig, kubectl, and a way to bring images in."""

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localcluster import build, images, sandbox
from localcluster.layout import Layout
from localcluster.steps import ClusterError, say

KUBECONFIG_VARIABLE = "KVSCALER_TEST_KUBECONFIG"
CONTEXT_VARIABLE = "KVSCALER_TEST_CONTEXT"
SECONDS_TO_STOP = 5
COMMAND_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class ClusterHandle:
    """`layout` is None for a cluster that is not ours: no node chaos and no image import there."""

    kubeconfig: Path
    context: str
    layout: Layout | None

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """Output of kubectl with `text` on its input. Raises ClusterError with kubectl's words."""
        done = self.try_kubectl(*arguments, text=text)
        if done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def try_kubectl(
        self, *arguments: str, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """kubectl's result whatever its exit code, for a test of a refusal."""
        build.ensure("kubectl")
        access = [f"--kubeconfig={self.kubeconfig}", f"--context={self.context}"]
        return subprocess.run(
            [build.path("kubectl"), *access, *arguments],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_TIMEOUT_SECONDS,
        )

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """kubectl apply of the objects, in order."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--filename=-", text=json.dumps(listed))

    def get(self, *arguments: str) -> dict[str, Any]:
        """kubectl get ... as an object."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "--output=json"))
        return found

    def import_image(self, archive: Path) -> list[str]:
        """Import an image archive into the node; the references that it brought."""
        return images.import_archive(self._own(), archive)

    def run_on_node(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the node's network: what a process beside the Pods would see."""
        return sandbox.run_inside(self._own(), command)

    @contextmanager
    def namespace(self, prefix: str = "kvscaler-test") -> Iterator[str]:
        """A namespace of its own for the block; its removal is begun, not awaited."""
        name = f"{prefix}-{secrets.token_hex(3)}"
        self.kubectl("create", "namespace", name)
        try:
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false")

    def _own(self) -> Layout:
        if self.layout is None or self.layout.slot is None:
            raise ClusterError(f"context {self.context} has no node of hack/cluster")
        return self.layout


def local(layout: Layout) -> ClusterHandle:
    return ClusterHandle(layout.kubeconfig, layout.context, layout)


def foreign_from_environment(
    environment: Mapping[str, str] = os.environ, pause: Callable[[float], None] = time.sleep
) -> ClusterHandle | None:
    """The cluster that the two test variables name, after some seconds to stop; None without them.

    Only both variables together choose another cluster. A plain KUBECONFIG is ignored, in words.
    """
    kubeconfig = environment.get(KUBECONFIG_VARIABLE)
    context = environment.get(CONTEXT_VARIABLE)
    if bool(kubeconfig) != bool(context):
        raise ClusterError(
            f"{KUBECONFIG_VARIABLE} and {CONTEXT_VARIABLE} choose another cluster only together: "
            "set both, or neither for the local cluster"
        )
    if not kubeconfig or not context:
        if environment.get("KUBECONFIG"):
            say("KUBECONFIG is ignored here: tests run on the local cluster of hack/cluster")
        return None
    if not Path(kubeconfig).is_file():
        raise ClusterError(f"{KUBECONFIG_VARIABLE}={kubeconfig}: no such file")
    say(f"Tests will use context {context} of {kubeconfig}, in namespaces of their own")
    if environment.get("YES") != "1":
        say(f"  {SECONDS_TO_STOP} s to stop this (YES=1 goes on at once)")
        pause(SECONDS_TO_STOP)
    return ClusterHandle(Path(kubeconfig), context, None)
