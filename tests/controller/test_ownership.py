"""Replicas have one writer: what a change of owner leaves, and what we do about another writer."""

import asyncio
import time
from itertools import permutations
from typing import Any

import pytest
from kvscaler.traffic import Present
from kvscaler_operator.autoscalers import AUTOSCALER_MANAGER, AUTOSCALERS
from kvscaler_operator.deletion import JUST_SECONDS
from kvscaler_operator.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    Object,
    Resource,
    name_of,
    uid_of,
)

from tests.controller.world import World, service_object

pytestmark = pytest.mark.apiserver
MODES = ("Managed", "Advisory", "External")
MERGE = "application/merge-patch+json"


def scaling(mode: str, **changes: Any) -> Object:
    """A mode with bounds around 5 and the default window of 5 minutes."""
    return {"mode": mode, "minReplicas": 1, "maxReplicas": 6, **changes}


async def apply(world: World, mode: str) -> None:
    """What a user's file says, as `kubectl apply --server-side` would."""
    document = service_object(world.namespace, scaling=scaling(mode))
    await world.kube.apply(INFERENCE_SERVICES, document, manager="kubectl")


async def scale_as(
    world: World, resource: Resource, replicas: int, manager: str, name: str = "chat"
) -> None:
    """Write a scale subresource as another client would, under its own name."""
    path = resource.path(world.namespace, name, "scale")
    body = {"spec": {"replicas": replicas}}
    await world.kube._write("PATCH", resource, path, body, {"fieldManager": manager}, MERGE)


def autoscaler(world: World, resource: Resource, owner: Object | None = None) -> Object:
    reference = {"apiVersion": resource.api_version, "kind": resource.kind, "name": "chat"}
    metadata: Object = {"name": "mine", "namespace": world.namespace}
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    return {
        "apiVersion": AUTOSCALERS.api_version,
        "kind": AUTOSCALERS.kind,
        "metadata": metadata,
        "spec": {
            "scaleTargetRef": reference,
            "minReplicas": 1,
            "maxReplicas": 6,
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": "kvscaler_service_desired_replicas"},
                        "target": {"type": "AverageValue", "averageValue": "1"},
                    },
                }
            ],
        },
    }


async def replicas(world: World) -> tuple[int, int]:
    """`spec.replicas` of the service and of its Deployment."""
    service, deployment = await world.service(), await world.deployment()
    return service["spec"]["replicas"], deployment["spec"]["replicas"]


async def until_replicas(world: World, wanted: tuple[int, int]) -> None:
    async def check() -> bool:
        return await replicas(world) == wanted

    await world.eventually(check, what=f"replicas are {wanted}")


async def five(world: World, mode: str) -> list[str]:
    """A service of five ready replicas under this mode; names of its Pods."""
    await world.start_operator()
    await world.create(service_object(world.namespace, scaling=scaling(mode), replicas=5))
    await until_replicas(world, (5, 5))
    # Status has so many writes a minute: Pods that get ready one by one would use them up.
    await world.stop_operator()
    pods = await world.sync_pods()
    operator = await world.start_operator()
    labels = {"namespace": world.namespace, "name": "chat", "phase": "Ready"}

    async def ready() -> bool:
        return operator.registry.get_sample_value("kvscaler_service_replicas", labels) == 5

    await world.eventually(ready, what="the operator sees 5 ready Pods")
    return [name_of(p) for p in pods]


@pytest.mark.parametrize(("before", "after"), list(permutations(MODES, 2)))
async def test_a_change_of_the_mode_leaves_five_replicas(
    world: World, before: str, after: str
) -> None:
    names = await five(world, "Advisory")
    await apply(world, before)
    reasons = {"Managed": "Owned", "Advisory": "NotOurs", "External": "NotOurs"}
    active = {"Managed": "Deciding", "Advisory": "Advising", "External": "ExternallyManaged"}
    await world.until_condition("ScalingActive", "True", active[before])
    await apply(world, after)
    await world.until_condition("ScalingActive", "True", active[after])
    for _ in range(20):
        assert await replicas(world) == (5, 5)
        await asyncio.sleep(0.1)
    assert [name_of(p) for p in await world.pods()] == names
    assert all(sidecar.drain_puts == [] for sidecar in world.sidecars.values())
    if after != "Managed":  # there, who scaled before is named for some minutes
        await world.until_condition("ReplicasOwned", "True", reasons[after])


@pytest.mark.fault
async def test_what_would_have_done_under_another_owner_is_no_reason_to_shrink(
    world: World,
) -> None:
    """The window had passed with one replica wanted; Managed begins it anew."""
    await world.start_operator()
    short = scaling("External", scaleDown={"stabilizationWindow": "3s"})
    await world.create(service_object(world.namespace, scaling=short))
    await world.sync_pods()
    await scale_as(world, INFERENCE_SERVICES, 3, "kubectl")
    await until_replicas(world, (3, 3))
    await world.sync_pods()

    async def one_would_do() -> bool:
        return bool((await world.service())["status"]["desiredReplicas"] == 1)

    await world.eventually(one_would_do)
    taken_over = {
        "spec": {"scaling": {"mode": "Managed", "scaleDown": {"stabilizationWindow": "1h"}}}
    }
    await world.patch(taken_over)
    await world.until_condition("ScalingActive", "True", "Deciding")
    for _ in range(20):
        assert (await replicas(world))[0] == 3
        await asyncio.sleep(0.1)


