"""A gate and an engine in one Pod of a real cluster: reached through the gate only, and drained."""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import pytest
from localcluster.handle import ClusterHandle

from tests.e2e.live import MODEL, Streams, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]
OUTPUT_TOKENS = 128
GATE_PORTS = (8000, 9090, 9443)
ENGINE_PORTS = (8001, 9091, 9444)


def gated_pod(image: str) -> dict[str, Any]:
    """Our engine on the loopback address, and a gate before it, as docs/gate.md has it."""
    common = {
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    engine = {
        **common,
        "name": "engine",
        "args": [
            *("serve", f"--model-uri=builtin://{MODEL}", f"--memory-bytes={1296 << 20}"),
            *("--max-context-tokens=384", "--drain-linger-seconds=0", "--host=127.0.0.1"),
            *("--http-port=8001", "--metrics-port=9091", "--admin-port=9444"),
        ],
        # The kubelet stops all containers at once; the engine must outlive the gate's drain.
        "lifecycle": {"preStop": {"httpGet": {"path": "/drain/wait", "port": 9090}}},
        "resources": {
            # Slow, so that streams are open for longer than it takes to delete the Pod.
            "limits": {"cpu": "0.5", "memory": f"{1296 << 20}"},
            "requests": {"cpu": "0.1"},
        },
    }
    gate = {
        **common,
        "name": "gate",
        "args": [
            *("serve", "--mode=gate", "--engine-url=http://127.0.0.1:8001"),
            *("--engine-metrics-url=http://127.0.0.1:9091", "--drain-linger-seconds=2"),
        ],
        "readinessProbe": {"httpGet": {"path": "/health/ready", "port": 9090}, "periodSeconds": 1},
        # A busy node takes its time to start Python; a liveness probe must not count that.
        "startupProbe": {
            "httpGet": {"path": "/health/live", "port": 9090},
            "periodSeconds": 1,
            "failureThreshold": 300,
        },
        "livenessProbe": {"httpGet": {"path": "/health/live", "port": 9090}},
        "resources": {"limits": {"cpu": "1", "memory": "256Mi"}, "requests": {"cpu": "0.1"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "gated"},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "terminationGracePeriodSeconds": 300,
            "containers": [engine, gate],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }


@pytest.fixture
def pod(
    cluster: ClusterHandle, images: Mapping[str, str], namespace: str
) -> Iterator[tuple[str, str]]:
    """Namespace and IP of a Pod that is ready."""
    cluster.kubectl(
        *("apply", "-n", namespace, "-f", "-"), text=json.dumps(gated_pod(images["sidecar"]))
    )
    deadline = time.monotonic() + 300
    while True:
        found = json.loads(cluster.kubectl("get", "pod", "gated", "-n", namespace, "-o", "json"))
        conditions = found["status"].get("conditions", ())
        if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
            break
        assert time.monotonic() < deadline, f"the Pod did not become ready: {conditions}"
        time.sleep(1)
    yield namespace, found["status"]["podIP"]
    cluster.try_kubectl(*("delete", "pod", "gated", "-n", namespace, "--force", "--grace-period=0"))


async def test_the_engine_is_reached_through_the_gate_alone(pod: tuple[str, str]) -> None:
    _, ip = pod
    for port in GATE_PORTS:
        _, writer = await asyncio.open_connection(ip, port)
        writer.close()
    for port in ENGINE_PORTS:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(ip, port)
    async with aiohttp.ClientSession() as session:
        body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8}
        async with session.post(f"http://{ip}:8000/v1/completions", json=body) as answer:
            told = await answer.json()
        async with session.get(f"http://{ip}:9090/state") as answer:
            state = await answer.json()
    assert told["usage"]["completion_tokens"] <= 8
    assert state["ready"]
    assert state["executor"]["type"] == "Torch"
    assert state["traffic"]["finished"] == 1
    assert state["capacity"]["kv_blocks"] == state["limits"]["applied"]["kv_blocks"]


async def test_streams_end_whole_when_the_pod_is_deleted(
    pod: tuple[str, str], cluster: ClusterHandle, streams: Streams
) -> None:
    namespace, ip = pod
    for _ in range(2):
        streams.open(f"http://{ip}:8000", OUTPUT_TOKENS)
    await streams.begun()
    await asyncio.to_thread(
        cluster.kubectl, "delete", "pod", "gated", "-n", namespace, "--wait=false"
    )

    async def draining() -> bool:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{ip}:9090/state") as answer,
        ):
            drain = (await answer.json())["drain"]
        return drain["phase"] in ("Lingering", "Draining") and drain["live_requests"] > 0

    await eventually(draining, "the gate drains while its streams go on")
    await streams.whole()

    async def gone() -> bool:
        listing = await asyncio.to_thread(
            cluster.kubectl, "get", "pods", "-n", namespace, "-o", "name"
        )
        return "gated" not in listing

    await eventually(gone, "the Pod is gone", 60.0)
    events = await asyncio.to_thread(cluster.kubectl, "get", "events", "-n", namespace)
    assert "FailedPreStopHook" not in events
