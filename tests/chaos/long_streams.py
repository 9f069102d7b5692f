"""Services whose streams last for a minute and cost no CPU: modelled replicas, slowed down."""

from typing import Any

from hack.demo.observe import PodSample
from tests.e2e.live import MODEL, Live, Object, Streams, eventually

TIME_SCALE = 100
TOKENS = 100
"""A step of an H100 with this model takes some 6.5 ms, so a stream lasts some 65 s."""
LEAST_SECONDS = 60.0
LEAVING = ("Lingering", "Draining")


def long_lived(namespace: str, name: str, mode: str = "External", **scaling: Any) -> Object:
    """A service whose streams of `TOKENS` tokens last for more than a minute."""
    container = {
        "name": "engine",
        "resources": {
            "requests": {"cpu": "20m", "memory": "200Mi"},
            "limits": {"cpu": "500m", "memory": "600Mi"},
        },
    }
    return {
        "apiVersion": "kvscaler.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {
                "uri": "hf://meta-llama/Llama-3.1-8B-Instruct",
                "servedNames": [MODEL],
                "maxContextTokens": 2048,
            },
            "engine": {"args": ["--executor=Modelled", f"--time-scale={TIME_SCALE}"]},
            "accelerator": {"name": "nvidia-h100-80gb-hbm3"},
            "scaling": {
                "mode": mode,
                "minReplicas": 1,
                "maxReplicas": 4,
                "scaleDown": {"stabilizationWindow": "1h", "drainTimeout": "4m"},
                **scaling,
            },
            "template": {"spec": {"containers": [container]}},
        },
    }


class Fleet:
    """Ready replicas of such a service, each with open streams."""

    def __init__(self, live: Live, streams: Streams) -> None:
        self.live, self.streams = live, streams
        self.pods: list[PodSample] = []

    async def open(self, service: Object, replicas: int, per_replica: int = 2) -> list[PodSample]:
        """Make the service, wait for its replicas, and open streams on each of them."""
        service["spec"]["replicas"] = replicas
        await self.live.apply(service)
        self.pods = await self.live.until_ready(replicas)
        for pod in self.pods:
            for _ in range(per_replica):
                self.streams.open(f"http://{pod.ip}:8000", TOKENS)
        await self.streams.begun()
        return self.pods

    async def leaving(self, *, terminating: bool | None = None) -> PodSample:
        """Wait until a replica is on its way out while it serves."""

        async def check() -> PodSample | None:
            for pod in (await self.live.sample()).pods:
                drain = pod.state["drain"] if pod.state else {}
                right = terminating is None or pod.terminating is terminating
                if right and drain.get("phase") in LEAVING and drain["live_requests"]:
                    return pod
            return None

        found: PodSample = await eventually(check, "a replica leaves while it serves", 90)
        return found

    async def whole(self) -> str:
        """Wait until all streams have ended whole; how many, and how long they lasted, in words."""
        await self.streams.whole()
        lasted = [r.ended_at - r.offered_at for r in self.streams.requests if r.ended_at]
        assert min(lasted) >= LEAST_SECONDS, f"streams lasted {min(lasted):.0f} s only"
        return f"{len(lasted)} streams of {min(lasted):.0f} to {max(lasted):.0f} s, all whole"
