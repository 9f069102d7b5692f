"""An operator beside Kubernetes' own controllers, on Pods that pretend and answer.

Deployments, ReplicaSets, evictions, disruption budgets and autoscalers are the real ones. Pods are
kwok's: running at once, gone as soon as they are deleted. Each has an address of this machine, where a
`FakeSidecar` answers; what its probe would tell the kubelet is written into the Pod's status.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvscaler.protocol.drain import DrainPhase
from kvscaler_operator.gateways.kube import KubeError
from kvscaler_operator.resources import INFERENCE_SERVICES, PODS, Object, name_of

from tests.controller.sidecars import FakeSidecar, make_state
from tests.controller.world import World, service_object

LOOK_SECONDS = 0.1
READINESS = "kvscaler.io/fake-readiness"
"""Keeps kwok from making a Pod ready: `Kubelet` does."""
TOLERATED = {"key": "kvscaler.io/fake-node", "operator": "Exists"}


def controlled_service(namespace: str, **spec: Any) -> Object:
    """A service whose Pods get to the nodes that pretend."""
    service = service_object(namespace, **spec)
    template = service["spec"]["template"]
    template["spec"]["tolerations"] = [TOLERATED]
    template.setdefault("metadata", {}).setdefault("annotations", {})[READINESS] = "told"
    return service


@dataclass(slots=True)
class Gone:
    """A Pod that was deleted, and what its sidecar would have said of its drain."""

    name: str
    phase: DrainPhase
    live_requests: int
    cost: str


@dataclass
class Kubelet:
    """Answers for all Pods of a namespace, and tells the API server which are ready."""

    world: World
    new_pods_are_ready: bool = True
    gone: list[Gone] = field(default_factory=list)
    _pods: dict[str, Object] = field(default_factory=dict)
    _ready: dict[str, bool] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)
    """Pods that are not ready although they serve."""

    async def run(self) -> None:
        """Look and act until cancelled."""
        while True:
            with contextlib.suppress(KubeError):  # a Pod went in between
                await self._look()
            await asyncio.sleep(LOOK_SECONDS)

    def release(self) -> None:
        """Pods that were made not ready become so."""
        self.new_pods_are_ready = True
        for name in self._held:
            self.world.sidecars[name].live_when_drained = 1
        self._held.clear()

    def holds_one(self) -> bool:
        """Whether a Pod was told to be not ready, and the API server knows."""
        return any(self._ready.get(name) is False for name in self._held)

    async def _look(self) -> None:
        listing = await self.world.kube.list(PODS, self.world.namespace)
        pods = {name_of(p): p for p in listing.items if (p.get("status") or {}).get("podIP")}
        for name in self._pods.keys() - pods.keys():
            await self._remove(name)
        for name, pod in pods.items():
            if name not in self._pods:
                await self._add(name, pod)
            self._pods[name] = pod
            sidecar = self.world.sidecars[name]
            ready = sidecar.drain.phase is DrainPhase.SERVING and name not in self._held
            if self._ready.get(name) is not ready:
                await self.world.set_pod_ready(name, ready)
                self._ready[name] = ready
            if ready and not pod["status"]["containerStatuses"][0]["started"]:
                await self._start(pod)

    async def _add(self, name: str, pod: Object) -> None:
        world = self.world
        sidecar = FakeSidecar(
            pod["status"]["podIP"],
            world.settings.state_port,
            world.settings.admin_port,
            world.public_key,
        )
        uid = pod["metadata"]["labels"]["kvscaler.io/service-uid"]
        sidecar.state = make_state(uid, pod["metadata"]["uid"], name)
        if not self.new_pods_are_ready:
            self._held.add(name)
            sidecar.live_when_drained = 0
            sidecar.set(ready=False)
        await sidecar.start()
        world.sidecars[name] = sidecar

    async def _start(self, pod: Object) -> None:
        """Say that the container's startup probe has succeeded, as it has when it is ready."""
        statuses = [{**s, "started": True} for s in pod["status"]["containerStatuses"]]
        patch = {"status": {"containerStatuses": statuses}}
        await self.world.kube.merge(PODS, self.world.namespace, name_of(pod), patch, "status")

    async def _remove(self, name: str) -> None:
        pod, sidecar = self._pods.pop(name), self.world.sidecars.pop(name)
        self._ready.pop(name, None)
        self._held.discard(name)
        await sidecar.stop()
        marks = pod["metadata"].get("annotations") or {}
        cost = marks.get("controller.kubernetes.io/pod-deletion-cost", "")
        drain = sidecar.drain
        self.gone.append(Gone(name, drain.phase, drain.live_requests, cost))


