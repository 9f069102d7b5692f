"""What can't be done is said in words, early, and costs what runs nothing."""

import copy

import pytest
from localcluster.handle import ClusterHandle

from hack.demo.kube import Kube
from tests.e2e.live import Live, Object, eventually, example

pytestmark = pytest.mark.cluster


def with_memory(service: Object, memory: str) -> Object:
    """The service with another memory limit, which on CPUs is the device's memory."""
    resources = service["spec"]["template"]["spec"]["containers"][0]["resources"]
    resources["requests"]["memory"] = resources["limits"]["memory"] = memory
    return service


async def test_a_budget_that_does_not_fit_says_by_how_much_and_makes_no_pod(
    kube: Kube, cluster: ClusterHandle, namespace: str
) -> None:
    tight = Live(kube, cluster, namespace, "tight")
    await tight.apply(with_memory(example(namespace, "tight"), "600Mi"))
    words = (await tight.until("BudgetFits", "False", "DoesNotFit"))["message"]
    assert "GiB" in words, words
    assert "memory" in words, words
    assert (await tight.until("Ready", "False", "BudgetDoesNotFit"))["message"] == words
    assert await tight.children() == {}
    await tight.apply(with_memory(example(namespace, "tight"), "1328Mi"))
    await tight.until("BudgetFits", "True", "Fits")
    await tight.kubectl("delete", "kvis", "tight")


async def test_an_unknown_model_gets_one_pod_that_says_why_it_ends(
    kube: Kube, cluster: ClusterHandle, namespace: str
) -> None:
    unknown = Live(kube, cluster, namespace, "unknown")
    await unknown.apply(example(namespace, "unknown", model={"uri": "builtin://no-such-model"}))
    awaiting = await unknown.until("BudgetFits", "Unknown", "AwaitingModelFacts")
    assert "no-such-model" in awaiting["message"]
    crashing = await unknown.until("Ready", "False", "ReplicasCrashing", seconds=180)
    assert "no-such-model" in crashing["message"], crashing
    assert len((await unknown.sample()).pods) == 1
    await unknown.kubectl("delete", "kvis", "unknown")


async def test_a_pod_with_less_memory_than_its_budget_ends_before_it_loads_weights(
    chat: Live,
) -> None:
    """As when a policy of the cluster rewrites the limit that the budget was made for."""
    deployment = await chat.deployment()
    assert deployment is not None
    spec = copy.deepcopy(deployment["spec"]["template"]["spec"])
    spec["restartPolicy"] = "Never"
    resources = spec["containers"][0]["resources"]
    resources["requests"]["memory"] = resources["limits"]["memory"] = "800Mi"
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "squeezed"}, "spec": spec}
    await chat.apply(pod)

    async def ended() -> Object | None:
        found = await chat.find("core/v1/pods/squeezed")
        assert found is not None
        (container,) = found["status"].get("containerStatuses") or [{"state": {}}]
        terminated: Object | None = container["state"].get("terminated")
        return terminated

    last = await eventually(ended, "the Pod has ended")
    assert (last["exitCode"], last["reason"]) == (78, "Error")
    assert "the memory limit of this container is 800.0 MiB" in last["message"]
    assert "listening" not in await chat.kubectl("logs", "squeezed")
    await chat.kubectl("delete", "pod", "squeezed", "--wait=false")


async def test_a_field_that_is_not_implemented_changes_nothing_that_runs(
    chat: Live, kube: Kube, cluster: ClusterHandle, namespace: str
) -> None:
    async def running() -> tuple[object, ...]:
        (pod,) = (await chat.sample()).pods
        assert pod.state is not None
        children = await chat.children()
        versions = {
            name: child["metadata"]["resourceVersion"]
            for name, child in children.items()
            if not name.startswith(("pods", "replicasets"))
        }
        return pod.uid, pod.restarts, pod.ready, pod.state["limits"]["hash"], versions

    before = await running()
    await chat.patch({"spec": {"routing": {"mode": "Router"}}})
    invalid = await chat.until("SpecValid", "False", "NotImplemented")
    assert "spec.routing.mode" in invalid["message"]
    assert await running() == before

    asks = example(namespace, "asks", routing={"mode": "Router"})
    live = Live(kube, cluster, namespace, "asks")
    await live.apply(asks)
    assert "spec.routing.mode" in (await live.until("SpecValid", "False"))["message"]
    assert await live.children() == {}

    await chat.patch({"spec": {"routing": None}})
    await chat.until("SpecValid", "True", "Valid")
    await chat.until("Ready", "True", "ReplicasReady")
    assert await running() == before
