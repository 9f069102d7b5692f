"""The operator killed, stopped, restarted at peak and uninstalled, while a real model serves."""

import asyncio
import signal
from functools import partial
from typing import Any

import pytest
from localcluster.handle import ClusterHandle

from hack.demo.kube import Kube
from hack.demo.observe import PodSample
from tests.chaos.faulty_services import (
    REPLICA_STREAMS,
    STREAM_TOKENS,
    Targets,
    managed,
    signal_pod,
    watched,
)
from tests.chaos.rows import Faults
from tests.chaos.test_cluster import no_stream_broke, told
from tests.chart.release import CRD, Release, errors
from tests.e2e.live import Live, Streams, eventually, nowhere, stays

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.timeout(600)]
SPIKE_STREAMS = 2 * REPLICA_STREAMS
STOPPED_SECONDS = 20.0
CALM_SECONDS = 10.0
SERVICES = 10
LEAVING = ("Lingering", "Draining")


class OperatorPod:
    """The operator's Pod as the cluster sees it."""

    def __init__(self, release: Release) -> None:
        self._release = release

    async def look(self) -> dict[str, Any]:
        """The Pod."""
        pod: dict[str, Any] = await asyncio.to_thread(self._release.operator_pod)
        return pod

    async def signal(self, number: int) -> None:
        """Send its processes a signal."""
        pod = await self.look()
        await asyncio.to_thread(signal_pod, pod["metadata"]["uid"], number)

    async def restarts(self) -> int:
        """How often its container was restarted."""
        (container,) = (await self.look())["status"]["containerStatuses"]
        return int(container["restartCount"])

    async def until_restarted(self, beyond: int) -> None:
        """Wait until it was restarted, and has seen every service since."""

        async def ready_again() -> bool:
            (container,) = (await self.look())["status"]["containerStatuses"]
            return int(container["restartCount"]) > beyond and bool(container["ready"])

        await eventually(ready_again, "the operator's container is ready again", 120.0)

    async def last_status(self) -> int:
        """Exit status of its last container."""
        (container,) = (await self.look())["status"]["containerStatuses"]
        return int(container["lastState"]["terminated"]["exitCode"])


async def acts(live: Live, queue_requests: int) -> None:
    """Wait until a change of the spec was put to every replica: the operator sees and acts."""
    await live.patch({"spec": {"admission": {"queue": {"maxRequests": queue_requests}}}})

    async def told_all() -> bool:
        pods = [p for p in await live.pods() if p.ready]
        applied = [p.state["limits"]["applied"] for p in pods if p.state is not None]
        return bool(applied) and all(a["queue_requests"] == queue_requests for a in applied)

    await eventually(told_all, f"every replica has a queue of {queue_requests}")


async def never_falls(targets: Targets, seconds: float) -> None:
    """Look for a while whether a target falls."""

    async def holds() -> bool:
        return not targets.fell

    await stays(holds, lambda: f"a target fell: {targets.seen}", seconds)


