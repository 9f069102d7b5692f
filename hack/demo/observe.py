"""What happened, sampled a few times a second from the API server and from the Pods themselves.

Everything the demo shows or judges comes from here or from the clients' own records; nothing is
taken on the operator's word alone.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from hack.demo.kube import Kube

PERIOD_SECONDS = 0.5
MEMORY_PERIOD_SECONDS = 2.0


@dataclass(slots=True)
class PodSample:
    """One Pod at one time. `state` is its own report, `None` while it gives none."""

    name: str
    uid: str
    ip: str | None
    ready: bool
    terminating: bool
    restarts: int
    last_termination: str
    started_at: str | None
    """When its container started, in whole seconds."""
    ready_since: str | None
    state: dict[str, Any] | None


@dataclass(slots=True)
class Sample:
    """The service at one time; `at` is on the monotonic clock."""

    at: float
    service: dict[str, Any] | None
    pods: list[PodSample]

    @property
    def desired(self) -> int | None:
        """`spec.replicas` of the InferenceService: what the scale patch writes."""
        return self.service["spec"].get("replicas") if self.service else None

    @property
    def ready(self) -> int:
        """Ready Pods that are not on their way out."""
        return sum(1 for pod in self.pods if pod.ready and not pod.terminating)

    def blocks(self, which: str) -> int:
        """Sum of an occupancy figure (`referenced_blocks`, …) over Pods that report one."""
        return sum(
            pod.state["occupancy"][which]
            for pod in self.pods
            if pod.state and pod.state.get("occupancy")
        )


@dataclass(slots=True)
class Observer:
    """Samples one service until stopped, and remembers every sample."""

    kube: Kube
    namespace: str
    name: str
    samples: list[Sample] = field(default_factory=list)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    on_sample: Callable[[Sample], None] | None = None
    period_seconds: float = PERIOD_SECONDS

    @property
    def service_path(self) -> str:
        """Path of the InferenceService."""
        return (
            f"/apis/kvscaler.io/v1alpha1/namespaces/{self.namespace}/inferenceservices/{self.name}"
        )

    async def run(self) -> None:
        """Sample every `period_seconds` until cancelled."""
        memory_due = 0.0
        while True:
            began = time.monotonic()
            try:
                sample = await self.sample()
                self.samples.append(sample)
                if self.on_sample is not None:
                    self.on_sample(sample)
                if began >= memory_due:
                    memory_due = began + MEMORY_PERIOD_SECONDS
                    await self._sample_memory()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(max(0.05, began + self.period_seconds - time.monotonic()))

    async def sample(self) -> Sample:
        """One look at the object, its Pods, and what they report."""
        service: dict[str, Any] | None = None
        with suppress(aiohttp.ClientResponseError):  # 404 before it is created
            service = await self.kube.get(self.service_path)
        pods: list[PodSample] = []
        if service is not None:
            selector = f"kvscaler.io%2Fservice-uid%3D{service['metadata']['uid']}"
            listing = await self.kube.get(
                f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={selector}"
            )
            pods = await asyncio.gather(*(self._pod(item) for item in listing["items"]))
        return Sample(time.monotonic(), service, sorted(pods, key=lambda pod: pod.name))

    async def _pod(self, item: dict[str, Any]) -> PodSample:
        status = item.get("status", {})
        ready = next(
            (c for c in status.get("conditions", ()) if c["type"] == "Ready"), {"status": "False"}
        )
        containers = status.get("containerStatuses", ())
        terminations = [
            f"{c['lastState']['terminated'].get('reason')} "
            f"({c['lastState']['terminated'].get('exitCode')})"
            for c in containers
            if c.get("lastState", {}).get("terminated")
        ]
        ip = status.get("podIP")
        state = None
        if ip:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                state = await self.kube.pod_json(ip, 9090, "/state")
        return PodSample(
            name=item["metadata"]["name"],
            uid=item["metadata"]["uid"],
            ip=ip,
            ready=ready["status"] == "True",
            terminating="deletionTimestamp" in item["metadata"],
            restarts=sum(c.get("restartCount", 0) for c in containers),
            last_termination="; ".join(terminations),
            started_at=next(
                (
                    c["state"]["running"]["startedAt"]
                    for c in containers
                    if "running" in c.get("state", {})
                ),
                None,
            ),
            ready_since=ready.get("lastTransitionTime") if ready["status"] == "True" else None,
            state=state,
        )

    async def _sample_memory(self) -> None:
        nodes = await self.kube.get("/api/v1/nodes")
        for node in nodes["items"]:
            summary = await self.kube.get(
                f"/api/v1/nodes/{node['metadata']['name']}/proxy/stats/summary"
            )
            for pod in summary.get("pods", ()):
                used = pod.get("memory", {}).get("workingSetBytes")
                if used is not None:
                    key = f"{pod['podRef']['namespace']}/{pod['podRef']['name']}"
                    self.peak_memory_bytes[key] = max(self.peak_memory_bytes.get(key, 0), used)
