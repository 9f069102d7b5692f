"""An operator on a real API server, and by hand what no controller does there: Pods.

With etcd and the API server alone nobody makes ReplicaSets and Pods from a Deployment, deletes them
in its order, or collects garbage. `World` does the parts that a test needs, as Kubernetes would.
"""

import asyncio
import contextlib
import itertools
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from kvscaler_api.crd import packaged_text
from kvscaler_operator.app import Operator
from kvscaler_operator.gateways.kube import KubeGateway, connect
from kvscaler_operator.resources import (
    DEPLOYMENTS,
    EVENTS,
    INFERENCE_SERVICES,
    PODS,
    REPLICA_SETS,
    Object,
    Resource,
    name_of,
    uid_of,
)
from kvscaler_operator.settings import Settings
from prometheus_client import generate_latest

from tests.controller.sidecars import FakeSidecar, make_state

_addresses = itertools.count(2)
COST = "controller.kubernetes.io/pod-deletion-cost"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def service_object(namespace: str, name: str = "chat", **spec: Any) -> Object:
    """A small valid InferenceService; `spec` replaces whole fields."""
    base: Object = {
        "model": {"uri": "builtin://smollm2-135m", "maxContextTokens": 2048},
        "accelerator": {"name": "cpu"},
        "scaling": {
            "mode": "Managed",
            "maxReplicas": 5,
            "scaleDown": {"stabilizationWindow": "0s", "drainTimeout": "1m"},
        },
        "template": {
            "spec": {"containers": [{"name": "engine", "resources": {"limits": {"memory": "2Gi"}}}]}
        },
    }
    base.update(spec)
    return {
        "apiVersion": INFERENCE_SERVICES.api_version,
        "kind": INFERENCE_SERVICES.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": base,
    }


def install_definition(server: Any) -> None:
    """The CRD on an API server, served."""
    server.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=packaged_text())
    deadline = time.monotonic() + 30
    while server.try_kubectl("get", "kvis", "--all-namespaces").returncode != 0:
        assert time.monotonic() < deadline, "the CRD is not served"


def make_namespace(server: Any) -> str:
    """A namespace of a World's own."""
    namespace = f"controller-{secrets.token_hex(3)}"
    server.kubectl("create", "namespace", namespace)
    # Its controller does not run here, and no Pod is created without it.
    server.kubectl("create", "serviceaccount", "default", "-n", namespace)
    return namespace