async def test_an_operator_that_dies_at_the_worst_time(
    kube: Kube, cluster: ClusterHandle, release: Release, namespace: str, faults: Faults
) -> None:
    if cluster.layout is None:
        pytest.skip("processes of another cluster's nodes are not ours to signal")
    live, pod = Live(kube, cluster, namespace, "chat"), OperatorPod(release)
    await live.apply(managed(namespace, "chat"))
    await live.until_ready(1)
    async with Streams() as streams:
        stop = streams.keep_open(await live.address(), SPIKE_STREAMS, STREAM_TOKENS)
        async with watched(live) as spike:

            async def grew() -> bool:
                return spike.highest > 1

            with faults.row("operator: killed with -9 in the spike") as row:
                await eventually(grew, "the spike asks for more replicas")
                grown, before = spike.seen[-1][0], await pod.restarts()
                row.strike()
                await pod.signal(signal.SIGKILL)
                async with watched(live) as after:
                    await pod.until_restarted(before)
                    await acts(live, 33)
                    assert not after.fell, f"growth was taken back: {after.seen}"
                fresh = await live.until("SignalsFresh", "True")
                row.recovered(
                    f"nothing: {live.name} kept its {grown} replicas",
                    f"SignalsFresh={fresh['reason']} after the restart",
                )

        await ready_pods(live, 2)
        with faults.row("operator: restarted at peak, Prometheus down") as row:
            async with watched(live) as after:
                peak = (await after.look(live))[0]
                row.strike()
                old = (await pod.look())["metadata"]["name"]
                await asyncio.to_thread(release.kubectl, "delete", "pod", old, "--wait=false")
                await eventually(partial(another, pod, old), "another operator Pod is ready", 120)
                await acts(live, 34)
                fresh = await live.until("SignalsFresh", "True", "PrometheusUnreachable")
                row.recovered(
                    f"nothing: {live.name} kept its {peak} replicas", f"SignalsFresh=True/"
                    f"PrometheusUnreachable: {fresh['message'][:90]}",
                )  # fmt: skip
                await never_falls(after, CALM_SECONDS)

        with faults.row("operator: stopped (SIGSTOP) past its Lease") as row:
            before = await pod.restarts()
            async with watched(live) as after:
                peak = (await after.look(live))[0]
                await pod.signal(signal.SIGSTOP)
                await asyncio.sleep(STOPPED_SECONDS)
                await pod.signal(signal.SIGCONT)
                row.strike()
                await pod.until_restarted(before)
                await acts(live, 33)
                assert not after.fell, f"a target fell: {after.seen}"
            status = await pod.last_status()
            assert status == 3, f"it ended with {status} and not because its Lease was lost"
            row.recovered(
                f"nothing: {live.name} kept its {peak} replicas",
                "the operator ended with status 3 (Lease lost) and came back",
            )

        with faults.row("operator: killed with -9 in a drain") as row:
            # One stream on each replica from now on: less than one of them needs.
            stop.set()
            held = [
                streams.keep_open(f"http://{p.ip}:8000", 1, STREAM_TOKENS)
                for p in await live.pods()
                if p.ready
            ]
            chosen = await eventually(partial(leaving, live), "a replica drains", 240.0)
            for each in held:
                each.set()
            before = await pod.restarts()
            row.strike()
            await pod.signal(signal.SIGKILL)
            await pod.until_restarted(before)

            async def gone() -> bool:
                return await live.pod(chosen.name) is None

            await eventually(gone, f"{chosen.name} is drained and gone", 240.0)
            await no_stream_broke(streams)
            row.recovered(told(streams), "the drain went on from its mark on the Pod")
    await live.kubectl("delete", "kvis", "chat", "--wait=true", "--timeout=60s")


async def ready_pods(live: Live, count: int) -> None:
    """Wait until at least so many replicas are ready."""

    async def ready() -> bool:
        return sum(1 for p in await live.pods() if p.ready) >= count

    await eventually(ready, f"{count} replicas are ready", 240.0)


async def another(pod: OperatorPod, old: str) -> bool:
    """Whether another operator Pod than `old` is ready."""
    try:
        found = await pod.look()
    except AssertionError:
        return False  # for a moment there is none, or two
    ready = [s["ready"] for s in found["status"].get("containerStatuses") or ()]
    return found["metadata"]["name"] != old and ready == [True]


async def leaving(live: Live) -> PodSample | None:
    """A replica that is on its way out and still has requests."""
    for found in (await live.sample()).pods:
        if found.state is not None:
            drain = found.state["drain"]
            if drain["phase"] in LEAVING and drain["live_requests"] > 0:
                return found
    return None


async def test_a_namespace_deleted_full_of_services(
    kube: Kube, cluster: ClusterHandle, release: Release, faults: Faults
) -> None:
    with faults.row(f"namespace deleted with {SERVICES} services") as row:
        with cluster.namespace("kvscaler-full") as full:
            services = [nowhere(full, f"chat-{number}") for number in range(SERVICES)]
            await asyncio.to_thread(cluster.apply, *services)
            for number in range(SERVICES):
                await Live(kube, cluster, full, f"chat-{number}").until("Ready", "False")
            row.strike()
            await asyncio.to_thread(
                cluster.kubectl, "delete", "namespace", full, "--wait=true", "--timeout=110s"
            )
            row.recovered("the namespace is gone, and nothing was made anew", "gone with it")
            cluster.kubectl("create", "namespace", full)  # for the block's own clean-up
        said = [line for line in errors(release.log()) if full in line]
        assert said == []


async def test_an_operator_deleted_before_its_services(
    kube: Kube, cluster: ClusterHandle, release: Release, faults: Faults
) -> None:
    with (
        faults.row("operator: deleted before its services") as row,
        cluster.namespace("kvscaler-orphans") as space,
    ):
        orphans = [Live(kube, cluster, space, name) for name in ("left", "right")]
        for live in orphans:
            await live.apply(nowhere(space, live.name))
        for live in orphans:
            await live.until("Ready", "False", "ReplicasUnschedulable")
        await asyncio.to_thread(release.uninstall)
        try:
            assert cluster.try_kubectl("get", "crd", CRD).returncode == 0
            row.strike()
            await orphans[0].kubectl("delete", "kvis", "--all", "--wait=true", "--timeout=60s")

            async def no_children() -> bool:
                return not any([await live.children() for live in orphans])

            await eventually(no_children, "the children went with their owners")
            row.recovered("the services and all their children are gone", "gone with it")
        finally:
            await asyncio.to_thread(release.install)
