"""Scale-downs as Kubernetes' own controllers carry them out: only what is empty is deleted."""

import asyncio

import pytest
from kvscaler.protocol.drain import DrainPhase
from kvscaler_operator.resources import DISRUPTION_BUDGETS as BUDGETS
from kvscaler_operator.resources import PODS, name_of

from tests.controller.controlled import ControlledWorld, Gone

pytestmark = [pytest.mark.apiserver, pytest.mark.fault]


def broken(gone: list[Gone]) -> list[Gone]:
    """Pods that were deleted while they had a request and nobody had asked for their deletion."""
    return [pod for pod in gone if pod.live_requests]


async def with_streams(controlled: ControlledWorld, count: int) -> list[str]:
    """Ready replicas with a request each; their names."""
    names = await controlled.serving(count)
    for name in names:
        controlled.begin_stream(name)
    return names


async def with_one_that_warms(controlled: ControlledWorld, count: int) -> list[str]:
    """So many replicas with a request each, and one more that is seen not to be ready."""
    names = await with_streams(controlled, count)
    controlled.kubelet.new_pods_are_ready = False
    await controlled.scale(count + 1)
    await controlled.eventually(controlled.holds_one, what="one more Pod warms")
    return names


async def test_of_three_that_drain_each_goes_when_it_is_empty(controlled: ControlledWorld) -> None:
    names = await with_streams(controlled, 5)
    await controlled.scale(2)
    victims = await controlled.until_draining(3)
    # The last that was chosen is the first that is empty: at one cost, age would decide.
    for left, victim in zip((4, 3, 2), reversed(victims), strict=True):
        await asyncio.sleep(0.5)
        assert await controlled.deployment_replicas() == left + 1
        controlled.end_stream(victim)

        async def gone(name: str = victim) -> bool:
            return name in {pod.name for pod in controlled.kubelet.gone}

        await controlled.eventually(gone, 20, f"{victim} is gone")
    assert [pod.name for pod in controlled.kubelet.gone] == list(reversed(victims))
    assert broken(controlled.kubelet.gone) == []
    assert set(await controlled.until_ready(2)) == set(names) - set(victims)


async def test_a_pod_deleted_by_hand_in_mid_drain_is_not_replaced_for_long(
    controlled: ControlledWorld,
) -> None:
    names = await with_streams(controlled, 3)
    await controlled.scale(2)
    (victim,) = await controlled.until_draining(1)
    await controlled.kube.delete(
        PODS, controlled.namespace, victim, controlled.sidecars[victim].state.pod_uid
    )
    left = await controlled.until_ready(2)
    assert set(left) == set(names) - {victim}
    assert await controlled.deployment_replicas() == 2
    assert [pod.name for pod in broken(controlled.kubelet.gone)] == [victim]
    assert await controlled.until_draining(0) == []


async def test_another_pod_deleted_in_mid_drain_lets_the_victim_serve_again(
    controlled: ControlledWorld,
) -> None:
    """Its replacement warms and would be deleted first, whatever the costs are."""
    names = await with_streams(controlled, 3)
    await controlled.scale(2)
    (victim,) = await controlled.until_draining(1)
    other = next(name for name in names if name != victim)
    controlled.kubelet.new_pods_are_ready = False
    uid = controlled.sidecars[other].state.pod_uid
    await controlled.kube.delete(PODS, controlled.namespace, other, uid)
    assert await controlled.until_draining(0) == []
    left = await controlled.until_ready(2)
    assert set(left) == set(names) - {other}
    assert controlled.sidecars[victim].drain.phase is DrainPhase.SERVING
    assert [pod.name for pod in broken(controlled.kubelet.gone)] == [other]


async def test_with_one_that_warms_the_warming_one_goes_and_no_drain_begins(
    controlled: ControlledWorld,
) -> None:
    names = await with_one_that_warms(controlled, 2)
    await controlled.scale(2)
    assert await controlled.until_ready(2) == names
    assert all(controlled.sidecars[name].drain_puts == [] for name in names)


async def test_one_that_warms_and_one_that_drains_both_go_each_in_its_time(
    controlled: ControlledWorld,
) -> None:
    names = await with_one_that_warms(controlled, 2)
    await controlled.scale(1)
    (victim,) = await controlled.until_draining(1)

    async def lowered() -> bool:
        return await controlled.deployment_replicas() == 2 and len(await controlled.pods()) == 2

    await controlled.eventually(lowered, what="the one that warms is gone")
    assert victim in controlled.sidecars
    await asyncio.sleep(1)
    assert victim in controlled.sidecars
    controlled.end_stream(victim)
    (left,) = await controlled.until_ready(1)
    assert {left, victim} == set(names)
    assert broken(controlled.kubelet.gone) == []


async def test_demand_that_comes_back_in_mid_drain_has_the_victim_serve(
    controlled: ControlledWorld,
) -> None:
    names = await with_streams(controlled, 3)
    await controlled.scale(1)
    victims = await controlled.until_draining(2)
    await controlled.scale(2)
    (still,) = await controlled.until_draining(1)
    assert still in victims
    await controlled.scale(4)
    assert await controlled.until_draining(0) == []
    assert set(names) < set(await controlled.until_ready(4))
    assert controlled.kubelet.gone == []


async def test_evictions_go_one_at_a_time_and_wait_for_a_drain(
    controlled: ControlledWorld,
) -> None:
    names = await with_streams(controlled, 3)
    await controlled.scale(2)
    (victim,) = await controlled.until_draining(1)

    async def none_allowed() -> bool:
        budget = await controlled.kube.get(BUDGETS, controlled.namespace, "chat")
        return int(budget["status"]["disruptionsAllowed"]) == 0

    await controlled.eventually(none_allowed, what="the one that drains is the one disruption")
    other = next(name for name in names if name != victim)
    assert await controlled.evict(other) == 429
    # One that is not ready may go at any time; its SIGTERM takes the drain over.
    controlled.end_stream(victim)
    assert set(await controlled.until_ready(2)) == set(names) - {victim}

    async def allowed() -> bool:
        return await controlled.evict(other) == 201

    await controlled.eventually(allowed)
    assert len(await controlled.until_ready(2)) == 2


async def test_a_lowered_maximum_and_a_new_template_at_once_drain_nothing_before_the_rollout(
    controlled: ControlledWorld,
) -> None:
    names = await controlled.serving(3, "Managed", minReplicas=3, maxReplicas=3)
    edit = {
        "scaling": {"minReplicas": 1, "maxReplicas": 1},
        "template": {"metadata": {"annotations": {"example.com/version": "2"}}},
    }
    controlled.kubelet.new_pods_are_ready = False
    await controlled.patch({"spec": edit})

    async def rolling() -> bool:
        return bool({name_of(p) for p in await controlled.pods()} - set(names))

    await controlled.eventually(rolling)
    await asyncio.sleep(1)
    told = {name: sidecar.drain_puts for name, sidecar in controlled.sidecars.items()}
    assert set(map(tuple, told.values())) == {()}, told
    controlled.kubelet.release()
    victims = await controlled.until_draining(2)
    assert not set(victims) & set(names)

    async def replaced() -> bool:
        return len(controlled.kubelet.gone) >= 3

    await controlled.eventually(replaced, what="the old replicas are gone")
    assert [pod.cost for pod in controlled.kubelet.gone] == [""] * 3
    for name in victims:
        controlled.end_stream(name)
    assert len(await controlled.until_ready(1)) == 1
