"""Every way in which a replica goes, with streams of a minute open: none breaks.

All at once, each on a service of its own: the replicas are modelled, so a stream costs time alone.
"""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable

import pytest
from localcluster.handle import ClusterHandle

from hack.demo.kube import Kube
from tests.chaos.faulty_services import signal_pod
from tests.chaos.long_streams import TOKENS, Fleet, long_lived
from tests.chaos.rows import Faults, Row
from tests.chart.release import Release
from tests.e2e.live import Live, Streams, eventually

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.timeout(900)]

Way = Callable[[Fleet, Row], Awaitable[str]]


async def scaled_down(fleet: Fleet, row: Row) -> str:
    """`kubectl scale kvis`"""
    await fleet.open(long_lived(fleet.live.namespace, fleet.live.name), 2)
    row.strike()
    await fleet.live.kubectl("scale", "kvis", fleet.live.name, "--replicas=1")
    victim = await fleet.leaving(terminating=False)
    deployment = await fleet.live.deployment()
    assert deployment is not None and deployment["spec"]["replicas"] == 2
    await gone(fleet, victim.name)
    await fleet.live.until_ready(1)
    return "Deployment lowered when the victim was empty"


async def deleted(fleet: Fleet, row: Row) -> str:
    """`kubectl delete pod`"""
    pods = await fleet.open(long_lived(fleet.live.namespace, fleet.live.name), 1)
    row.strike()
    await fleet.live.kubectl("delete", "pod", pods[0].name, "--wait=false")
    await fleet.leaving(terminating=True)
    await gone(fleet, pods[0].name)
    await fleet.live.until_ready(1)
    return "another Pod at once"


async def evicted(fleet: Fleet, row: Row) -> str:
    """eviction of both replicas"""
    pods = await fleet.open(long_lived(fleet.live.namespace, fleet.live.name), 2)
    row.strike()
    assert await evict(fleet, pods[0].name)
    refused = not await evict(fleet, pods[1].name)
    assert refused, "the budget lets one go at a time"

    async def second() -> bool:
        return await evict(fleet, pods[1].name)

    await eventually(second, "the other may go when one is ready in place of the first", 180)
    for pod in pods:
        await gone(fleet, pod.name)
    await fleet.live.until_ready(2)
    return "the second eviction waited for the first one's replacement"


async def rolled_out(fleet: Fleet, row: Row) -> str:
    """rollout of a new template"""
    pods = await fleet.open(long_lived(fleet.live.namespace, fleet.live.name), 2)
    row.strike()
    note = {"metadata": {"annotations": {"example.com/version": "2"}}}
    await fleet.live.patch({"spec": {"template": note}})
    await fleet.leaving(terminating=True)
    for pod in pods:
        await gone(fleet, pod.name)
    await fleet.live.until_ready(2)
    return "target unchanged, both replaced"


async def scaled_by_autoscaler(fleet: Fleet, row: Row) -> str:
    """scale-down by an autoscaler in External mode"""
    await fleet.open(long_lived(fleet.live.namespace, fleet.live.name), 2)
    row.strike()
    scale = f"/apis/kvscaler.io/v1alpha1/namespaces/{fleet.live.namespace}/inferenceservices/"
    scale += f"{fleet.live.name}/scale"
    # As the autoscaler's controller does: read the scale, and replace it.
    now = json.loads(await fleet.live.kubectl("get", "--raw", scale))
    now["spec"]["replicas"] = 1
    await fleet.live.kubectl("replace", "--raw", scale, "-f", "-", text=json.dumps(now))
    victim = await fleet.leaving(terminating=False)
    await gone(fleet, victim.name)
    await fleet.live.until_ready(1)
    owned = await fleet.live.condition("ReplicasOwned")
    assert (owned["status"], owned["reason"]) == ("True", "NotOurs")
    return "ReplicasOwned=True/NotOurs"


async def edited(fleet: Fleet, row: Row) -> str:
    """maxReplicas lowered, then the mode changed in mid-drain"""
    service = long_lived(fleet.live.namespace, fleet.live.name, "Managed", minReplicas=2)
    await fleet.open(service, 2)
    row.strike()
    await fleet.live.patch({"spec": {"scaling": {"minReplicas": 1, "maxReplicas": 1}}})
    victim = await fleet.leaving(terminating=False)
    await fleet.live.patch({"spec": {"scaling": {"mode": "Advisory"}}})
    await gone(fleet, victim.name)
    await fleet.live.until_ready(1)
    return "the drain went on under the new owner"


async def came_back(fleet: Fleet, row: Row) -> str:
    """demand back before the victim is empty"""
    pods = await fleet.open(long_lived(fleet.live.namespace, fleet.live.name), 2)
    row.strike()
    await fleet.live.kubectl("scale", "kvis", fleet.live.name, "--replicas=1")
    victim = await fleet.leaving(terminating=False)
    await fleet.live.kubectl("scale", "kvis", fleet.live.name, "--replicas=2")

    async def serves() -> bool:
        pod = await fleet.live.pod(victim.name)
        assert pod is not None, "the victim went although it was wanted again"
        return pod.ready and pod.state is not None and pod.state["drain"]["phase"] == "Serving"

    await eventually(serves, "the victim serves again", 60)
    fleet.streams.open(f"http://{victim.ip}:8000", TOKENS)
    left = await fleet.live.until_ready(2)
    assert {pod.name for pod in left} == {pod.name for pod in pods}
    return "the victim serves again, no Pod was lost"


