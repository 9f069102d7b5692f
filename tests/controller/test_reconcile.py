"""From an InferenceService to its children and status, on a real API server."""

import asyncio
import logging
from typing import Any

import pytest
from kvscaler_operator.gateways.kube import NotFoundError
from kvscaler_operator.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    INFERENCE_SERVICES,
    LEASES,
    SERVICES,
    Object,
    Resource,
    name_of,
    namespace_of,
    uid_of,
)

from tests.controller.world import World, service_object

pytestmark = pytest.mark.apiserver


async def running(world: World, **spec: Any) -> Object:
    """A service with one ready replica."""
    await world.start_operator()
    created = await world.create(service_object(world.namespace, **spec))
    await world.sync_pods()
    await world.until_condition("Ready", "True", "ReplicasReady")
    await world.until_condition("LimitsApplied", "True", "Applied")
    return created


async def test_a_service_gets_all_its_children_and_becomes_ready(world: World) -> None:
    created = await running(world)
    for resource, name in (
        (SERVICES, "chat"),
        (SERVICES, "chat-replicas"),
        (DISRUPTION_BUDGETS, "chat"),
        (CONFIG_MAPS, "chat-admin-keys"),
        (CONFIG_MAPS, "chat-admission"),
        (DEPLOYMENTS, "chat"),
    ):
        child = await world.find(resource, name)
        assert child is not None
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (uid_of(created), True)
        assert not owner.get("blockOwnerDeletion")
    (pod,) = await world.pods()
    assert pod["spec"]["serviceAccountName"] == "default"
    assert pod["spec"]["automountServiceAccountToken"] is False


async def test_status_tells_budget_occupancy_decision_and_limits(world: World) -> None:
    await running(world)

    async def complete() -> Object | None:
        status: Object = (await world.service())["status"]
        return status if "occupancy" in status and status["conditions"] else None

    status = dict(await world.eventually(complete))
    budget = status["budget"]
    lines = {line["name"]: line for line in budget["lines"]}
    assert lines["weights"]["predicted"] == lines["weights"]["observed"] == "538060032"
    assert (budget["observedBlocks"], status["limits"]["kvBlocks"]) == (200, 200)
    assert float(budget["deviationPercent"]) == pytest.approx(
        100 * (200 / budget["predictedBlocks"] - 1), abs=0.01
    )
    assert status["model"]["source"] == "Catalogue"
    assert status["occupancy"]["kvPercent"] == 0
    assert status["decision"]["desiredReplicas"] == status["desiredReplicas"] == 1
    assert status["selector"] == (
        f"kvscaler.io/service-uid={uid_of(await world.service())},kvscaler.io/component=engine"
    )
    assert (status["replicas"], status["readyReplicas"]) == (1, 1)
    assert status["sidecarImage"] == "docker.io/local/kvscaler-sidecar:one"
    kinds = {c["type"]: c for c in status["conditions"]}
    assert list(kinds) == [
        "Ready",
        "SpecValid",
        "BudgetFits",
        "SignalsFresh",
        "ScalingActive",
        "LimitsApplied",
        "ReplicasOwned",
    ]
    assert all(c["status"] == "True" for c in kinds.values())
    assert all(c["observedGeneration"] == 1 for c in kinds.values())


async def test_limits_are_put_once_and_only_when_they_differ(world: World) -> None:
    await running(world)
    (sidecar,) = world.sidecars.values()
    (put,) = sidecar.limits_puts
    assert (put.kv_blocks, put.queue_requests) == (200, 256)
    assert put.content_hash == (await world.service())["status"]["limits"]["hash"]
    # A restarted sidecar is back at its own limits, and is told again.
    sidecar.limits = sidecar.limits.model_copy(
        update={"hash": sidecar.limits.own_hash, "requested_hash": None}
    )

    async def told_again() -> bool:
        return len(sidecar.limits_puts) == 2

    await world.eventually(told_again)


async def test_an_edited_service_is_followed(world: World) -> None:
    await running(world)
    await world.patch({"spec": {"cache": {"blockTokens": 32}}})

    async def followed() -> bool:
        deployment = await world.deployment()
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        return {"name": "KVSCALER_BLOCK_TOKENS", "value": "32"} in container["env"]

    await world.eventually(followed)
    status = (await world.service())["status"]
    await world.until_condition("Ready", "True", "ReplicasReady")
    assert status["budget"]["blockTokens"] in (16, 32)


