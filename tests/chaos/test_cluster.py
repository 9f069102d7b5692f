"""Pods that don't start, don't fit, crash or vanish: the target stays right, and status says why.

Each fault has a service of its own, and most of its time is waiting, so they run side by side.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import pytest
from localcluster import fakes
from localcluster.handle import ClusterHandle

from hack.demo.kube import Kube
from hack.demo.traffic import Result
from tests.chaos.faulty_services import (
    MODELLED,
    REPLICA_STREAMS,
    STREAM_TOKENS,
    alone_on_its_node,
    managed,
    on_fake_nodes,
    watched,
)
from tests.chaos.rows import Faults, Row
from tests.e2e.live import Live, Streams, eventually

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.timeout(600)]
NO_IMAGE = "docker.io/local/there-is-no-such-image:1"
SPIKE_STREAMS = 2 * REPLICA_STREAMS
STEADY_SECONDS = 20.0
FAKE_NODES, ON_FAKES = 2, 6


@dataclass(frozen=True)
class Place:
    """Where the faults happen."""

    kube: Kube
    cluster: ClusterHandle
    namespace: str
    image: str
    """The sidecar image that starts."""

    def live(self, name: str) -> Live:
        """A service by its name."""
        return Live(self.kube, self.cluster, self.namespace, name)


Act = Callable[[Place, Row], Awaitable[None]]


async def cannot_be_scheduled(place: Place, row: Row) -> None:
    """A spike on a service whose second Pod no node takes."""
    live = place.live("unscheduled")
    service = managed(place.namespace, live.name, 5, affinity=alone_on_its_node(live.name))
    labels = {"labels": {"example.com/alone": live.name}}
    service["spec"]["template"]["metadata"] = labels
    await live.apply(service)
    await live.until_ready(1)
    async with Streams() as streams, watched(live) as targets:
        stop = streams.keep_open(await live.address(), SPIKE_STREAMS, STREAM_TOKENS)
        row.strike()

        async def grew() -> bool:
            return targets.highest > 1

        await eventually(grew, "the spike asks for more than one replica")
        step = targets.highest

        async def said() -> str | None:
            message = str((await live.status())["decision"]["message"])
            return message if "can't be scheduled" in message else None

        message = await eventually(said, "the decision says that growth has stopped")
        ready = await live.until("Ready", "True", "ReplicasReady")
        assert "node" in ready["message"]
        await asyncio.sleep(STEADY_SECONDS)
        assert targets.highest == step, "growth went on although nothing could be scheduled"
        stop.set()
        await no_stream_broke(streams)

        async def back() -> bool:
            return targets.seen[-1] == (1, 1)

        await eventually(back, "the target is back at one", 180.0)
        row.recovered(told(streams), f"decision: {message.partition(';')[0]}; stays at {step}")


async def image_does_not_start(place: Place, row: Row) -> None:
    """A service made with an image that does not exist."""
    live = place.live("no-image")
    service = managed(place.namespace, live.name)
    service["spec"]["engine"]["image"] = NO_IMAGE
    await live.apply(service)
    found = await live.until("Ready", "False", "ReplicasCrashing")
    assert "Image" in found["message"]
    async with watched(live) as targets:
        await asyncio.sleep(STEADY_SECONDS)
    assert targets.highest == targets.lowest == 1
    row.strike()
    await live.patch({"spec": {"engine": {"image": place.image}}})
    await live.until_ready(1)
    words = "; ".join(found["message"].split("; ")[:2])[:150]
    row.recovered("no service until the image is right", f"Ready=False/ReplicasCrashing: {words}")


async def crashes_after_an_update(place: Place, row: Row) -> None:
    """A running service, under load, gets a setting with which it can't start."""
    live = place.live("crashing")
    await live.apply(managed(place.namespace, live.name))
    (old,) = await live.until_ready(1)
    async with Streams() as streams, watched(live) as targets:
        stop = streams.keep_open(await live.address(), 2, STREAM_TOKENS)
        await streams.begun()
        await live.patch({"spec": {"engine": {"args": [*MODELLED, "--no-such-flag"]}}})

        async def crashed() -> str | None:
            message = str((await live.condition("Ready")).get("message", ""))
            return message if "CrashLoopBackOff" in message else None

        message = await eventually(crashed, "status names the Pod that crashes", 180.0)
        await asyncio.sleep(STEADY_SECONDS)
        assert (await live.condition("Ready"))["status"] == "True", "the old Pod serves on"
        assert (await live.pod(old.name)) is not None
        assert targets.highest == targets.lowest == 1, "a crash is no demand"
        row.strike()
        await live.patch({"spec": {"engine": {"args": MODELLED}}})
        stop.set()
        await no_stream_broke(streams)
        await live.until_ready(1)
        row.recovered(told(streams), f"Ready=True: {message[:150]}")


