"""Replicas, their one writer and the drain, on a real API server with Pods made by hand."""

import asyncio
from typing import Any

import pytest
from kvscaler.protocol.drain import DrainPhase, DrainReport
from kvscaler.protocol.state import OccupancyReport, TrafficCounters
from kvscaler_operator.apply import owns_replicas_by_apply
from kvscaler_operator.gateways.kube import FIELD_MANAGER
from kvscaler_operator.resources import DEPLOYMENTS, INFERENCE_SERVICES, Object, name_of

from tests.controller.sidecars import BLOCKS, FakeSidecar
from tests.controller.world import World, service_object

pytestmark = pytest.mark.apiserver

PROMPT, OUTPUT = 100, 50


def load(sidecar: FakeSidecar, blocks: int, waiting: int = 0, arrivals: int = 0) -> None:
    """A replica whose requests hold `blocks`, with `waiting` requests of 12 blocks queued."""
    reserved = min(BLOCKS, blocks)
    occupancy = OccupancyReport(
        capacity_blocks=BLOCKS,
        referenced_blocks=reserved,
        reserved_blocks=reserved,
        cached_blocks=0,
        free_blocks=BLOCKS - reserved,
        running_requests=reserved // 12,
        waiting_requests=waiting,
        waiting_tokens=waiting * PROMPT,
        waiting_blocks=waiting * 12,
    )
    finished = arrivals // 2
    traffic = TrafficCounters(
        arrivals=arrivals,
        arrival_prompt_tokens=float(arrivals * PROMPT),
        arrival_prompt_tokens_squared=float(arrivals * PROMPT**2),
        arrival_max_tokens=float(arrivals * OUTPUT),
        admitted=arrivals - waiting,
        finished=finished,
        finished_prompt_tokens=float(finished * PROMPT),
        finished_prompt_tokens_squared=float(finished * PROMPT**2),
        finished_output_tokens=float(finished * OUTPUT),
        finished_output_tokens_squared=float(finished * OUTPUT**2),
        finished_prompt_output_tokens=float(finished * PROMPT * OUTPUT),
        finished_block_seconds=float(finished * 60),
        finished_block_squared_seconds=float(finished * 500),
    )
    sidecar.set(occupancy=occupancy, traffic=traffic)


async def ready_service(world: World, **spec: Any) -> FakeSidecar:
    await world.start_operator()
    await world.create(service_object(world.namespace, **spec))
    await world.sync_pods()
    await world.until_condition("Ready", "True", "ReplicasReady")
    return next(iter(world.sidecars.values()))


async def replicas(world: World) -> tuple[int, int]:
    """`spec.replicas` of the service and of its Deployment."""
    service, deployment = await world.service(), await world.deployment()
    return service["spec"]["replicas"], deployment["spec"]["replicas"]


async def until_replicas(world: World, check: Any, seconds: float = 20) -> tuple[int, int]:
    async def checked() -> Any:
        both = await replicas(world)
        return check(*both) and both

    return tuple(await world.eventually(checked, seconds))  # type: ignore[return-value]


def managers(obj: Object, field: str) -> list[tuple[str, str, str]]:
    """Who owns a field of spec: manager, operation, subresource."""
    return [
        (m["manager"], m["operation"], m.get("subresource", ""))
        for m in obj["metadata"]["managedFields"]
        if field in m["fieldsV1"].get("f:spec", {})
    ]


async def test_a_spike_scales_by_memory_within_seconds(world: World) -> None:
    sidecar = await ready_service(world)
    load(sidecar, BLOCKS, waiting=30, arrivals=60)
    ours, theirs = await until_replicas(world, lambda a, b: a > 1 and b > 1)
    assert ours == theirs

    async def told() -> Object | None:
        decision: Object = (await world.service())["status"]["decision"]
        return decision if decision["desiredReplicas"] > 1 else None

    decision = dict(await world.eventually(told))
    assert decision["bindingConstraint"] in ("Memory", "Queue")

    async def posted() -> bool:
        return "ScaledUp" in {e["reason"] for e in await world.events()}

    await world.eventually(posted)


async def test_replicas_are_written_only_through_scale(world: World) -> None:
    sidecar = await ready_service(world)
    deployment = await world.deployment()
    assert (FIELD_MANAGER, "Apply", "scale") in managers(deployment, "f:replicas")
    load(sidecar, BLOCKS, waiting=30, arrivals=60)
    await until_replicas(world, lambda a, b: a > 1 and b > 1)
    service = await world.service()
    assert (FIELD_MANAGER, "Update", "scale") in managers(service, "f:replicas")
    # A later apply of the document neither holds replicas nor resets them.
    await world.patch({"spec": {"cache": {"blockTokens": 32}}})

    async def applied() -> bool:
        return not owns_replicas_by_apply(await world.deployment())

    await world.eventually(applied)
    ours, theirs = await replicas(world)
    assert ours == theirs > 1


async def test_a_hand_scaled_deployment_follows_the_service_again(world: World) -> None:
    await ready_service(world)
    await world.kube.merge(DEPLOYMENTS, world.namespace, "chat", {"spec": {"replicas": 4}}, "scale")
    await until_replicas(world, lambda a, b: a == 1 and b == 1)


