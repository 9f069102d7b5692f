"""From an InferenceService to its children and status, on a real API server."""

import pytest
from kvscaler_operator.resources import CONFIG_MAPS, DEPLOYMENTS, DISRUPTION_BUDGETS, SERVICES

from tests.controller.world import World, service_object

pytestmark = pytest.mark.apiserver


async def test_a_service_gets_all_its_children_and_becomes_ready(world: World) -> None:
    await world.start_operator()
    created = await world.create(service_object(world.namespace))
    deployment = await world.deployment()
    assert deployment["spec"]["replicas"] == 1
    await world.sync_pods()
    await world.until_condition("Ready", "True", "ReplicasReady")
    for resource, name in (
        (SERVICES, "chat"),
        (SERVICES, "chat-replicas"),
        (DISRUPTION_BUDGETS, "chat"),
        (CONFIG_MAPS, "chat-admin-keys"),
        (DEPLOYMENTS, "chat"),
    ):
        child = await world.find(resource, name)
        assert child is not None
        owner = child["metadata"]["ownerReferences"][0]
        assert (owner["uid"], owner["controller"]) == (created["metadata"]["uid"], True)
        assert not owner.get("blockOwnerDeletion")