class World:
    """One namespace, one operator, and the Pods of its services."""

    def __init__(
        self, kubeconfig: Path, context: str, namespace: str, folder: Path, **settings: Any
    ) -> None:
        self.namespace = namespace
        self._private = Ed25519PrivateKey.generate()
        key_file = folder / "key.pem"
        key_file.write_bytes(
            self._private.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        values: dict[str, Any] = {
            "namespaces": (namespace,),
            "release_namespace": namespace,
            "pod_name": "operator-under-test",
            "kubeconfig": str(kubeconfig),
            "context": context,
            "tick_seconds": 0.1,
            "prometheus_seconds": 0.5,
            "relist_seconds": 300.0,
            # The Lease is not what most tests are about, and a busy machine may starve a renewal.
            "lease_duration_seconds": 60.0,
            "key_file": key_file,
            "sidecar_image": "docker.io/local/kvscaler-sidecar:one",
            "state_port": free_port(),
            "admin_port": free_port(),
            "metrics_port": 0,
            "probe_port": 0,
        }
        values.update(settings)
        self.settings = Settings(**values)
        self.kube: KubeGateway
        self.operator: Operator | None = None
        self.sidecars: dict[str, FakeSidecar] = {}
        self.prepare: Callable[[FakeSidecar], object] = lambda sidecar: None
        """Done to each new sidecar before anybody asks it."""
        self.clock: Callable[[], float] = time.time
        """The operator's wall clock."""
        self.task: asyncio.Task[None] | None = None
        """The operator at work."""
        self._stop = asyncio.Event()

    @property
    def public_key(self) -> Ed25519PublicKey:
        """The public half of the operator's key."""
        return self._private.public_key()

    async def __aenter__(self) -> "World":
        self.kube = KubeGateway(await connect(self.settings.kubeconfig, self.settings.context))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_operator()
        for sidecar in self.sidecars.values():
            await sidecar.stop()
        await self.kube.close()

    async def start_operator(self, **settings: Any) -> Operator:
        """Start an operator and wait until it is ready."""
        values = {name: getattr(self.settings, name) for name in self.settings.__dataclass_fields__}
        self.operator = Operator(Settings(**{**values, **settings}), clock=self.clock)
        self._stop = asyncio.Event()
        self.task = asyncio.create_task(self.operator.run(self._stop))
        operator = self.operator

        async def ready() -> bool:
            assert self.task is not None
            if self.task.done():
                self.task.result()
            return not operator.health.faults(operator.health.readiness)

        await self.eventually(ready, 60.0, "the operator is ready")
        return operator

    async def stop_operator(self) -> None:
        """Stop it as SIGTERM would."""
        if self.task is None:
            return
        self._stop.set()
        task, self.task = self.task, None
        await asyncio.wait_for(task, 15)

    async def eventually(
        self, check: Callable[[], Awaitable[Any]], seconds: float = 20.0, what: str = ""
    ) -> Any:
        """Poll until `check` gives something true."""
        deadline = time.monotonic() + seconds
        last: Any = None
        while time.monotonic() < deadline:
            if self.task is not None and self.task.done():
                self.task.result()
            with contextlib.suppress(KeyError, TypeError, IndexError):
                last = await check()
                if last:
                    return last
            await asyncio.sleep(0.05)
        words = f"not within {seconds} s: {what or check.__name__}; last {last!r}"
        raise AssertionError(f"{words}\n{await self.describe()}")

    async def describe(self) -> str:
        """What there is, for the words of a failed test."""
        lines = []
        for pod in await self.pods():
            conditions = (pod.get("status") or {}).get("conditions") or ()
            ready = next((c["status"] for c in conditions if c["type"] == "Ready"), "absent")
            marks = json.dumps(pod["metadata"].get("annotations") or {})
            sidecar = self.sidecars.get(name_of(pod))
            drain = None if sidecar is None else sidecar.drain
            lines.append(f"{name_of(pod)}: Ready {ready}, {marks}, sidecar says {drain}")
        for resource in (INFERENCE_SERVICES, DEPLOYMENTS):
            for obj in (await self.kube.list(resource, self.namespace)).items:
                asked, status = obj["spec"].get("replicas"), json.dumps(obj.get("status"))
                lines.append(f"{resource.plural} {name_of(obj)}: replicas {asked}, {status}")
        return "\n".join(lines)

    async def create(self, obj: Object) -> Object:
        """Create an InferenceService."""
        return await self.kube.create(INFERENCE_SERVICES, obj)

    async def service(self, name: str = "chat") -> Object:
        """The InferenceService as it is."""
        return await self.kube.get(INFERENCE_SERVICES, self.namespace, name)

    async def find(self, resource: Resource, name: str = "chat") -> Object | None:
        """A child, or `None`."""
        return await self.kube.find(resource, self.namespace, name)

    async def patch(
        self, patch: Object, name: str = "chat", resource: Resource = INFERENCE_SERVICES
    ) -> Object:
        """Merge-patch an object as a person would."""
        return await self.kube.merge(resource, self.namespace, name, patch)

    async def condition(self, kind: str, name: str = "chat") -> Object:
        """A condition of the service; empty until there is one."""
        status = (await self.service(name)).get("status") or {}
        return next((c for c in status.get("conditions") or () if c["type"] == kind), {})

    async def until_condition(
        self, kind: str, status: str, reason: str, name: str = "chat", seconds: float = 20.0
    ) -> Object:
        """Wait for a condition with this status and reason."""

        async def check() -> Any:
            found = await self.condition(kind, name)
            return (found.get("status"), found.get("reason")) == (status, reason) and found

        try:
            return dict(await self.eventually(check, seconds))
        except AssertionError:
            raise AssertionError(
                f"{kind} is not {status}/{reason} but "
                f"{(await self.service(name)).get('status', {}).get('conditions')}"
            ) from None

    async def deployment(self, name: str = "chat") -> Object:
        """The Deployment, once it is there."""

        async def check() -> Object | None:
            return await self.find(DEPLOYMENTS, name)

        return dict(await self.eventually(check, what=f"Deployment {name}"))

    async def sync_pods(self, name: str = "chat", *, answering: bool = True) -> list[Object]:
        """Make and delete Pods as the Deployment and ReplicaSet controllers would."""
        deployment = await self.deployment(name)
        replica_set = await self._replica_set(deployment)
        pods = await self.pods(name)
        wanted = int(deployment["spec"]["replicas"])
        for pod in sorted(pods, key=_deletion_key)[: max(0, len(pods) - wanted)]:
            await self.remove_pod(pod)
        for _ in range(wanted - len(pods)):
            await self._make_pod(deployment, replica_set, answering)
        await self._report(name, deployment, wanted)
        return await self.pods(name)

    async def make_surplus(self, count: int, name: str = "chat") -> None:
        """Make Pods beyond what the Deployment asks for, which are on no node."""
        deployment = await self.deployment(name)
        replica_set = await self._replica_set(deployment)
        await asyncio.gather(*(self._create_pod(deployment, replica_set) for _ in range(count)))

    async def pods(self, name: str = "chat") -> list[Object]:
        """The Pods of a service."""
        uid = uid_of(await self.service(name))
        listing = await self.kube.list(PODS, self.namespace, f"kvscaler.io/service-uid={uid}")
        return sorted(listing.items, key=name_of)

    async def remove_pod(self, pod: Object) -> None:
        """Delete a Pod at once, its sidecar with it."""
        sidecar = self.sidecars.pop(name_of(pod), None)
        if sidecar is not None:
            await sidecar.stop()
        path = PODS.path(self.namespace, name_of(pod))
        await self.kube._write("DELETE", PODS, path, {"gracePeriodSeconds": 0}, {})

    async def events(self) -> list[Object]:
        """Events of the namespace."""
        return (await self.kube.list(EVENTS, self.namespace)).items

    async def set_pod_ready(self, pod_name: str, ready: bool) -> None:
        """Set a Pod's readiness."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        conditions = [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": now},
            {"type": "Ready", "status": str(ready), "lastTransitionTime": now},
        ]
        patch = {"status": {"conditions": conditions}}
        await self.kube.merge(PODS, self.namespace, pod_name, patch, "status")

    async def metrics(self) -> str:
        """The operator's own metrics page."""
        assert self.operator is not None
        return generate_latest(self.operator.registry).decode()

    async def probe(self, path: str) -> int:
        """HTTP status of one of the operator's probes."""
        assert self.operator is not None
        url = f"http://127.0.0.1:{self.operator.http.ports['probes']}/{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status

    async def settled(self) -> bool:
        """Whether the operator wrote nothing for a second."""
        assert self.operator is not None and self.operator.kube is not None
        before = self.operator.kube.write_count
        await asyncio.sleep(1.0)
        return self.operator.kube.write_count == before

    async def _replica_set(self, deployment: Object) -> Object:
        name = f"{name_of(deployment)}-1"
        found = await self.kube.find(REPLICA_SETS, self.namespace, name)
        if found is not None:
            return found
        template = deployment["spec"]["template"]
        return await self.kube.create(
            REPLICA_SETS,
            {
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "metadata": {
                    "name": name,
                    "namespace": self.namespace,
                    "labels": template["metadata"]["labels"],
                    "ownerReferences": [_owner(deployment, "apps/v1", "Deployment")],
                },
                "spec": {
                    "replicas": 0,
                    "selector": deployment["spec"]["selector"],
                    "template": template,
                },
            },
        )

    async def _create_pod(self, deployment: Object, replica_set: Object) -> Object:
        template = deployment["spec"]["template"]
        name = f"{name_of(deployment)}-{next(_addresses)}"
        return await self.kube.create(
            PODS,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": self.namespace,
                    "labels": template["metadata"]["labels"],
                    "annotations": template["metadata"].get("annotations") or {},
                    "ownerReferences": [_owner(replica_set, "apps/v1", "ReplicaSet")],
                },
                "spec": {**template["spec"], "terminationGracePeriodSeconds": 0},
            },
        )

    async def _make_pod(self, deployment: Object, replica_set: Object, answering: bool) -> None:
        pod = await self._create_pod(deployment, replica_set)
        name = name_of(pod)
        number = int(name.rsplit("-", 1)[-1])
        ip = f"127.0.{number // 250}.{2 + number % 250}"
        sidecar = FakeSidecar(
            ip, self.settings.state_port, self.settings.admin_port, self.public_key
        )
        owner = deployment["metadata"]["ownerReferences"][0]["uid"]
        sidecar.state = make_state(owner, uid_of(pod), name)
        self.prepare(sidecar)
        if answering:
            await sidecar.start()
        self.sidecars[name] = sidecar
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}
        await self.kube.merge(PODS, self.namespace, name, {"status": status}, "status")
        await self.set_pod_ready(name, True)

    async def _report(self, name: str, deployment: Object, replicas: int) -> None:
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": replicas,
            "updatedReplicas": replicas,
            "readyReplicas": replicas,
            "availableReplicas": replicas,
        }
        await self.kube.merge(DEPLOYMENTS, self.namespace, name, {"status": status}, "status")


def _owner(obj: Object, api_version: str, kind: str) -> Object:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name_of(obj),
        "uid": uid_of(obj),
        "controller": True,
    }


def _deletion_key(pod: Object) -> tuple[bool, int, str]:
    """The ReplicaSet controller's order: not ready first, then the deletion cost."""
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions") or ()}
    cost = int((pod["metadata"].get("annotations") or {}).get(COST, "0"))
    return conditions.get("Ready") == "True", cost, name_of(pod)