async def rolls_at_steady_load(place: Place, row: Row) -> None:
    """A rolling update while the load is steady."""
    live = place.live("rolling")
    await live.apply(managed(place.namespace, live.name))
    (old,) = await live.until_ready(1)
    async with Streams() as streams, watched(live) as targets:
        stop = streams.keep_open(await live.address(), 2, STREAM_TOKENS)
        await streams.begun()
        row.strike()
        note = {"metadata": {"annotations": {"example.com/version": "2"}}}
        await live.patch({"spec": {"template": note}})

        async def gone() -> bool:
            return await live.pod(old.name) is None

        await eventually(gone, "the old Pod is gone", 240.0)
        await live.until_ready(1)
        stop.set()
        await no_stream_broke(streams)
        assert targets.highest == targets.lowest == 1, "two Pods of a rollout are no demand"
        row.recovered(told(streams), "Ready=True throughout; the target stays 1")


async def node_goes(place: Place, row: Row) -> None:
    """One of two (pretended) nodes vanishes with half of the Pods."""
    layout = place.cluster.layout
    assert layout is not None
    live = place.live("on-fakes")
    await asyncio.to_thread(fakes.set_nodes, layout, FAKE_NODES)
    try:
        await live.apply(on_fake_nodes(place.namespace, live.name, ON_FAKES))

        async def ready() -> bool:
            status = await live.status()
            return (status.get("readyReplicas"), status.get("replicas")) == (ON_FAKES, ON_FAKES)

        await eventually(ready, f"{ON_FAKES} Pods on fake nodes are ready")
        async with watched(live) as targets:
            row.strike()
            await asyncio.to_thread(fakes.set_nodes, layout, FAKE_NODES - 1)
            last = f"fake-{FAKE_NODES - 1}"

            async def moved() -> bool:
                listing = await live.find("core/v1/pods")
                assert listing is not None
                nodes = {pod["spec"].get("nodeName") for pod in listing["items"]}
                return last not in nodes and await ready()

            await eventually(moved, f"no Pod is on {last}, and all are ready elsewhere", 240.0)
            assert targets.highest == targets.lowest == ON_FAKES
        row.recovered(
            "its streams are lost with it; the others serve on",
            f"Ready names the count; the target stays {ON_FAKES}",
        )
    finally:
        await live.kubectl("delete", "kvis", live.name, "--ignore-not-found", "--wait=true")
        await asyncio.to_thread(fakes.set_nodes, layout, 0)


async def no_stream_broke(streams: Streams) -> None:
    """Wait for the end of all streams: answered whole, or refused with a reason."""

    async def ended() -> bool:
        return all(request.result is not None for request in streams.requests)

    await eventually(ended, "all streams have ended", 240.0)
    broken = [r for r in streams.requests if r.result not in (Result.OK, Result.REFUSED)]
    assert not broken, [(r.result, r.reason) for r in broken]


def told(streams: Streams) -> str:
    """What users saw: streams by how they ended."""
    whole = sum(1 for r in streams.requests if r.result is Result.OK)
    refused = sum(1 for r in streams.requests if r.result is Result.REFUSED)
    return f"{whole} streams whole, {refused} refused with a reason, 0 broken"


FAULTS: dict[str, Act] = {
    "cluster: a spike whose Pods can't be scheduled": cannot_be_scheduled,
    "cluster: an image that does not exist": image_does_not_start,
    "cluster: a crash loop after an update": crashes_after_an_update,
    "cluster: a rolling update at steady load": rolls_at_steady_load,
    "cluster: a node gone with half of the Pods": node_goes,
}


async def test_a_cluster_in_which_pods_fail(
    kube: Kube, cluster: ClusterHandle, images: Mapping[str, str], namespace: str, faults: Faults
) -> None:
    if cluster.layout is None:
        pytest.skip("nodes come and go only on the local cluster")

    place = Place(kube, cluster, namespace, images["sidecar"])

    async def one(name: str, act: Act) -> None:
        with faults.row(name) as row:
            await act(place, row)

    outcomes = await asyncio.gather(*(one(*f) for f in FAULTS.items()), return_exceptions=True)
    cluster.try_kubectl("delete", "kvis", "--all", "-n", namespace, "--timeout=60s")
    problems = [o for o in outcomes if isinstance(o, BaseException)]
    if problems:
        raise BaseExceptionGroup("faults that were not survived", problems)