async def test_what_a_user_takes_out_of_the_template_goes(world: World) -> None:
    engine = {"name": "engine", "resources": {"limits": {"memory": "2Gi"}}}
    template = {"spec": {"containers": [engine], "nodeSelector": {"disk": "fast"}}}
    await running(world, template=template)
    assert (await world.deployment())["spec"]["template"]["spec"]["nodeSelector"]
    await world.patch({"spec": {"template": {"spec": {"nodeSelector": None}}}})

    async def gone() -> bool:
        spec = (await world.deployment())["spec"]["template"]["spec"]
        return "nodeSelector" not in spec

    await world.eventually(gone)


async def test_hand_edits_of_children_are_undone(world: World) -> None:
    await running(world)
    image = [{"name": "engine", "image": "evil:1"}]
    await world.patch({"spec": {"template": {"spec": {"containers": image}}}}, resource=DEPLOYMENTS)
    await world.patch({"spec": {"maxUnavailable": 0}}, resource=DISRUPTION_BUDGETS)
    await world.patch({"data": {"evil.pem": "x"}}, "chat-admin-keys", CONFIG_MAPS)
    await world.patch(
        {"metadata": {"labels": {"kvscaler.io/service-uid": None}}}, resource=SERVICES
    )

    async def restored() -> bool:
        (container,) = (await world.deployment())["spec"]["template"]["spec"]["containers"]
        budget = await world.find(DISRUPTION_BUDGETS)
        service = await world.find(SERVICES)
        assert budget is not None and service is not None
        return (
            container["image"] == "docker.io/local/kvscaler-sidecar:one"
            and budget["spec"]["maxUnavailable"] == 1
            and "kvscaler.io/service-uid" in service["metadata"]["labels"]
        )

    await world.eventually(restored)


async def test_deleted_children_are_made_again(world: World) -> None:
    await running(world)
    for resource, name in (
        (SERVICES, "chat"),
        (SERVICES, "chat-replicas"),
        (DISRUPTION_BUDGETS, "chat"),
        (CONFIG_MAPS, "chat-admin-keys"),
        (CONFIG_MAPS, "chat-admission"),
        (DEPLOYMENTS, "chat"),
    ):
        child = await world.find(resource, name)
        assert child is not None
        await world.kube.delete(resource, world.namespace, name, uid_of(child))

        async def back(
            old: str = uid_of(child), resource: Any = resource, name: str = name
        ) -> bool:
            found = await world.find(resource, name)
            return found is not None and uid_of(found) != old

        await world.eventually(back, what=f"{resource.kind} {name} made again")


async def test_a_taken_name_is_never_adopted(world: World) -> None:
    await world.kube.create(
        SERVICES,
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "chat", "namespace": world.namespace, "labels": {"mine": "yes"}},
            "spec": {"ports": [{"port": 80}]},
        },
    )
    await world.start_operator()
    await world.create(service_object(world.namespace))
    found = await world.until_condition("Ready", "False", "NameTaken")
    assert "Service chat exists already" in found["message"]
    assert await world.find(DEPLOYMENTS) is None
    assert await world.find(SERVICES, "chat-replicas") is None
    theirs = await world.find(SERVICES)
    assert theirs is not None
    assert theirs["metadata"]["labels"] == {"mine": "yes"}
    assert "ownerReferences" not in theirs["metadata"]


async def test_a_deployment_of_another_service_is_not_adopted(world: World) -> None:
    await running(world)
    # The same name again after deletion, while the old children are still there.
    old = await world.service()
    await world.kube.delete(INFERENCE_SERVICES, world.namespace, "chat", uid_of(old))
    await world.create(service_object(world.namespace))
    found = await world.until_condition("Ready", "False", "NameTaken")
    assert uid_of(old) in found["message"]


async def test_a_field_that_is_not_implemented_makes_nothing(world: World) -> None:
    await world.start_operator()
    await world.create(service_object(world.namespace, routing={"mode": "Router"}))
    found = await world.until_condition("SpecValid", "False", "NotImplemented")
    assert "spec.routing.mode" in found["message"]
    await world.until_condition("Ready", "False", "SpecInvalid")
    assert await world.find(DEPLOYMENTS) is None
    assert await world.find(SERVICES) is None


async def test_a_field_that_is_not_implemented_leaves_what_runs(world: World) -> None:
    await running(world)
    before = await world.deployment()
    (sidecar,) = world.sidecars.values()
    puts = len(sidecar.limits_puts)
    await world.patch({"spec": {"admission": {"mode": "Off"}, "cache": {"blockTokens": 32}}})
    await world.until_condition("SpecValid", "False", "NotImplemented")
    after = await world.deployment()
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert len(sidecar.limits_puts) == puts
    assert len(await world.pods()) == 1
    await world.patch({"spec": {"admission": {"mode": "Enforce"}, "cache": {"blockTokens": 16}}})
    await world.until_condition("SpecValid", "True", "Valid")


