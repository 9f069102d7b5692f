"""Limits reach the replicas, and change without a restart."""

from functools import partial
from typing import Any

import pytest

from tests.e2e.live import Live, eventually

pytestmark = pytest.mark.cluster


async def identity(chat: Live) -> tuple[Any, ...]:
    """What a restart or a rollout would change."""
    (pod,) = (await chat.sample()).pods
    deployment = await chat.deployment()
    assert deployment is not None
    return pod.uid, pod.restarts, deployment["metadata"]["generation"]


async def agreed(chat: Live, queue_requests: int) -> str | None:
    """The hash that status and the replica both have, once it stands for such a queue."""
    sample = await chat.sample()
    (pod,) = sample.pods
    assert sample.service is not None
    if pod.state is None or "limits" not in sample.service.get("status", {}):
        return None
    told, enforced = sample.service["status"]["limits"], pod.state["limits"]
    right = (
        told["hash"] == enforced["hash"]
        and told["queueRequests"] == queue_requests
        and enforced["applied"]["queue_requests"] == queue_requests
    )
    return str(told["hash"]) if right else None


async def test_a_change_of_admission_is_put_to_the_running_replica(chat: Live) -> None:
    wanted = (await chat.service())["spec"]["admission"]["queue"]["maxRequests"]
    before = await identity(chat)
    hashes = []
    for queue_requests in (wanted + 1, wanted):
        await chat.patch({"spec": {"admission": {"queue": {"maxRequests": queue_requests}}}})
        agree = partial(agreed, chat, queue_requests)
        words = f"status and replica agree on a queue of {queue_requests}"
        hashes.append(await eventually(agree, words))
        await chat.until("LimitsApplied", "True", "Applied")
    (pod,) = await chat.pods()
    assert pod.state is not None
    # A hash that the replica could not have come to by itself, and then its own again.
    assert hashes[0] != pod.state["limits"]["own_hash"] == hashes[1]
    assert pod.state["limits"]["requested_hash"] == hashes[1]
    assert await identity(chat) == before
