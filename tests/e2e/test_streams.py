"""What was accepted ends whole, whatever happens to the replica that serves it."""

import pytest

from hack.demo.observe import PodSample
from tests.e2e.live import Live, Streams, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]
OUTPUT_TOKENS = 256
LEAVING = ("Lingering", "Draining")


def serves_while_leaving(pod: PodSample | None) -> bool:
    """Whether a replica is on its way out and still has requests."""
    if pod is None or pod.state is None:
        return False
    drain = pod.state["drain"]
    return drain["phase"] in LEAVING and drain["live_requests"] > 0


async def test_a_scale_down_drains_its_victim_first(chat: Live, streams: Streams) -> None:
    await chat.kubectl("scale", "kvis", "chat", "--replicas=2")
    pods = await chat.until_ready(2)
    for pod in pods:
        for _ in range(2):
            streams.open(f"http://{pod.ip}:8000", OUTPUT_TOKENS)
    await streams.begun()
    await chat.kubectl("scale", "kvis", "chat", "--replicas=1")

    async def victim() -> PodSample | None:
        leaving = [p for p in (await chat.sample()).pods if serves_while_leaving(p)]
        return leaving[0] if leaving else None

    chosen = await eventually(victim, "a replica drains while it serves")
    found = await chat.find(f"core/v1/pods/{chosen.name}")
    assert found is not None
    assert "kvscaler.io/drain" in found["metadata"]["annotations"]
    if not chosen.terminating:
        deployment = await chat.deployment()
        assert deployment is not None
        assert deployment["spec"]["replicas"] == 2, "replicas are lowered only after the drain"
    await streams.whole()
    (left,) = await chat.until_ready(1)
    assert left.name in {p.name for p in pods} - {chosen.name}
    assert left.restarts == 0
    assert (await chat.service())["spec"]["replicas"] == 1


async def test_deleting_a_pod_by_hand_lets_its_streams_end(chat: Live, streams: Streams) -> None:
    (pod,) = await chat.pods()
    for _ in range(2):
        streams.open(f"http://{pod.ip}:8000", OUTPUT_TOKENS)
    await streams.begun()
    await chat.kubectl("delete", "pod", pod.name, "--wait=false")

    async def leaving() -> bool:
        seen = await chat.pod(pod.name)
        return seen is not None and seen.terminating and serves_while_leaving(seen)

    await eventually(leaving, "the deleted Pod serves on")
    await streams.whole()
    (other,) = await chat.until_ready(1)
    assert other.name != pod.name


async def test_a_rollout_breaks_no_stream_and_refuses_no_newcomer(
    chat: Live, streams: Streams
) -> None:
    (old,) = await chat.pods()
    stop = streams.keep_open(await chat.address(), count=2, output_tokens=OUTPUT_TOKENS // 2)
    await streams.begun()
    note = {"metadata": {"annotations": {"example.com/version": old.name}}}
    await chat.patch({"spec": {"template": note}})

    async def leaving() -> bool:
        return serves_while_leaving(await chat.pod(old.name))

    await eventually(leaving, "the old Pod serves on while the new one has taken over", 200)

    async def gone() -> bool:
        return await chat.pod(old.name) is None

    await eventually(gone, "the old Pod is gone", 200)
    stop.set()
    await streams.whole()
    (new,) = await chat.until_ready(1)
    assert new.name != old.name
    assert len(streams.requests) > 2
    deployment = await chat.deployment()
    assert deployment is not None
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["example.com/version"] == old.name
