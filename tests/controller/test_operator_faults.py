"""What happens to the operator itself: restarted at peak, its clock set back, its Pods gone mad."""

import asyncio
import logging
import time
from typing import Any

import pytest
from kvscaler.protocol.drain import DrainPhase, DrainReport
from kvscaler_operator.resources import DEPLOYMENTS, Object, name_of

from tests.controller.sidecars import BLOCKS
from tests.controller.test_scaling import load, ready_service, replicas, until_replicas
from tests.controller.world import World

pytestmark = [pytest.mark.apiserver, pytest.mark.fault]
PATIENT = {
    "mode": "Managed",
    "maxReplicas": 5,
    "scaleDown": {"stabilizationWindow": "10m", "drainTimeout": "1m"},
}


async def at_peak(world: World, **scaling: Any) -> int:
    """A service that a spike has grown, all its replicas ready and full; how many there are."""
    sidecar = await ready_service(world, scaling={**PATIENT, **scaling})
    load(sidecar, BLOCKS, waiting=30, arrivals=60)
    _, grown = await until_replicas(world, lambda a, b: a == b > 1)
    await world.sync_pods()
    for each in world.sidecars.values():
        load(each, BLOCKS - 20, arrivals=60)

    async def all_ready() -> bool:
        return bool((await world.service())["status"]["readyReplicas"] >= grown)

    await world.eventually(all_ready, 60.0)
    return grown


async def lowest_for(world: World, seconds: float) -> int:
    """The fewest replicas that service or Deployment ask for within so many seconds."""
    deadline = time.monotonic() + seconds
    lowest = min(await replicas(world))
    while time.monotonic() < deadline:
        lowest = min(lowest, *(await replicas(world)))
        await asyncio.sleep(0.1)
    return lowest


async def test_a_restart_at_peak_shrinks_nothing_on_its_empty_window(world: World) -> None:
    grown = await at_peak(world)
    await world.stop_operator()
    # The worst case: it comes back, and no replica answers it yet.
    for sidecar in world.sidecars.values():
        sidecar.hang = True
    await world.start_operator()
    assert await lowest_for(world, 3.0) >= grown
    # Then they answer, and say that they are idle: a window of that has not been seen yet.
    for sidecar in world.sidecars.values():
        sidecar.hang = False
        load(sidecar, 0)
    await world.until_condition("SignalsFresh", "True", "Fresh", seconds=40)
    assert await lowest_for(world, 3.0) >= grown


async def test_a_clock_set_back_by_an_hour_freezes_nothing(world: World) -> None:
    back = 0.0
    world.clock = lambda: time.time() - back
    brief = {"scaleDown": {"stabilizationWindow": "3s", "drainTimeout": "1m"}}
    sidecar = await ready_service(world, scaling={**PATIENT, **brief})
    back = 3600.0
    load(sidecar, BLOCKS, waiting=30, arrivals=60)
    _, grown = await until_replicas(world, lambda a, b: a == b > 1)
    await world.sync_pods()
    back = 7200.0
    for each in world.sidecars.values():
        load(each, 0)

    async def shrunk() -> bool:
        for each in world.sidecars.values():
            if each.drain.phase is DrainPhase.DRAINING:
                each.drain = DrainReport(phase=DrainPhase.EMPTY)
        return (await replicas(world)) < (grown, grown)

    await world.eventually(shrunk, 60.0)
    assert (await world.condition("ScalingActive"))["status"] == "True"


async def test_all_replicas_unready_by_overload_keep_their_number_and_it_is_said_why(
    world: World,
) -> None:
    grown = await at_peak(world)
    for pod in await world.pods():
        await world.set_pod_ready(name_of(pod), False)
    found = await world.until_condition("Ready", "False", "ReplicasNotReady")
    assert f"0 of {grown} replicas are ready" in found["message"]

    async def said() -> Object | None:
        decision: Object = (await world.service())["status"]["decision"]
        return decision if "no replica is ready" in decision["message"] else None

    decision = dict(await world.eventually(said))
    assert decision["desiredReplicas"] == grown
    assert await lowest_for(world, 2.0) == grown
    for pod in await world.pods():
        await world.set_pod_ready(name_of(pod), True)
    await world.until_condition("Ready", "True", "ReplicasReady")
    assert await lowest_for(world, 1.0) >= grown


async def test_flapping_readiness_moves_no_target_and_floods_nobody(world: World) -> None:
    grown = await at_peak(world)
    assert world.operator is not None and world.operator.kube is not None
    flapping = name_of((await world.pods())[0])
    writes = world.operator.kube.write_count
    seen: set[int] = set()
    for _ in range(15):
        for ready in (False, True):
            await world.set_pod_ready(flapping, ready)
            seen.update(await replicas(world))
    assert seen == {grown}
    # Status has a budget: 10 at once and one in 6 s, whatever flaps how often.
    assert world.operator.kube.write_count - writes <= 15
    events = [e for e in await world.events() if e["reason"] not in ("ChildCreated",)]
    assert len(events) <= 12


async def test_a_rollout_at_steady_load_moves_no_target(world: World) -> None:
    grown = await at_peak(world)
    deployment = await world.deployment()
    status = {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": grown + 1,
        "updatedReplicas": 1,
        "readyReplicas": grown,
    }
    await world.kube.merge(DEPLOYMENTS, world.namespace, "chat", {"status": status}, "status")
    for sidecar in world.sidecars.values():
        load(sidecar, 0)
    assert await lowest_for(world, 2.0) == grown


async def test_a_namespace_that_is_being_deleted_gets_nothing_new_and_no_complaint(
    world: World, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await ready_service(world, scaling=PATIENT)
    events = len(await world.events())
    # No controller empties it here, so that it stays in this state.
    server.kubectl("delete", "namespace", world.namespace, "--wait=false")
    server.kubectl("delete", "service", "chat", "-n", world.namespace)
    assert world.operator is not None
    caplog.set_level(logging.INFO, "kvscaler_operator")

    async def tried() -> bool:
        return any("being terminated" in record.message for record in caplog.records)

    await world.eventually(tried)
    assert [r.message for r in caplog.records if r.levelname in ("WARNING", "ERROR")] == []
    assert (await world.condition("Ready"))["reason"] == "ReplicasReady"
    assert len(await world.events()) == events