class ControlledWorld(World):
    """A `World` with real controllers. `server` is a control plane with fake nodes and an audit log."""

    def __init__(self, server: Any, namespace: str, folder: Path, **settings: Any) -> None:
        super().__init__(server.kubeconfig, server.context, namespace, folder, **settings)
        self.server = server
        self.kubelet = Kubelet(self)
        self._answering: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ControlledWorld":
        await super().__aenter__()
        self._answering = asyncio.create_task(self.kubelet.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_operator()
        assert self._answering is not None
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        await super().__aexit__()

    async def scale(self, replicas: int, name: str = "chat") -> None:
        """Ask for replicas as `kubectl scale kvis` does."""
        path = INFERENCE_SERVICES.path(self.namespace, name, "scale")
        body = {"spec": {"replicas": replicas}}
        kind = "application/merge-patch+json"
        query = {"fieldManager": "kubectl"}
        await self.kube._write("PATCH", INFERENCE_SERVICES, path, body, query, kind)

    async def serving(self, count: int, mode: str = "External", **scaling: Any) -> list[str]:
        """A service of so many ready replicas; names of its Pods."""
        await self.start_operator()
        asked = {"mode": mode, "minReplicas": 1, "maxReplicas": 6, **scaling}
        asked.setdefault("scaleDown", {"drainTimeout": "1m"})
        await self.create(controlled_service(self.namespace, scaling=asked))
        if count != 1:
            await self.scale(count)
        return await self.until_ready(count)

    async def until_ready(self, count: int) -> list[str]:
        """Wait until exactly so many Pods exist, all ready, and the operator says so."""

        async def check() -> list[str]:
            pods = await self.pods()
            status = (await self.service()).get("status") or {}
            names = [name_of(p) for p in pods]
            told = status.get("readyReplicas") == count == len(names)
            return names if told and self.sidecars.keys() >= set(names) else []

        return list(await self.eventually(check, 30, f"{count} Pods are ready"))

    async def holds_one(self) -> bool:
        """Whether a Pod is not ready though it serves, and the API server knows."""
        return self.kubelet.holds_one()

    def begin_stream(self, pod: str) -> None:
        """Have a request on a Pod: its drain is not over before `end_stream`."""
        sidecar = self.sidecars[pod]
        sidecar.drain = sidecar.drain.model_copy(update={"live_requests": 1})

    def end_stream(self, pod: str) -> None:
        """The last request of a Pod has ended."""
        drain = self.sidecars[pod].drain
        phase = drain.phase if drain.phase is DrainPhase.SERVING else DrainPhase.EMPTY
        self.sidecars[pod].drain = drain.model_copy(update={"live_requests": 0, "phase": phase})

    async def until_draining(self, count: int) -> list[str]:
        """Wait until exactly so many Pods are annotated and told; their names."""

        async def check() -> Any:
            marked = [
                name_of(p)
                for p in await self.pods()
                if "kvscaler.io/drain" in (p["metadata"].get("annotations") or {})
                and self.sidecars[name_of(p)].drain.phase is not DrainPhase.SERVING
            ]
            return (marked or True) if len(marked) == count else None

        found = await self.eventually(check, 30, f"{count} Pods drain")
        return [] if found is True else list(found)

    async def deployment_replicas(self) -> int:
        """`spec.replicas` of the Deployment."""
        return int((await self.deployment())["spec"]["replicas"])

    async def evict(self, pod: str) -> int:
        """Ask for an eviction; the HTTP status of the answer."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        try:
            await self.kube._write(
                "POST", PODS, PODS.path(self.namespace, pod, "eviction"), body, {}
            )
        except KubeError as error:
            return error.status
        return 201

    def writes(self, since: int = 0) -> list[Object]:
        """What the API server's audit log has of this namespace, from line `since` on."""
        return [
            entry
            for entry in audit(self.server)[since:]
            if (entry.get("objectRef") or {}).get("namespace") == self.namespace
        ]


def audit(server: Any) -> list[Object]:
    """All writes that the API server has answered, in its order."""
    log = server.layout.logs / "audit.log"
    lines = log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def by_operator(entry: Object) -> bool:
    """Whether an audited write is an operator's."""
    return str(entry.get("userAgent", "")).startswith("kvscaler-operator/")


def of(entry: Object) -> str:
    """`resource/subresource` of an audited write."""
    reference = entry.get("objectRef") or {}
    parts = (reference.get("resource"), reference.get("subresource"))
    return "/".join(part for part in parts if part)
