"""A control plane, fake nodes and one operator process, in a network namespace of their own.

The namespace has a loopback device and nothing else: the whole range of Pod addresses is local to it,
so one process can answer for every Pod; nothing of the machine's network is touched; and all of it
is gone with the process that measures. No node runs, so the machine's cores are for the API server
and the operator, and what each took is told apart.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from kvscaler_api.crd import packaged_text
from kvscaler_operator.gateways.kube import KubeGateway, connect
from kvscaler_operator.gateways.limiter import TokenBucket
from kvscaler_operator.resources import LEASES, Object, Resource
from localcluster import build, fakes, processes, standalone
from localcluster.handle import local

from hack.demo.kube import Kube
from hack.fleet.proc import Usage, usage

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("core", "cli", "crds", "operator", "sidecar", "kernels", "hack/cluster", ".")
INSIDE = "KVSCALER_FLEET_NETWORK"
SYSTEM_NAMESPACE = "kvscaler-system"
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
CONTROL_PORT, METRICS_PORT, PROBE_PORT, PROMETHEUS_PORT = 9600, 9601, 9602, 9603
CONTROL_PLANE = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler", "kwok")
PROMETHEUS_CONFIG = """\
global: {scrape_interval: 5s, scrape_timeout: 4s}
scrape_configs:
- job_name: fleet
  http_sd_configs: [{url: "http://127.0.0.1:%d/targets", refresh_interval: 5s}]