async def deleted_in_mid_drain(fleet: Fleet, row: Row) -> str:
    """the victim deleted by hand in mid-drain"""
    await fleet.open(long_lived(fleet.live.namespace, fleet.live.name), 2)
    row.strike()
    await fleet.live.kubectl("scale", "kvis", fleet.live.name, "--replicas=1")
    victim = await fleet.leaving(terminating=False)
    await fleet.live.kubectl("delete", "pod", victim.name, "--wait=false")
    await fleet.leaving(terminating=True)
    await gone(fleet, victim.name)
    (left,) = await fleet.live.until_ready(1)
    assert left.name != victim.name
    return "SIGTERM took the drain over; no other Pod began to drain"


WAYS: list[Way] = [
    scaled_down, deleted, evicted, rolled_out, scaled_by_autoscaler, edited, came_back,
    deleted_in_mid_drain,
]  # fmt: skip


async def test_no_way_out_breaks_a_stream(
    kube: Kube, cluster: ClusterHandle, release: Release, namespace: str, faults: Faults
) -> None:
    done = await asyncio.gather(
        *(run(way, kube, cluster, namespace, faults) for way in WAYS), return_exceptions=True
    )
    problems = [f"{w.__doc__}: {e!r}" for w, e in zip(WAYS, done, strict=True) if e is not None]
    assert problems == []


async def test_an_operator_killed_in_mid_drain_is_followed_by_one_that_ends_it(
    kube: Kube, cluster: ClusterHandle, release: Release, namespace: str, faults: Faults
) -> None:
    async def killed(fleet: Fleet, row: Row) -> str:
        """operator killed with -9 in mid-drain"""
        await fleet.open(long_lived(fleet.live.namespace, fleet.live.name), 2)
        await fleet.live.kubectl("scale", "kvis", fleet.live.name, "--replicas=1")
        victim = await fleet.leaving(terminating=False)
        row.strike()
        signal_pod(release.operator_pod()["metadata"]["uid"], signal.SIGKILL)

        async def restarted() -> bool:
            (status,) = release.operator_pod()["status"]["containerStatuses"]
            return bool(status["restartCount"] and status["ready"])

        await eventually(restarted, "the operator is back", 120)
        still = await fleet.live.pod(victim.name)
        assert still is not None and not still.terminating
        await gone(fleet, victim.name)
        (left,) = await fleet.live.until_ready(1)
        assert left.name != victim.name
        return "the restarted operator took the drain up from its annotation"

    failed = await run(killed, kube, cluster, namespace, faults)
    assert failed is None


async def test_a_node_is_drained_and_every_stream_ends_whole(
    kube: Kube, cluster: ClusterHandle, release: Release, namespace: str, faults: Faults
) -> None:
    node = cluster.get("nodes")["items"][0]["metadata"]["name"]

    async def node_drained(fleet: Fleet, row: Row) -> str:
        """`kubectl drain` of the only node"""
        pods = await fleet.open(long_lived(fleet.live.namespace, fleet.live.name), 2)
        row.strike()
        draining = asyncio.create_task(
            asyncio.to_thread(
                cluster.try_kubectl,
                "drain",
                node,
                "--ignore-daemonsets",
                "--delete-emptydir-data",
                "--pod-selector=kvscaler.io/component=engine",
                "--timeout=100s",
            )
        )
        try:
            await fleet.leaving(terminating=True)
            told = await fleet.live.until("Ready", "False", "ReplicasUnschedulable", seconds=180)
            assert "unschedulable" in told["message"], told
            await fleet.streams.whole()
            # The budget holds the second back: no replacement for the first gets ready.
            done = await draining
            kept = [pod.name for pod in await fleet.live.pods() if pod.ready]
            assert done.returncode != 0 and "disruption budget" in done.stderr, done.stderr
            assert len(kept) == 1 and kept[0] in {pod.name for pod in pods}
        finally:
            await asyncio.to_thread(cluster.kubectl, "uncordon", node)
        await fleet.live.until_ready(2)
        return "one replica left at a time; Ready=False/ReplicasUnschedulable while cordoned"

    failed = await run(node_drained, kube, cluster, namespace, faults)
    assert failed is None


async def run(way: Way, kube: Kube, cluster: ClusterHandle, namespace: str, faults: Faults) -> None:
    """One way on a service of its own, as one row."""
    name = way.__name__.replace("_", "-")
    live = Live(kube, cluster, namespace, name)
    with faults.row(f"replica goes: {way.__doc__}") as row:
        async with Streams() as streams:
            fleet = Fleet(live, streams)
            status = await way(fleet, row)
            row.recovered(await fleet.whole(), status)
        await live.kubectl("delete", "kvis", name, "--wait=false")


async def gone(fleet: Fleet, pod: str) -> None:
    """Wait until a Pod does not exist any more."""

    async def check() -> bool:
        return await fleet.live.pod(pod) is None

    await eventually(check, f"{pod} is gone", 240)


async def evict(fleet: Fleet, pod: str) -> bool:
    """Ask for an eviction; whether it was granted."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": fleet.live.namespace},
    }
    path = f"/api/v1/namespaces/{fleet.live.namespace}/pods/{pod}/eviction"
    done = await asyncio.to_thread(
        fleet.live.cluster.try_kubectl,
        "create",
        "--raw",
        path,
        "-f",
        "-",
        text=json.dumps(eviction),
    )
    assert done.returncode == 0 or "disruption budget" in done.stderr, done.stderr
    return done.returncode == 0
