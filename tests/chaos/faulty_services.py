"""Services that show a fault of the cluster, and looking at their targets while it lasts.

Their replicas are modelled: server, scheduler, admission and drain are those of any replica, but a
step waits instead of computing. So several services fit on two cores, and a spike is a spike on any
machine.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from localcluster.fakes import LABEL as FAKE_NODE

from tests.e2e.live import MODEL, POLL_SECONDS, Live, Object, example

MODELLED = ["--executor=Modelled", "--time-scale=4"]
STREAM_TOKENS = 300
"""About 20 s on a modelled RTX 4090 at this time scale."""
REPLICA_STREAMS = 14
"""Streams of that length that fill one replica's blocks."""


def managed(namespace: str, name: str, maximum: int = 3, **template: Any) -> Object:
    """A service scaled by the operator whose replicas hold 277 blocks; `template` goes into the
    Pod's spec."""
    service = example(
        namespace,
        name,
        model={
            "uri": "hf://meta-llama/Llama-3.1-8B-Instruct",
            "servedNames": [MODEL],
            "maxContextTokens": 512,
        },
        engine={"type": "Kvscaler", "memoryUtilizationPercent": 69, "args": MODELLED},
        accelerator={"name": "nvidia-geforce-rtx-4090"},
        admission={"mode": "Enforce", "queue": {"maxRequests": 32, "maxWait": "60s"}},
    )
    service["spec"]["scaling"] = {
        "mode": "Managed",
        "minReplicas": 1,
        "maxReplicas": maximum,
        "scaleDown": {"stabilizationWindow": "20s", "drainTimeout": "3m"},
    }
    pod = service["spec"]["template"]["spec"]
    pod["containers"][0]["resources"] = {
        "requests": {"cpu": "20m", "memory": "128Mi"},
        "limits": {"memory": "320Mi"},
    }
    pod.update(template)
    return service


def alone_on_its_node(label: str) -> Object:
    """An affinity by which a node takes one Pod with this label, and no second."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"example.com/alone": label}},
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def on_fake_nodes(namespace: str, name: str, replicas: int) -> Object:
    """A service whose Pods only pretend to run."""
    service = example(namespace, name, replicas=replicas)
    service["spec"]["scaling"] |= {"maxReplicas": replicas}
    service["spec"]["template"]["spec"] |= {
        "tolerations": [{"key": FAKE_NODE, "operator": "Exists"}],
        "nodeSelector": {FAKE_NODE: "true"},
    }
    return service


class Targets:
    """The targets of a service while something happens: of the object and of its Deployment."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    @property
    def lowest(self) -> int:
        """The fewest replicas that either asked for."""
        return min(min(pair) for pair in self.seen)

    @property
    def fell(self) -> bool:
        """Whether either ever asked for fewer replicas than just before."""
        return any(a[0] > b[0] or a[1] > b[1] for a, b in pairwise(self.seen))

    @property
    def highest(self) -> int:
        """The most replicas that either asked for."""
        return max(max(pair) for pair in self.seen)

    async def look(self, live: Live) -> tuple[int, int]:
        """Look once."""
        service, deployment = await live.service(), await live.deployment()
        assert deployment is not None, f"the Deployment of {live.name} is gone"
        pair = (service["spec"].get("replicas", 1), deployment["spec"]["replicas"])
        self.seen.append(pair)
        return pair

    async def run(self, live: Live) -> None:
        """Look again and again until cancelled."""
        while True:
            # The API server may be busy; what is not seen is not a target.
            with suppress(aiohttp.ClientError, TimeoutError):
                await self.look(live)
            await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def watched(live: Live) -> AsyncIterator[Targets]:
    """Look at a service's targets as long as the block lasts."""
    targets = Targets()
    await targets.look(live)
    task = asyncio.create_task(targets.run(live))
    try:
        yield targets
    finally:
        task.cancel()
        done = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError), done[0]


def processes_of(pod_uid: str) -> list[int]:
    """Processes of a Pod's containers on this machine, by control group; the pause one left out."""
    needles = (pod_uid, pod_uid.replace("-", "_"))
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it ended meanwhile
                groups = (entry / "cgroup").read_text()
                if any(n in groups for n in needles) and _name(entry) != "pause":
                    found.append(int(entry.name))
    return found


def signal_pod(pod_uid: str, number: int) -> None:
    """Send every process of a Pod a signal, as a node would that has no memory left."""
    processes = processes_of(pod_uid)
    assert processes, f"no process of Pod {pod_uid} is seen on this machine"
    for process in processes:
        with suppress(ProcessLookupError):  # its parent took it along
            os.kill(process, number)


def _name(entry: Path) -> str:
    return (entry / "comm").read_text().strip()