@pytest.mark.parametrize(
    ("spec", "kind", "reason", "words"),
    [
        (
            {"model": {"uri": "builtin://smollm2-135m", "maxContextTokens": 2048},
             "template": {"spec": {"containers": [
                 {"name": "engine", "resources": {"limits": {"memory": "600Mi"}}}]}}},
            "BudgetFits", "DoesNotFit", "does not fit by",
        ),
        ({"template": None}, "BudgetFits", "MemoryLimitMissing", "resources.limits.memory"),
        (
            {"accelerator": {"name": "quantum-9000"}},
            "BudgetFits", "UnknownAccelerator", "'quantum-9000' is not one of the",
        ),
        (
            {"engine": {"args": ["--block-tokens=8"]}},
            "SpecValid", "ArgConflict", "spec.cache.blockTokens",
        ),
        (
            {"template": {"spec": {"containers": [{"name": "engine", "image": "x"}]}}},
            "SpecValid", "TemplateConflict", "spec.engine.image",
        ),
    ],
)  # fmt: skip
async def test_bad_specs_get_words_and_no_pod(
    world: World, spec: Object, kind: str, reason: str, words: str
) -> None:
    await world.start_operator()
    obj = service_object(world.namespace, **spec)
    obj["spec"] = {key: value for key, value in obj["spec"].items() if value is not None}
    await world.create(obj)
    found = await world.until_condition(kind, "False", reason)
    assert words in found["message"]
    assert await world.find(DEPLOYMENTS) is None


async def test_a_budget_that_does_not_fit_says_by_how_much_and_what_would(world: World) -> None:
    await world.start_operator()
    accelerator = {"name": "nvidia-l40s", "resourceName": "nvidia.com/gpu"}
    model = {"uri": "builtin://large", "maxContextTokens": 8192}
    architecture = {
        "layers": [{"kind": "Full", "count": 32, "kvHeads": 8, "headDim": 128}],
        "weights": "50Gi",
        "hiddenSize": 4096,
        "attentionHeads": 32,
        "intermediateSize": 14336,
        "vocabularySize": 128256,
        "maxContextTokens": 131072,
    }
    await world.create(
        service_object(
            world.namespace, accelerator=accelerator, model={**model, "architecture": architecture}
        )
    )
    found = await world.until_condition("BudgetFits", "False", "DoesNotFit")
    assert "GiB" in found["message"] and "It would fit with" in found["message"]
    assert (await world.condition("Ready"))["reason"] == "BudgetDoesNotFit"
    assert await world.find(DEPLOYMENTS) is None


async def test_a_large_object_is_refused_by_a_condition(world: World) -> None:
    await world.start_operator()
    env = [{"name": f"V{i}", "value": "x" * 1000} for i in range(300)]
    template = {"spec": {"containers": [{"name": "helper", "image": "h", "env": env}]}}
    await world.create(service_object(world.namespace, template=template))
    found = await world.until_condition("SpecValid", "False", "TooLarge")
    assert "spec.template" in found["message"]
    assert await world.find(DEPLOYMENTS) is None


async def test_a_template_that_the_server_refuses_is_said(world: World) -> None:
    await world.start_operator()
    engine = {"name": "engine", "resources": {"limits": {"memory": "2Gi"}}}
    template = {"spec": {"containers": [engine], "dnsPolicy": "Sometimes"}}
    await world.create(service_object(world.namespace, template=template))
    found = await world.until_condition("SpecValid", "False", "TemplateInvalid")
    assert "dnsPolicy" in found["message"]
    assert await world.find(DEPLOYMENTS) is None


async def test_a_pause_stops_all_writes_and_shows(world: World) -> None:
    await running(world)
    await world.patch({"metadata": {"annotations": {"kvscaler.io/paused": "true"}}})
    await world.until_condition("ScalingActive", "False", "Paused")
    assert (await world.condition("Ready"))["reason"] == "Paused"
    assert world.operator is not None and world.operator.kube is not None
    await world.eventually(world.settled)
    writes = world.operator.kube.write_count
    (sidecar,) = world.sidecars.values()
    puts = len(sidecar.limits_puts)
    await world.patch({"spec": {"maxUnavailable": 0}}, resource=DISRUPTION_BUDGETS)
    await world.patch({"spec": {"scaling": {"minReplicas": 3}}})
    await asyncio.sleep(1.5)
    assert world.operator.kube.write_count == writes
    assert len(sidecar.limits_puts) == puts
    await world.patch({"metadata": {"annotations": {"kvscaler.io/paused": None}}})
    await world.until_condition("ScalingActive", "True", "Deciding")

    async def resumed() -> bool:
        budget = await world.find(DISRUPTION_BUDGETS)
        replicas = (await world.deployment())["spec"]["replicas"]
        return budget is not None and budget["spec"]["maxUnavailable"] == 1 and replicas == 3

    await world.eventually(resumed)


