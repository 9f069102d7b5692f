"""How a service says what it can observe, on a real API server."""

from pathlib import Path

import pytest

from tests.controller.world import World, free_port, service_object

pytestmark = pytest.mark.apiserver


async def ready(world: World) -> None:
    await world.create(service_object(world.namespace))
    await world.sync_pods()
    await world.until_condition("Ready", "True", "ReplicasReady")


async def test_without_prometheus_the_direct_path_carries_on(world: World, tmp_path: Path) -> None:
    config = tmp_path / "prometheus.yaml"
    config.write_text(f"servers: {{default: {{url: 'http://127.0.0.1:{free_port()}'}}}}\n")
    await world.start_operator(prometheus_config=config)
    await ready(world)
    found = await world.until_condition("SignalsFresh", "True", "PrometheusUnreachable")
    assert "replicas are asked directly" in found["message"]
    assert (await world.condition("ScalingActive"))["status"] == "True"


async def test_a_server_that_nobody_configured_is_said(world: World, tmp_path: Path) -> None:
    config = tmp_path / "prometheus.yaml"
    config.write_text(f"servers: {{other: {{url: 'http://127.0.0.1:{free_port()}'}}}}\n")
    await world.start_operator(prometheus_config=config)
    await ready(world)
    found = await world.until_condition("SignalsFresh", "True", "PrometheusUnreachable")
    assert "no Prometheus server 'default'" in found["message"]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"service_uid": NaN}', "MetricsNotANumber"),
        (b"garbage", "MetricsMismatched"),
        (b" " * 10_000_000, "MetricsMismatched"),
    ],
)
async def test_a_sidecar_that_talks_nonsense_holds_the_decision(
    world: World, raw: bytes, reason: str
) -> None:
    await world.start_operator()
    await ready(world)
    await world.until_condition("SignalsFresh", "True", "Fresh")
    (sidecar,) = world.sidecars.values()
    sidecar.raw = raw
    await world.until_condition("SignalsFresh", "False", reason)
    await world.until_condition("ScalingActive", "False", "Holding")
    assert (await world.deployment())["spec"]["replicas"] == 1
    sidecar.raw = None
    await world.until_condition("SignalsFresh", "True", "Fresh")
    await world.until_condition("ScalingActive", "True", "Deciding")


async def test_a_silent_sidecar_grows_stale(world: World) -> None:
    await world.start_operator(signal_max_age_seconds=2.0)
    await ready(world)
    await world.until_condition("SignalsFresh", "True", "Fresh")
    (sidecar,) = world.sidecars.values()
    sidecar.hang = True
    await world.until_condition("SignalsFresh", "False", "MetricsStale", seconds=30)


async def test_a_replica_that_never_answers_is_missing(world: World) -> None:
    await world.start_operator()
    await world.create(service_object(world.namespace))
    await world.sync_pods(answering=False)
    await world.until_condition("SignalsFresh", "False", "MetricsMissing")


async def test_one_hanging_service_does_not_delay_another(world: World) -> None:
    await world.start_operator()
    await ready(world)
    for sidecar in world.sidecars.values():
        sidecar.hang = True
    await world.create(service_object(world.namespace, "other"))
    await world.sync_pods("other")
    await world.until_condition("Ready", "True", "ReplicasReady", "other", seconds=15)
    await world.until_condition("SignalsFresh", "True", "Fresh", "other", seconds=15)


async def test_probes_and_metrics_are_served(world: World) -> None:
    operator = await world.start_operator()
    await ready(world)
    assert await world.probe("healthz") == 200
    assert await world.probe("readyz") == 200
    metrics = await world.metrics()
    for name in (
        "controller_runtime_reconcile_total",
        "workqueue_depth",
        "rest_client_requests_total",
        "kvscaler_service_condition",
        "kvscaler_service_replica_kv_blocks",
    ):
        assert name in metrics
    operator.health.liveness["broken"] = lambda: "a part hangs"
    assert await world.probe("healthz") == 503