"""


class WorldError(Exception):
    """The fleet could not be made: what is missing, and the next step."""


def enter_network(argv: Sequence[str]) -> None:
    """Start this program again in a network namespace of its own, unless it is in one already."""
    if os.environ.get(INSIDE) == "own":
        for command in (
            ("ip", "link", "set", "lo", "up"),
            ("ip", "route", "add", "local", str(_pod_range()), "dev", "lo"),
        ):
            subprocess.run(command, check=True)
        return
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        raise WorldError("a network namespace needs root and `unshare` of util-linux")
    os.environ[INSIDE] = "own"
    os.execvp("unshare", ["unshare", "--net", "--", sys.executable, *argv])


def _pod_range() -> Any:
    return standalone.Layout("fleet", None, Path("/"), Path("/")).pod_range


class World:
    """Use as an asynchronous context manager; nothing is left afterwards."""

    def __init__(self, nodes: int, *, audit: bool = False) -> None:
        self._nodes, self._audit = nodes, audit
        self._folder = Path(tempfile.mkdtemp(prefix="kvscaler-fleet-"))
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = 0
        self.kube: KubeGateway
        self.reader: Kube
        self.http: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        try:
            return await self._start()
        except BaseException:
            await self._stop()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:  # fmt: skip
        await self._stop()

    async def _start(self) -> Self:
        state, kubeconfig = self._folder / "state", self._folder / "kubeconfig"
        self.layout = standalone.start(
            state, kubeconfig, "fleet", with_controllers=True, attached=True, audit=self._audit
        )
        if self._nodes:
            fakes.set_nodes(self.layout, self._nodes, attached=True)
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
        self.reader = await Kube(kubeconfig).__aenter__()
        api = await connect(str(kubeconfig), self.layout.context)
        api.user_agent = "kvscaler-fleet"  # in the audit log, not the operator's name
        self.kube = KubeGateway(api, writes=TokenBucket(200.0, 50))
        await asyncio.to_thread(self._install)
        self._key = self._folder / "key.pem"
        self._key.write_bytes(
            Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return self

    def _install(self) -> None:
        cluster = local(self.layout)
        cluster.kubectl("apply", "--server-side", "-f", "-", text=packaged_text())
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        cluster.kubectl("create", "namespace", SYSTEM_NAMESPACE)

    async def _stop(self) -> None:
        for name in list(self._children):
            await asyncio.to_thread(self.end, name)
        for closing in ("kube", "http"):
            if hasattr(self, closing):
                await getattr(self, closing).close()
        if hasattr(self, "reader"):
            await self.reader.__aexit__(None, None, None)
        if hasattr(self, "layout"):
            await asyncio.to_thread(standalone.stop, self.layout)
        if not os.environ.get("KVSCALER_FLEET_KEEP"):
            shutil.rmtree(self._folder, ignore_errors=True)

    async def make_namespace(self, name: str) -> None:
        """A namespace with the service account that Pods need."""
        document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await self.kube.create(NAMESPACES, document)
        path = f"/api/v1/namespaces/{name}/serviceaccounts/default"

        async def there() -> bool:
            with contextlib.suppress(aiohttp.ClientResponseError):
                return bool(await self.reader.get(path))
            return False

        await until(there, f"namespace {name} is usable", 60)

    # --- processes ---------------------------------------------------------------------------

    def run(self, name: str, *argv: str | Path, environment: Mapping[str, str] = {}) -> int:
        """Start a process that ends with this one; its output goes to a log. Returns its PID."""
        inherited = {k: os.environ[k] for k in ("PATH", "HOME") if k in os.environ}
        paths = {"PYTHONPATH": ":".join(str(ROOT / room) for room in ROOMS)}
        with self.log(name).open("ab") as log:
            self._children[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={**inherited, **paths, **environment},
            )
        return self._children[name].pid

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End a process of `run` and wait for it."""
        child = self._children.pop(name, None)
        if child is None or child.poll() is not None:
            return
        child.send_signal(how)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def check(self, name: str) -> None:
        """Raise `WorldError`, with the end of its log, when a process of `run` has ended."""
        child = self._children[name]
        if child.poll() is not None:
            raise WorldError(f"{name} ended with {child.returncode}: {self._last_words(name)}")

    def _last_words(self, name: str) -> str:
        return self.log(name).read_text(errors="replace")[-2000:]

    def log(self, name: str) -> Path:
        """Where a process of `run` writes."""
        return self._folder / f"{name}.log"

    def keep_log(self, name: str, folder: Path) -> None:
        """Copy the log of a process of `run` to a folder that stays."""
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.log(name), folder / f"{name}.log")

    @property
    def audit_log(self) -> Path:
        """Every write to the API, a JSON object a line."""
        return self.layout.logs / "audit.log"

    def start_replicas(self) -> None:
        """Answer for all Pods from now on."""
        self.run("replicas", sys.executable, "-m", "hack.fleet.replicas", "--kubeconfig",
                 self.layout.kubeconfig, "--control-port", str(CONTROL_PORT))  # fmt: skip

    def start_prometheus(self, binary: Path) -> None:
        """Scrape all Pods every 5 s from now on."""
        config = self._folder / "prometheus.yml"
        config.write_text(PROMETHEUS_CONFIG % CONTROL_PORT)
        self.run("prometheus", binary, f"--config.file={config}",
                 f"--storage.tsdb.path={self._folder / 'series'}",
                 f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}",
                 "--query.max-samples=50000000", "--log.level=warn")  # fmt: skip

    def start_operator(self, *flags: str) -> None:
        """One operator for all namespaces, as its image would run it."""
        servers = self._folder / "prometheus-servers.yaml"
        url = f"http://127.0.0.1:{PROMETHEUS_PORT}"
        servers.write_text(json.dumps({"servers": {"default": {"url": url}}}))
        self._starts += 1
        program = ["-m", "kvscaler_operator"]
        if folder := os.environ.get("KVSCALER_FLEET_PROFILE"):
            program = ["-m", "cProfile", "-o", f"{folder}/operator-{self._starts}.prof", *program]
        self.run("operator", sys.executable, *program,
                 "--kubeconfig", str(self.layout.kubeconfig),
                 "--release-namespace", SYSTEM_NAMESPACE,
                 "--pod-name", f"operator-{self._starts}",
                 "--prometheus-config", str(servers),
                 "--key-file", str(self._key),
                 "--metrics-port", str(METRICS_PORT),
                 "--probe-port", str(PROBE_PORT), *flags)  # fmt: skip

    # --- looking -----------------------------------------------------------------------------

    async def control(self, **changes: Any) -> dict[str, Any]:
        """Steer the replicas, or with no change look at them: see `hack.fleet.replicas`."""
        url = f"http://127.0.0.1:{CONTROL_PORT}/"
        method = "PUT" if changes else "GET"
        async with self.http.request(method, url, json=changes or None) as response:
            return dict(await response.json())

    async def metrics(self) -> str:
        """The operator's metrics page."""
        async with self.http.get(f"http://127.0.0.1:{METRICS_PORT}/metrics") as response:
            return await response.text()

    async def is_ready(self) -> bool:
        """Whether the operator has looked at every service once."""
        with contextlib.suppress(aiohttp.ClientError):
            async with self.http.get(f"http://127.0.0.1:{PROBE_PORT}/readyz") as response:
                return response.status == 200
        return False

    async def until_ready(self, seconds: float) -> float:
        """Wait until the operator is ready; returns the seconds that it took."""
        begun = time.monotonic()

        async def ready() -> bool:
            self.check("operator")
            return await self.is_ready()

        await until(ready, "the operator is ready", seconds)
        return time.monotonic() - begun

    def usage(self) -> dict[str, Usage]:
        """Processor time and memory of the operator and of everything around it, by name."""
        found = {name: usage(child.pid) for name, child in self._children.items()}
        for name in CONTROL_PLANE:
            pid = processes.find(self.layout.state, build.path(name))
            if pid is not None:
                found[name] = usage(pid)
        return found

    async def release_lease(self) -> None:
        """Forget the Lease of an operator that was killed, so that a start is measured alone."""
        found = await self.kube.find(LEASES, SYSTEM_NAMESPACE, "kvscaler-operator")
        if found is not None:
            await self.kube.delete(
                LEASES, SYSTEM_NAMESPACE, "kvscaler-operator", found["metadata"]["uid"]
            )


async def until(check: Callable[[], Awaitable[bool]], what: str, seconds: float) -> None:
    """Poll until `check` holds."""
    deadline = time.monotonic() + seconds
    while not await check():
        if time.monotonic() > deadline:
            raise WorldError(f"not within {seconds:.0f} s: {what}")
        await asyncio.sleep(0.1)


def service(namespace: str, name: str, **spec: Any) -> Object:
    """An InferenceService whose Pods run on fake nodes; `spec` replaces whole fields."""
    base: Object = {
        "model": {"uri": "builtin://smollm2-135m", "maxContextTokens": 2048},
        "accelerator": {"name": "cpu"},
        "objectives": {"timeToFirstToken": "10s", "timePerOutputToken": "1s"},
        "scaling": {"mode": "Managed", "minReplicas": 1, "maxReplicas": 5},
        "template": {
            "spec": {
                "tolerations": [{"key": fakes.LABEL, "operator": "Exists"}],
                "containers": [{"name": "engine", "resources": {"limits": {"memory": "2Gi"}}}],
            }
        },
    }
    base.update(spec)
    return {
        "apiVersion": "kvscaler.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"namespace": namespace, "name": name},
        "spec": base,
    }