async def test_an_idle_service_costs_no_writes(world: World) -> None:
    await running(world)
    assert world.operator is not None and world.operator.kube is not None
    await world.eventually(world.settled)
    writes = world.operator.kube.write_count
    version = (await world.service())["metadata"]["resourceVersion"]
    await asyncio.sleep(4)
    assert world.operator.kube.write_count == writes
    assert (await world.service())["metadata"]["resourceVersion"] == version


async def test_a_restarted_operator_writes_nothing_to_a_settled_service(world: World) -> None:
    await running(world)
    await world.eventually(world.settled)
    await world.stop_operator()
    lease = await world.find(LEASES, world.settings.lease_name)
    assert lease is not None and lease["spec"]["holderIdentity"] == ""
    operator = await world.start_operator(sidecar_image="docker.io/local/kvscaler-sidecar:two")
    await world.eventually(world.settled)
    assert operator.kube is not None
    # The start of a new process is visible nowhere but in figures of traffic, at most once.
    assert operator.kube.write_count <= 1
    (container,) = (await world.deployment())["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "docker.io/local/kvscaler-sidecar:one"


async def test_an_image_taken_out_of_the_spec_gives_way_to_the_pinned_one(world: World) -> None:
    pinned, wrong = "docker.io/local/kvscaler-sidecar:one", "docker.io/local/kvscaler-sidecar:wrong"
    await running(world)

    async def runs(image: str) -> bool:
        (container,) = (await world.deployment())["spec"]["template"]["spec"]["containers"]
        status = (await world.service())["status"]
        return container["image"] == image and status["sidecarImage"] == pinned

    for asked, running_image in ((wrong, wrong), (None, pinned)):
        await world.patch({"spec": {"engine": {"image": asked}}})
        await world.eventually(lambda image=running_image: runs(image))


async def test_a_deleted_service_is_forgotten(world: World) -> None:
    created = await running(world)
    assert 'kvscaler_service_desired_replicas{name="chat"' in await world.metrics()
    await world.kube.delete(INFERENCE_SERVICES, world.namespace, "chat", uid_of(created))

    async def forgotten() -> bool:
        metrics = await world.metrics()
        return 'kvscaler_service_desired_replicas{name="chat"' not in metrics

    await world.eventually(forgotten)
    # Children go by their owner references: nothing of ours makes them again.
    deployment = await world.find(DEPLOYMENTS)
    assert deployment is not None
    await world.kube.delete(DEPLOYMENTS, world.namespace, "chat", uid_of(deployment))
    await asyncio.sleep(1)
    assert await world.find(DEPLOYMENTS) is None


async def test_a_service_that_goes_before_its_status_is_written_is_no_error(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    operator = await world.start_operator()
    assert operator.kube is not None
    apply, gone = operator.kube.apply, 0

    async def deleted_first(resource: Resource, document: Object, **options: Any) -> Object:
        nonlocal gone
        if options.get("subresource") == "status" and not gone:
            gone += 1
            raise NotFoundError(404, "NotFound", "no such service", "PATCH status")
        return await apply(resource, document, **options)

    operator.kube.apply = deleted_first  # type: ignore[method-assign]
    await world.create(service_object(world.namespace))

    async def written() -> bool:
        return "conditions" in ((await world.service()).get("status") or {})

    await world.eventually(written)
    assert gone == 1
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_a_pod_that_only_wears_our_labels_is_not_ours(world: World) -> None:
    created = await running(world)
    (pod,) = await world.pods()
    world_before = (await world.service())["status"]["replicas"]
    impostor = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "impostor",
            "namespace": namespace_of(pod),
            "labels": dict(pod["metadata"]["labels"]),
        },
        "spec": {"containers": [{"name": "engine", "image": "x"}]},
    }
    from kvscaler_operator.resources import PODS

    await world.kube.create(PODS, impostor)
    status = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
    await world.kube.merge(PODS, world.namespace, "impostor", {"status": status}, "status")
    await world.set_pod_ready("impostor", True)
    await asyncio.sleep(1)
    service = await world.service()
    assert service["status"]["replicas"] == world_before == 1
    assert uid_of(service) == uid_of(created)
    assert name_of(pod) in world.sidecars
