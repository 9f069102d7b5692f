"""Without Prometheus and through a restart of the operator: nothing shrinks, nothing is written."""

import asyncio

import pytest

from hack.demo.kube import Kube
from hack.demo.writes import operator_writes, since
from tests.chart.release import Release, errors
from tests.e2e.live import Live, eventually, stays

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]
IDLE_SECONDS = 20.0
OURS = ("deployments", "services", "configmaps", "poddisruptionbudgets")


async def test_without_prometheus_the_direct_path_carries_on_and_says_so(chat: Live) -> None:
    fresh = await chat.until("SignalsFresh", "True", "PrometheusUnreachable")
    assert "replicas are asked directly" in fresh["message"]
    await chat.until("ScalingActive", "True", "Advising")
    status = await chat.status()
    assert status["occupancy"]["capacityBlocks"] > 0


async def versions(live: Live) -> dict[str, str]:
    """Versions of what only the operator writes, and of the service itself."""
    found = {
        name: child["metadata"]["resourceVersion"]
        for name, child in (await live.children()).items()
        if name.startswith(OURS)
    }
    return found | {"service": (await live.service())["metadata"]["resourceVersion"]}


async def test_a_restarted_operator_shrinks_and_rewrites_nothing_and_is_quiet_when_idle(
    chat: Live, kube: Kube, release: Release
) -> None:
    await chat.until("LimitsApplied", "True", "Applied")
    (serving,) = await chat.pods()
    before = {name: v for name, v in (await versions(chat)).items() if name != "service"}
    old = release.operator_pod()["metadata"]["name"]
    await asyncio.to_thread(release.kubectl, "delete", "pod", old, "--wait=true")
    await asyncio.to_thread(
        release.kubectl, "rollout", "status", "deployment", "--timeout=90s",
        "-l", "app.kubernetes.io/component=operator",
    )  # fmt: skip
    pod = release.operator_pod()["metadata"]["name"]
    assert pod != old

    # It has seen the service, and has said what there is to say after a start.
    settled: dict[str, float] = {}

    async def still() -> bool:
        nonlocal settled
        last, settled = settled, await operator_writes(kube, release.namespace, pod)
        return bool(settled) and settled == last

    await eventually(still, "the new operator has read its first page")
    begun = await versions(chat)
    assert {name: v for name, v in begun.items() if name != "service"} == before

    async def quiet() -> bool:
        written.update(since(settled, await operator_writes(kube, release.namespace, pod)))
        return not written

    written: dict[str, float] = {}
    await stays(quiet, lambda: f"an idle operator wrote {written}", IDLE_SECONDS)
    assert await versions(chat) == begun
    (still_serving,) = await chat.pods()
    assert (still_serving.uid, still_serving.restarts) == (serving.uid, 0)
    assert errors(release.log()) == []
