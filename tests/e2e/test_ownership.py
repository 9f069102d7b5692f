"""The operator keeps its children as they should be, and touches nothing else."""

import json

import pytest
from localcluster.handle import ClusterHandle

from hack.demo.kube import Kube
from tests.e2e.live import Live, eventually, nowhere, stays

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]
LONGEST = "c" * 50
KINDS = {"deployments", "pods", "services", "configmaps", "poddisruptionbudgets", "replicasets"}


async def test_the_longest_name_gets_all_children_and_deleting_it_takes_all_away(
    kube: Kube, cluster: ClusterHandle, namespace: str
) -> None:
    longest = Live(kube, cluster, namespace, LONGEST)
    await longest.apply(nowhere(namespace, LONGEST))
    words = await longest.until("Ready", "False", "ReplicasUnschedulable")
    assert "node" in words["message"]
    children = await longest.children()
    assert {name.partition("/")[0] for name in children} == KINDS

    too_long = nowhere(namespace, LONGEST + "c")
    refused = await longest.refused("apply", "--filename=-", text=json.dumps(too_long))
    assert "50" in refused
    assert "Invalid value" in refused

    await longest.kubectl("delete", "kvis", LONGEST)

    async def all_gone() -> bool:
        return await longest.children() == {}

    await eventually(all_gone, "all children are gone")


async def test_a_name_that_is_taken_is_never_adopted(
    kube: Kube, cluster: ClusterHandle, namespace: str
) -> None:
    taken = Live(kube, cluster, namespace, "taken")
    await taken.kubectl("create", "service", "clusterip", "taken", "--tcp=80:80")
    before = await taken.find("core/v1/services/taken")
    await taken.apply(nowhere(namespace, "taken"))
    words = await taken.until("Ready", "False", "NameTaken")
    assert "Service taken" in words["message"]
    assert await taken.children() == {}
    after = await taken.find("core/v1/services/taken")
    assert before is not None
    assert after is not None
    assert after["metadata"] == before["metadata"]
    assert after["spec"] == before["spec"]

    await taken.kubectl("delete", "service", "taken")
    # What is not ours is not watched; an event of the service's own need not wait for the relist.
    await taken.kubectl("annotate", "kvis", "taken", "example.com/look=again")
    await taken.until("Ready", "False", "ReplicasUnschedulable")


async def test_a_paused_service_is_left_alone_until_it_is_resumed(
    kube: Kube, cluster: ClusterHandle, namespace: str
) -> None:
    paused = Live(kube, cluster, namespace, "paused")
    await paused.apply(nowhere(namespace, "paused"))
    await paused.until("Ready", "False", "ReplicasUnschedulable")
    await paused.kubectl("annotate", "kvis", "paused", "kvscaler.io/paused=true")
    await paused.until("ScalingActive", "False", "Paused")
    await paused.kubectl("delete", "poddisruptionbudget", "paused")

    async def budget() -> bool:
        return await paused.find("policy/v1/poddisruptionbudgets/paused") is not None

    async def none() -> bool:
        return not await budget()

    await stays(none, "a paused service gets no child", 3.0)
    await paused.kubectl("annotate", "kvis", "paused", "kvscaler.io/paused-")
    await eventually(budget, "the budget is back")


async def test_a_deployment_edited_or_deleted_by_hand_is_restored(chat: Live) -> None:
    before = await chat.deployment()
    assert before is not None
    image = before["spec"]["template"]["spec"]["containers"][0]["image"]
    grace = before["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    edit = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}}
    await chat.patch(edit, "deployment")

    async def restored() -> bool:
        found = await chat.deployment()
        assert found is not None
        spec = found["spec"]["template"]["spec"]
        taken_back: bool = (
            found["metadata"]["generation"] > before["metadata"]["generation"] + 1
            and spec["terminationGracePeriodSeconds"] == grace
            and spec["containers"][0]["image"] == image
        )
        return taken_back

    await eventually(restored, "the edit is taken back")

    await chat.kubectl("delete", "deployment", "chat", "--wait=false")

    async def made_again() -> bool:
        found = await chat.deployment()
        return found is not None and found["metadata"]["uid"] != before["metadata"]["uid"]

    await eventually(made_again, "the Deployment is made again")
    (pod,) = await chat.until_ready(1)
    assert pod.restarts == 0