async def test_an_autoscaler_on_the_deployment_is_named_and_not_fought(world: World) -> None:
    await five(world, "External")
    keda = {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "name": "by-queue",
        "uid": uid_of(await world.service()),
        "controller": True,
    }
    await world.kube.create(AUTOSCALERS, autoscaler(world, DEPLOYMENTS, keda))
    await scale_as(world, DEPLOYMENTS, 3, AUTOSCALER_MANAGER)
    owned = await world.until_condition("ReplicasOwned", "False", "ConflictingAutoscaler")
    told = "HorizontalPodAutoscaler mine of ScaledObject by-queue scales Deployment chat"
    assert told in owned["message"]
    await world.until_condition("ScalingActive", "False", "ConflictingAutoscaler")
    # Its number stands, whatever is asked of us, also for a new operator.
    await scale_as(world, INFERENCE_SERVICES, 2, "kubectl")
    await world.stop_operator()
    await world.start_operator()
    for _ in range(20):
        assert await replicas(world) == (2, 3)
        await asyncio.sleep(0.1)
    assert world.operator is not None and world.operator.kube is not None
    path = AUTOSCALERS.path(world.namespace, "mine")
    await world.kube._write("DELETE", AUTOSCALERS, path, {}, {})
    await world.until_condition("ReplicasOwned", "True", "NotOurs", seconds=40)

    async def drains() -> bool:
        marks = [p["metadata"]["annotations"] for p in await world.pods()]
        return sum("kvscaler.io/drain" in m for m in marks) >= 1

    await world.eventually(drains, what="the Deployment follows the service again, by a drain")


async def test_a_drain_under_way_ends_when_an_autoscaler_takes_the_deployment(
    world: World,
) -> None:
    names = await five(world, "External")
    await scale_as(world, INFERENCE_SERVICES, 4, "kubectl")

    async def one_drains() -> list[str]:
        return [name for name in names if world.sidecars[name].drain_puts == [True]]

    (victim,) = await world.eventually(one_drains)
    await world.kube.create(AUTOSCALERS, autoscaler(world, DEPLOYMENTS))
    await scale_as(world, DEPLOYMENTS, 6, AUTOSCALER_MANAGER)

    async def serves_again() -> bool:
        return world.sidecars[victim].drain_puts == [True, False]

    await world.eventually(serves_again)
    await world.until_condition("ReplicasOwned", "False", "ConflictingAutoscaler")
    assert await replicas(world) == (4, 6)


async def test_an_autoscaler_on_a_managed_service_is_named_and_not_fought(world: World) -> None:
    await five(world, "Managed")
    await world.kube.create(AUTOSCALERS, autoscaler(world, INFERENCE_SERVICES))
    await scale_as(world, INFERENCE_SERVICES, 4, AUTOSCALER_MANAGER)
    owned = await world.until_condition("ReplicasOwned", "False", "ConflictingAutoscaler")
    told = "HorizontalPodAutoscaler mine scales InferenceService chat"
    assert told in owned["message"]
    assert "External" in owned["message"]
    # As its message says: give it the replicas.
    await apply(world, "External")
    await world.until_condition("ReplicasOwned", "True", "NotOurs", seconds=40)
    assert (await replicas(world))[0] == 4


async def test_a_person_who_scales_the_deployment_is_no_autoscaler(world: World) -> None:
    await five(world, "External")
    other = autoscaler(world, DEPLOYMENTS)
    other["spec"]["scaleTargetRef"]["name"] = "another"
    await world.kube.create(AUTOSCALERS, other)
    await scale_as(world, DEPLOYMENTS, 6, "kubectl")
    await until_replicas(world, (5, 5))
    await world.until_condition("ReplicasOwned", "True", "NotOurs")


async def test_a_pod_that_lost_readiness_and_hangs_is_drained_by_annotation(world: World) -> None:
    names = await five(world, "External")
    lost = names[2]
    world.sidecars[lost].hang = True
    status = {"containerStatuses": [{"name": "engine", "image": "i", "imageID": "", "ready": False,
                                     "restartCount": 0, "started": True}]}  # fmt: skip
    await world.kube.merge(PODS, world.namespace, lost, {"status": status}, "status")
    await world.set_pod_ready(lost, False)
    assert world.operator is not None
    signals, uid = world.operator.signals, uid_of(await world.service())
    pod_uid = uid_of(await world.kube.get(PODS, world.namespace, lost))

    async def silent() -> bool:
        state = signals.state(uid, pod_uid, time.time())
        return not isinstance(state, Present) or state.age_seconds(time.time()) > JUST_SECONDS

    await world.eventually(silent)
    await scale_as(world, INFERENCE_SERVICES, 4, "kubectl")

    async def marked() -> bool:
        pod = await world.kube.get(PODS, world.namespace, lost)
        return "kvscaler.io/drain" in pod["metadata"]["annotations"]

    await world.eventually(marked, what="the Pod that says nothing is drained")
    assert (await replicas(world))[1] == 5
