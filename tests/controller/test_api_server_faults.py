"""Whatever the API server does, the operator recovers by itself or ends; it is never silently deaf."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kvscaler_operator import handlers
from kvscaler_operator.gateways.kube import KubeGateway, UnavailableError, connect
from kvscaler_operator.lease import LeaseLostError
from kvscaler_operator.resources import CONFIG_MAPS, INFERENCE_SERVICES, PODS, name_of

from tests.controller.faulty_server import (
    CONTEXT,
    FaultyServer,
    error_event,
    gone,
    is_watch,
    is_write,
    plural_of,
    refusal,
)
from tests.controller.world import World, service_object

pytestmark = pytest.mark.apiserver
GHOSTS = 100


@pytest.fixture
async def faulty(server: Any) -> AsyncIterator[FaultyServer]:
    """A proxy before the API server."""
    made = FaultyServer()
    await made.start(server.kubeconfig, server.context)
    yield made
    await made.stop()


@pytest.fixture
async def start(
    world: World, faulty: FaultyServer, tmp_path: Path
) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Starts the World's operator behind the proxy."""
    path = str(faulty.kubeconfig(tmp_path))

    async def begin(**settings: Any) -> None:
        await world.start_operator(kubeconfig=path, context=CONTEXT, **settings)

    yield begin
    faulty.flow()
    faulty.faults.clear()


Start = Callable[..., Awaitable[None]]


async def ready_service(world: World) -> None:
    """One service with one ready Pod, whose replicas a person sets."""
    advisory = {"mode": "Advisory", "maxReplicas": 5}
    await world.create(service_object(world.namespace, scaling=advisory))
    await world.sync_pods()
    await world.until_condition("Ready", "True", "ReplicasReady")


async def until_ended(world: World, seconds: float = 30.0) -> BaseException:
    """Wait until the operator has ended by itself, and say of what."""
    task = world.task
    assert task is not None
    await asyncio.wait({task}, timeout=seconds)
    assert task.done(), f"the operator is still there after {seconds} s"
    error = task.exception()
    assert error is not None
    world.task = None
    return error


async def reconciles(world: World, limit: str) -> bool:
    """Change the spec and see whether it reaches the Deployment: nothing is deaf or dumb."""
    engine = {"name": "engine", "resources": {"limits": {"memory": limit}}}
    await world.patch({"spec": {"template": {"spec": {"containers": [engine]}}}})

    async def applied() -> bool:
        (container,) = (await world.deployment())["spec"]["template"]["spec"]["containers"]
        return bool(container["resources"]["limits"]["memory"] == limit)

    await world.eventually(applied, 30.0)
    return True


@pytest.mark.parametrize("status", [500, 429])
async def test_a_list_that_fails_once_is_tried_again(
    world: World, faulty: FaultyServer, start: Start, status: int
) -> None:
    failed: list[str] = []

    async def once(request: web.Request) -> web.Response | None:
        if plural_of(request) == "deployments" and not is_watch(request) and len(failed) < 2:
            failed.append(request.path)
            return refusal(status, "Broken", "not now", {"Retry-After": "1"})
        return None

    faulty.faults.append(once)
    await start()
    assert len(failed) == 2
    await ready_service(world)


async def test_a_watch_that_ends_with_410_starts_over(
    world: World, faulty: FaultyServer, start: Start
) -> None:
    await start()
    await ready_service(world)
    assert await faulty.send("inferenceservices", error_event(410, "Expired", "too old")) == 1
    assert await reconciles(world, "3Gi")


async def test_any_other_error_within_a_watch_ends_the_operator_in_words(
    world: World, faulty: FaultyServer, start: Start
) -> None:
    await start()
    await ready_service(world)
    await faulty.send("pods", error_event(500, "InternalError", "etcdserver: leader changed"))
    error = await until_ended(world)
    assert "watches" in str(error)
    assert "leader changed" in str(error.__cause__)
    await start()
    assert await reconciles(world, "3Gi")


async def test_a_hundred_objects_deleted_in_a_watch_gap_are_no_ghosts(
    world: World, faulty: FaultyServer, start: Start
) -> None:
    await start(relist_seconds=1.0)
    await ready_service(world)
    await world.make_surplus(GHOSTS)

    async def counted() -> bool:
        return bool((await world.service())["status"]["replicas"] == GHOSTS + 1)

    await world.eventually(counted, 60.0)

    async def gap(request: web.Request) -> web.Response | None:
        return refusal(503, "Unavailable", "away") if plural_of(request) == "pods" else None

    faulty.faults.append(gap)
    faulty.cut("pods")
    ghosts = [pod for pod in await world.pods() if name_of(pod) not in world.sidecars]
    assert len(ghosts) == GHOSTS
    await asyncio.gather(*(world.remove_pod(pod) for pod in ghosts))
    told: list[str] = []

    async def expired(request: web.Request) -> web.StreamResponse | None:
        if plural_of(request) == "pods" and is_watch(request) and not told:
            told.append(request.path)
            return await gone(request)
        return None

    faulty.faults[:] = [expired]

    async def no_ghosts() -> bool:
        status = (await world.service())["status"]
        return bool(told) and status["replicas"] == 1

    await world.eventually(no_ghosts, 60.0)
    assert world.operator is not None
    assert len(world.operator.caches[PODS]) == 1
    assert await world.probe("healthz") == 200


