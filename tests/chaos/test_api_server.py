"""An API server that is away, deaf or forbidding for minutes, before an operator that is a process.

All last long and cost nothing but waiting, so they run side by side, each with an operator, a proxy
and a namespace of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kvscaler_operator.resources import PODS, name_of

from tests.chaos.rows import Faults, Row
from tests.chaos.supervised import SupervisedOperator, with_changes
from tests.controller.faulty_server import (
    CONTEXT,
    FaultyServer,
    error_event,
    gone,
    is_watch,
    plural_of,
    refusal,
)
from tests.controller.world import World, free_port, make_namespace, service_object

pytestmark = [pytest.mark.chaos, pytest.mark.apiserver, pytest.mark.timeout(420)]
REPLICAS = 3
BUSY_SECONDS, SWALLOW_SECONDS, REVOKED_SECONDS = 60.0, 120.0, 90.0
LOST = 3
RECOVERY_SECONDS = 90.0
GHOSTS = 100


class Scene:
    """One operator with one service, and the proxy between it and the API server."""

    def __init__(self, world: World, faulty: FaultyServer, operator: SupervisedOperator) -> None:
        self.world, self.faulty, self.operator = world, faulty, operator
        self._limits = 2

    async def follows(self, seconds: float = RECOVERY_SECONDS) -> None:
        """Wait until a change of the spec has reached the Deployment: the operator sees and acts."""
        limit = await self.change()

        async def reached() -> bool:
            (container,) = (await self.world.deployment())["spec"]["template"]["spec"]["containers"]
            return bool(container["resources"]["limits"]["memory"] == limit)

        await self.world.eventually(reached, seconds, f"{limit}:\n{self.operator.log()}")

    async def change(self) -> str:
        """Change the spec, as its owner would, around the fault; gives the new memory limit."""
        self._limits += 1
        limit = f"{self._limits}Gi"
        engine = {"name": "engine", "resources": {"limits": {"memory": limit}}}
        await self.world.patch({"spec": {"template": {"spec": {"containers": [engine]}}}})
        return limit

    async def untouched(self) -> str:
        """What users saw when no replica was taken away and none was told to drain."""
        deployment = await self.world.deployment()
        assert deployment["spec"]["replicas"] == REPLICAS
        pods = await self.world.pods()
        assert len(pods) == REPLICAS
        assert [s.drain_puts for s in self.world.sidecars.values()] == [[]] * REPLICAS
        return f"nothing: {REPLICAS} of {REPLICAS} replicas serve on, none drains"


@asynccontextmanager
async def scene(server: Any, folder: Path) -> AsyncIterator[Scene]:
    """A scene whose service has all its replicas."""
    await asyncio.to_thread(folder.mkdir)
    faulty = FaultyServer()
    await faulty.start(server.kubeconfig, server.context)
    async with World(server.kubeconfig, server.context, make_namespace(server), folder) as world:
        settings = with_changes(
            world.settings, kubeconfig=str(faulty.kubeconfig(folder)), context=CONTEXT,
            probe_port=free_port(), metrics_port=free_port(), tick_seconds=1.0,
            relist_seconds=10.0, lease_duration_seconds=15.0,
        )  # fmt: skip
        operator = SupervisedOperator(settings, folder / "operator.log")
        try:
            await operator.start()
            scaling = {"mode": "Advisory", "maxReplicas": GHOSTS + REPLICAS}
            await world.create(service_object(world.namespace, scaling=scaling, replicas=REPLICAS))
            await world.sync_pods()
            await world.until_condition("Ready", "True", "ReplicasReady", seconds=60)
            yield Scene(world, faulty, operator)
        finally:
            faulty.flow()
            await operator.stop()
            await faulty.stop()


async def busy(at: Scene, row: Row) -> None:
    """429 with Retry-After for a minute, to everything."""

    async def later(_: web.Request) -> web.Response:
        return refusal(429, "TooManyRequests", "too many requests", {"Retry-After": "5"})

    at.faulty.faults.append(later)
    at.faulty.cut("pods")
    await asyncio.sleep(BUSY_SECONDS)
    seen = await at.untouched()
    at.faulty.faults.clear()
    row.strike()
    await at.follows()
    assert at.operator.exits in ([], [LOST]), at.operator.log()
    row.recovered(seen, ended(at) + "; status keeps its last word meanwhile")


async def swallowing(at: Scene, row: Row) -> None:
    """Nothing passes for two minutes, and no connection is closed."""
    at.faulty.swallow()
    await asyncio.sleep(SWALLOW_SECONDS)
    seen = await at.untouched()
    # It gave up its Lease in time, and the process really ended: no zombie.
    assert at.operator.exits == [LOST], at.operator.log()
    at.faulty.flow()
    row.strike()
    await at.follows()
    row.recovered(seen, ended(at) + "; status keeps its last word meanwhile")


async def revoked(at: Scene, row: Row) -> None:
    """The right to one kind is taken away while the operator runs."""

    async def forbidden(request: web.Request) -> web.Response | None:
        words = 'replicasets.apps is forbidden: User "operator" cannot list resource "replicasets"'
        kind = plural_of(request) == "replicasets"
        return refusal(403, "Forbidden", words) if kind else None

    at.faulty.faults.append(forbidden)
    at.faulty.cut("replicasets")
    await asyncio.sleep(REVOKED_SECONDS)
    seen = await at.untouched()
    assert at.operator.exits, "an operator that may not list a kind went on as if it could"
    assert "cannot list resource" in at.operator.log()
    at.faulty.faults.clear()
    row.strike()
    await at.follows(180.0)
    row.recovered(seen, ended(at) + ", its log names the right that is missing")


async def list_fails(at: Scene, row: Row) -> None:
    """500 on one LIST, at a relist and at the start that follows."""
    failed: list[str] = []

    async def broken(request: web.Request) -> web.Response | None:
        if plural_of(request) == "deployments" and not is_watch(request) and len(failed) < 4:
            failed.append(request.path)
            return refusal(500, "InternalError", "etcdserver: request timed out")
        return None

    at.faulty.faults.append(broken)

    async def met() -> bool:
        return bool(failed)

    await at.world.eventually(met, 30.0)
    row.strike()
    await at.follows()
    assert at.operator.exits == []
    row.recovered(await at.untouched(), "as before; the log says which list failed")


async def error_in_stream(at: Scene, row: Row) -> None:
    """A watch that says ERROR."""
    assert await at.faulty.send("pods", error_event(500, "InternalError", "leader changed")) == 1
    row.strike()

    async def ended_once() -> bool:
        return bool(at.operator.exits)

    await at.world.eventually(ended_once, 30.0)
    await at.follows()
    row.recovered(await at.untouched(), ended(at) + ", its log has the server's words")


async def gap(at: Scene, row: Row) -> None:
    """410 after a gap in which 100 objects were deleted."""
    world = at.world
    await world.make_surplus(GHOSTS)

    async def counted() -> bool:
        return bool((await world.service())["status"]["replicas"] == GHOSTS + REPLICAS)

    await world.eventually(counted, 90.0, "the surplus is counted")

    async def away(request: web.Request) -> web.Response | None:
        return refusal(503, "Unavailable", "away") if plural_of(request) == "pods" else None

    told: list[str] = []

    async def expired(request: web.Request) -> web.StreamResponse | None:
        if plural_of(request) == "pods" and is_watch(request) and not told:
            told.append(request.path)
            return await gone(request)
        return None

    at.faulty.faults.append(away)
    at.faulty.cut("pods")
    ghosts = [pod for pod in await world.pods() if name_of(pod) not in world.sidecars]
    await asyncio.gather(*(world.remove_pod(pod) for pod in ghosts))
    at.faulty.faults[:] = [expired]
    row.strike()

    async def no_ghosts() -> bool:
        return bool(told) and (await world.service())["status"]["replicas"] == REPLICAS

    await world.eventually(no_ghosts, RECOVERY_SECONDS, f"no ghosts:\n{at.operator.log()}")
    assert at.operator.exits == []
    assert len((await world.kube.list(PODS, world.namespace)).items) == REPLICAS
    row.recovered(await at.untouched(), f"replicas: {REPLICAS} again after the next relist")


def ended(at: Scene) -> str:
    """How often the process ended, and with which status."""
    count = len(at.operator.exits)
    if not count:
        return "the operator stayed"
    return f"the operator ended {count} x with status {at.operator.exits[-1]} and came back"


FAULTS: dict[str, Callable[[Scene, Row], Awaitable[None]]] = {
    "API server: 429 with Retry-After for 60 s": busy,
    "API server: every connection swallowed for 120 s": swallowing,
    "API server: the right to list one kind revoked for 90 s": revoked,
    "API server: 500 on one LIST": list_fails,
    "API server: ERROR within a watch": error_in_stream,
    "API server: 410 after a gap in which 100 Pods were deleted": gap,
}


async def test_an_api_server_that_fails_for_minutes(
    server: Any, tmp_path: Path, faults: Faults
) -> None:
    async def one(number: int, name: str, act: Callable[[Scene, Row], Awaitable[None]]) -> None:
        async with scene(server, tmp_path / str(number)) as at:
            with faults.row(name) as row:
                await act(at, row)
                assert await at.operator.answers("healthz")

    outcomes = await asyncio.gather(
        *(one(number, *fault) for number, fault in enumerate(FAULTS.items())),
        return_exceptions=True,
    )
    problems = [o for o in outcomes if isinstance(o, BaseException)]
    if problems:
        raise BaseExceptionGroup("faults that were not survived", problems)
