"""Port 9090: `/metrics`, `/state`, the probes, and waiting for a drain.

Live means that this process can still make progress: its HTTP loop answers (or there would be no
answer) and its engine's thread is alive and turned lately. Ready means loaded and not draining;
it is never a matter of load, since a full replica that leaves its Service only moves the load.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvscaler.protocol.drain import DrainPhase
from kvscaler.protocol.state import ReplicaState
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvscaler_sidecar.drain import Drain
from kvscaler_sidecar.metrics import CONTENT_TYPE, render

MAX_STATE_BYTES = 64 * 1024
DRAIN_WAIT_PATH = "/drain/wait"
DRAIN_BEGIN_SECONDS = 10.0
DRAIN_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Health:
    """An answer to a probe, in words."""

    ok: bool
    message: str


def readiness(loaded: bool, failure: str | None, phase: DrainPhase) -> Health:
    """Loaded, whole and not draining."""
    if failure is not None:
        return Health(False, f"engine failed: {failure}")
    if not loaded:
        return Health(False, "loading")
    if phase is not DrainPhase.SERVING:
        return Health(False, f"drain: {phase}")
    return Health(True, "ready")


async def drained(
    drain: Drain,
    gave_up: Callable[[], Awaitable[bool]],
    begin_seconds: float = DRAIN_BEGIN_SECONDS,
) -> Health:
    """Wait until this replica has nothing left to answer, or its time for that is up.

    It may be asked a moment before the drain begins: Kubernetes sends SIGTERM to one container
    and calls the preStop hook of another at once. Where no drain begins, only the asking container
    is being stopped, and it must not be kept.
    """
    deadline = time.monotonic() + begin_seconds
    while True:
        phase = drain.phase
        if phase is DrainPhase.EMPTY:
            return Health(True, "drained")
        if drain.over:
            return Health(True, "the drain's time is up")
        if phase is DrainPhase.SERVING and time.monotonic() >= deadline:
            return Health(False, f"no drain has begun within {begin_seconds:.0f} s")
        if await gave_up():
            return Health(False, "nobody waits any more")
        await asyncio.sleep(DRAIN_LOOK_SECONDS)


def observe_app(
    state: Callable[[], ReplicaState],
    registry: CollectorRegistry,
    live: Callable[[], Health],
    ready: Callable[[], Health],
    drain: Drain,
) -> Starlette:
    """The application of port 9090."""

    async def metrics(request: Request) -> Response:
        return Response(render(registry), headers={"content-type": CONTENT_TYPE})

    async def state_page(request: Request) -> Response:
        body = state().model_dump_json()
        if len(body) > MAX_STATE_BYTES:
            raise RuntimeError(f"state is {len(body)} bytes, above {MAX_STATE_BYTES}")
        return Response(body, media_type="application/json")

    def probe(look: Callable[[], Health]) -> Callable[[Request], object]:
        async def answer(request: Request) -> Response:
            health = look()
            return PlainTextResponse(health.message + "\n", 200 if health.ok else 503)

        return answer

    async def wait_drained(request: Request) -> Response:
        health = await drained(drain, request.is_disconnected)
        return PlainTextResponse(health.message + "\n", 200 if health.ok else 503)

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/state", state_page),
            Route("/health/live", probe(live)),
            Route("/health/ready", probe(ready)),
            Route(DRAIN_WAIT_PATH, wait_drained),
        ]
    )