async def test_a_right_revoked_at_run_time_ends_the_operator_and_names_it(
    world: World, faulty: FaultyServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = handlers.watch_settings

    def impatient(settings: Any) -> None:
        patient(settings)
        settings.networking.error_backoffs = [0.1, 0.1]

    monkeypatch.setattr(handlers, "watch_settings", impatient)
    await start()
    await ready_service(world)

    async def revoked(request: web.Request) -> web.Response | None:
        words = 'replicasets.apps is forbidden: User "operator" cannot list resource "replicasets"'
        forbidden = plural_of(request) == "replicasets"
        return refusal(403, "Forbidden", words) if forbidden else None

    faulty.faults.append(revoked)
    faulty.cut("replicasets")
    error = await until_ended(world)
    assert "replicasets" in str(error.__cause__)
    # While the right is missing nothing starts, and the words say which it is.
    with pytest.raises(RuntimeError) as refused:
        await start()
    assert "replicasets" in str(refused.value.__cause__)
    world.task = None
    faulty.faults.clear()
    await start()
    assert await reconciles(world, "3Gi")


async def test_a_conflict_on_every_second_write_is_only_slower(
    world: World, faulty: FaultyServer, start: Start
) -> None:
    writes = 0

    async def conflict(request: web.Request) -> web.Response | None:
        nonlocal writes
        if request.method == "GET":
            return None
        writes += 1
        words = "Operation cannot be fulfilled: the object has been modified"
        return refusal(409, "Conflict", words) if writes % 2 else None

    faulty.faults.append(conflict)
    await start()
    await ready_service(world)
    assert await reconciles(world, "3Gi")
    await world.until_condition("LimitsApplied", "True", "Applied")
    transitions: list[str] = []

    async def settled() -> bool:
        transitions.append((await world.condition("Ready"))["reason"])
        return len(transitions) > 20

    await world.eventually(settled)
    assert set(transitions) == {"ReplicasReady"}


async def test_one_conflict_is_no_news_to_whoever_reads_status(
    world: World, faulty: FaultyServer, start: Start
) -> None:
    await start()
    await ready_service(world)
    failed: list[str] = []

    async def once(request: web.Request) -> web.Response | None:
        if is_write(request) and "/deployments/" in request.path and len(failed) < 2:
            failed.append(request.path)
            return refusal(409, "Conflict", "the object has been modified")
        return None

    faulty.faults.append(once)
    before = (await world.condition("Ready"))["lastTransitionTime"]
    seen: set[str] = set()

    async def watched() -> bool:
        seen.add((await world.condition("Ready"))["reason"])
        return len(failed) == 2

    await world.patch({"spec": {"replicas": 2}})
    await world.eventually(watched)
    assert seen <= {"ReplicasReady"}
    assert (await world.condition("Ready"))["lastTransitionTime"] == before


async def test_a_server_that_asks_for_patience_gets_it(
    world: World, faulty: FaultyServer, start: Start, tmp_path: Path
) -> None:
    patience = {"Retry-After": "2"}

    async def busy(request: web.Request) -> web.Response | None:
        return refusal(429, "TooManyRequests", "later", patience) if is_write(request) else None

    await start()
    await ready_service(world)
    api = await connect(str(faulty.kubeconfig(tmp_path)), CONTEXT)
    kube = KubeGateway(api)
    name = {"metadata": {"name": "patient", "namespace": world.namespace}}
    document = {"apiVersion": "v1", "kind": "ConfigMap", **name, "data": {"a": "b"}}
    faulty.faults.append(busy)
    faulty.seen.clear()
    for _ in range(10):
        with pytest.raises(UnavailableError) as refused:
            await kube.apply(CONFIG_MAPS, document)
        assert refused.value.retry_after_seconds is not None
    path = CONFIG_MAPS.path(world.namespace, "patient")
    assert faulty.seen.count(("PATCH", path)) == 1, "it asked again before it was told to"
    faulty.faults.clear()

    async def written() -> bool:
        with contextlib.suppress(UnavailableError):
            return bool(await kube.apply(CONFIG_MAPS, document))
        return False

    await world.eventually(written)
    assert faulty.seen.count(("PATCH", path)) == 2
    await kube.close()


async def test_an_operator_goes_on_after_it_was_told_to_wait(
    world: World, faulty: FaultyServer, start: Start
) -> None:
    refused: list[str] = []

    async def busy(request: web.Request) -> web.Response | None:
        if not is_write(request) or len(refused) >= 3:
            return None
        refused.append(request.path)
        return refusal(429, "TooManyRequests", "later", {"Retry-After": "1"})

    await start()
    await ready_service(world)
    faulty.faults.append(busy)
    assert await reconciles(world, "3Gi")
    assert len(refused) == 3
    assert await world.probe("healthz") == 200


async def test_a_connection_that_swallows_everything_ends_the_operator(
    world: World, faulty: FaultyServer, start: Start
) -> None:
    await start(lease_duration_seconds=9.0)
    await ready_service(world)
    faulty.swallow()
    error = await until_ended(world, 40.0)
    assert isinstance(error, LeaseLostError)
    assert re.search(r"not renewed within 6 s", str(error))
    faulty.flow()
    await start(lease_duration_seconds=9.0)
    assert await reconciles(world, "3Gi")
    assert (await world.service())["spec"]["replicas"] == 1
    assert (await world.find(INFERENCE_SERVICES)) is not None