@pytest.mark.parametrize("mode", ["Advisory", "External"])
async def test_who_owns_replicas_is_a_field(world: World, mode: str) -> None:
    scaling = {"mode": mode, "maxReplicas": 5}
    sidecar = await ready_service(world, scaling=scaling)
    load(sidecar, BLOCKS, waiting=30, arrivals=60)

    async def wants_more() -> bool:
        return bool((await world.service())["status"]["desiredReplicas"] > 1)

    await world.eventually(wants_more)
    await asyncio.sleep(1)
    assert await replicas(world) == (1, 1)
    metrics = await world.metrics()
    assert (
        f'kvscaler_service_desired_replicas{{name="chat",namespace="{world.namespace}"}}' in metrics
    )
    # Whoever owns it writes the scale subresource, and the Deployment follows.
    await world.kube.merge(
        INFERENCE_SERVICES, world.namespace, "chat", {"spec": {"replicas": 3}}, "scale"
    )
    assert await until_replicas(world, lambda _, b: b == 3) == (3, 3)
    reason = "Advising" if mode == "Advisory" else "ExternallyManaged"
    await world.until_condition("ScalingActive", "True", reason)
    await world.until_condition("ReplicasOwned", "True", "NotOurs")


async def test_a_managed_service_starts_with_its_minimum(world: World) -> None:
    await world.start_operator()
    scaling = {"mode": "Managed", "minReplicas": 2, "maxReplicas": 5}
    await world.create(service_object(world.namespace, scaling=scaling))
    assert (await world.deployment())["spec"]["replicas"] == 2
    await until_replicas(world, lambda a, b: (a, b) == (2, 2))


async def scaled_to(world: World, count: int) -> list[Object]:
    """A service of `count` ready replicas that a person asked for."""
    scaling = {"mode": "Advisory", "maxReplicas": 5, "scaleDown": {"drainTimeout": "1m"}}
    await ready_service(world, scaling=scaling)
    await scale(world, count)
    await until_replicas(world, lambda _, b: b == count)
    await world.sync_pods()

    async def all_ready() -> bool:
        return bool((await world.service())["status"]["readyReplicas"] == count)

    await world.eventually(all_ready)
    return await world.pods()


async def scale(world: World, count: int) -> None:
    await world.kube.merge(
        INFERENCE_SERVICES, world.namespace, "chat", {"spec": {"replicas": count}}, "scale"
    )


def draining(world: World, pods: list[Object]) -> list[str]:
    return [name_of(p) for p in pods if "kvscaler.io/drain" in p["metadata"]["annotations"]]


async def until_draining(world: World, count: int) -> list[str]:
    names: list[str] = []

    async def chosen() -> bool:
        names[:] = draining(world, await world.pods())
        return len(names) == count

    await world.eventually(chosen, what=f"{count} Pods drain")
    return names


async def test_scaling_down_waits_until_the_chosen_pod_is_empty(world: World) -> None:
    pods = await scaled_to(world, 3)
    busy = [name_of(p) for p in pods]
    idle = busy.pop(1)
    for name in busy:
        load(world.sidecars[name], 60, arrivals=10)

    async def observed() -> bool:
        return bool((await world.service())["status"]["occupancy"].get("referencedBlocks"))

    # Status has two writes a minute for what is no decision, and some were used while starting.
    await world.eventually(observed, seconds=60)
    await scale(world, 2)
    assert await until_draining(world, 1) == [idle]
    chosen = world.sidecars[idle]

    async def told() -> bool:
        return chosen.drain_puts == [True]

    await world.eventually(told)
    await asyncio.sleep(1)
    assert (await replicas(world))[1] == 3
    await world.set_pod_ready(idle, False)
    chosen.drain = DrainReport(phase=DrainPhase.EMPTY)
    await until_replicas(world, lambda _, b: b == 2)
    assert sorted(name_of(p) for p in await world.sync_pods()) == sorted(busy)

    async def posted() -> bool:
        reasons = {e["reason"] for e in await world.events()}
        return {"DrainStarted", "DrainFinished"} <= reasons

    await world.eventually(posted)


async def test_demand_that_is_back_ends_a_drain(world: World) -> None:
    await scaled_to(world, 2)
    await scale(world, 1)
    (name,) = await until_draining(world, 1)
    await scale(world, 2)
    assert await until_draining(world, 0) == []
    assert world.sidecars[name].drain_puts[-1] is False
    annotations = next(p for p in await world.pods() if name_of(p) == name)["metadata"][
        "annotations"
    ]
    assert "controller.kubernetes.io/pod-deletion-cost" not in annotations
    assert (await replicas(world))[1] == 2


async def test_a_drain_survives_a_restart_of_the_operator(world: World) -> None:
    await scaled_to(world, 2)
    await scale(world, 1)
    (name,) = await until_draining(world, 1)
    await world.stop_operator()
    await world.start_operator()
    await asyncio.sleep(1)
    assert await until_draining(world, 1) == [name]
    assert (await replicas(world))[1] == 2
    world.sidecars[name].drain = DrainReport(phase=DrainPhase.EMPTY)
    await until_replicas(world, lambda _, b: b == 1)


async def test_a_foreign_scaler_is_named(world: World) -> None:
    await ready_service(world)
    path = INFERENCE_SERVICES.path(world.namespace, "chat", "scale")
    await world.kube._write(
        "PATCH",
        INFERENCE_SERVICES,
        path,
        {"spec": {"replicas": 2}},
        {"fieldManager": "horizontal-pod-autoscaler"},
        "application/merge-patch+json",
    )
    found = await world.until_condition("ReplicasOwned", "False", "ConflictingWriter")
    assert "horizontal-pod-autoscaler" in found["message"]
