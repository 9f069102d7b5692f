"""A real HorizontalPodAutoscaler, with a metrics API of our own: on our object, and on the wrong one."""

from pathlib import Path

import pytest
import yaml
from kvscaler_operator.autoscalers import AUTOSCALERS
from kvscaler_operator.resources import Object

from tests.controller.controlled import ControlledWorld, by_operator, of
from tests.controller.external_metrics import ExternalMetrics

pytestmark = [pytest.mark.chaos, pytest.mark.apiserver, pytest.mark.timeout(240)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "external-hpa.yaml"
METRIC = "kvscaler_service_desired_replicas"
SYNC_SECONDS = 15.0
"""How often the autoscaler's controller looks."""


def autoscaler(world: ControlledWorld) -> Object:
    """The example's, for the service of the test, and without patience."""
    documents = yaml.safe_load_all(EXAMPLE.read_text())
    found: Object = next(d for d in documents if d["kind"] == AUTOSCALERS.kind)
    found["metadata"] = {"name": "chat", "namespace": world.namespace}
    found["spec"]["scaleTargetRef"]["name"] = "chat"
    found["spec"]["behavior"] = {"scaleDown": {"stabilizationWindowSeconds": 0}}
    return found


async def scale_of(world: ControlledWorld) -> tuple[int, int]:
    return int((await world.service())["spec"]["replicas"]), await world.deployment_replicas()


async def test_on_our_object_in_external_mode_it_works_and_is_never_fought(
    controlled: ControlledWorld, tmp_path: Path
) -> None:
    wanted = 4.0
    async with ExternalMetrics(controlled.server, controlled.namespace, tmp_path) as metrics:
        metrics.values[METRIC] = lambda: wanted
        names = await controlled.serving(1)
        for name in names:
            controlled.begin_stream(name)
        mark = len(controlled.writes())
        await controlled.kube.create(AUTOSCALERS, autoscaler(controlled))
        # Kinds that are new to the autoscaler's controller may take it half a minute to find.
        await controlled.eventually(
            lambda: _is(controlled, (4, 4)), 90, "the autoscaler's number is followed"
        )
        await controlled.until_ready(4)
        wanted = 2.0
        victims = await controlled.until_draining(2)
        assert await scale_of(controlled) == (2, 4)
        assert not set(victims) & set(names), "the one with a request is the last to go"
        for victim in victims:
            controlled.end_stream(victim)
        assert set(names) <= set(await controlled.until_ready(2))
        asked = metrics.asked
        await controlled.eventually(lambda: _more(metrics, asked + 1), 40, "two more looks")
        assert await scale_of(controlled) == (2, 2)
    owned = await controlled.condition("ReplicasOwned")
    assert (owned["status"], owned["reason"]) == ("True", "NotOurs")
    scales = [w for w in controlled.writes()[mark:] if of(w) == "inferenceservices/scale"]
    assert len(scales) >= 2
    assert [w for w in scales if by_operator(w)] == []
    assert [pod.live_requests for pod in controlled.kubelet.gone] == [0, 0]


async def test_on_our_deployment_it_is_named_and_not_fought(
    controlled: ControlledWorld, tmp_path: Path
) -> None:
    wanted = 3.0
    async with ExternalMetrics(controlled.server, controlled.namespace, tmp_path) as metrics:
        metrics.values[METRIC] = lambda: wanted
        await controlled.serving(1)
        wrong = autoscaler(controlled)
        wrong["spec"]["scaleTargetRef"] = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": "chat",
        }
        mark = len(controlled.writes())
        await controlled.kube.create(AUTOSCALERS, wrong)
        owned = await controlled.until_condition(
            "ReplicasOwned", "False", "ConflictingAutoscaler", seconds=90
        )
        assert "HorizontalPodAutoscaler chat scales Deployment chat" in owned["message"]
        assert await scale_of(controlled) == (1, 3)
        wanted = 2.0
        await controlled.eventually(lambda: _is(controlled, (1, 2)), 60)
        asked = metrics.asked
        await controlled.eventually(lambda: _more(metrics, asked + 1), 40, "two more looks")
        assert await scale_of(controlled) == (1, 2)
        scales = [w for w in controlled.writes()[mark:] if of(w).endswith("/scale")]
        assert len(scales) >= 2
        assert [w for w in scales if by_operator(w)] == []


async def _is(world: ControlledWorld, both: tuple[int, int]) -> bool:
    return await scale_of(world) == both


async def _more(metrics: ExternalMetrics, than: int) -> bool:
    return metrics.asked > than
