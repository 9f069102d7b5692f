"""Liveness, readiness and metrics over HTTP.

Liveness fails for what a restart heals: a stuck event loop, a deaf watch, a key that nobody works
on, a lost Lease. A dead Prometheus is a condition and a metric, never a restart. Readiness is the
first full pass over all services.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

HEARTBEAT_SECONDS = 0.02
"""Short, so that a loop that is blocked for a tenth of a second is seen as that, or little less."""
Check = Callable[[], str | None]
"""A check gives the fault in words, or `None`."""


@dataclass(slots=True)
class Health:
    """Checks by name, and the heartbeat of the loop that they run on."""

    liveness: dict[str, Check] = field(default_factory=dict)
    readiness: dict[str, Check] = field(default_factory=dict)
    lag_seconds: float = 0.0
    """How late the last heartbeat was: time in which the loop ran something else."""

    async def run_heartbeat(
        self, lagged: Callable[[float, float], None] = lambda _lag, _busy: None
    ) -> None:
        """Beat until cancelled; tells `lagged` how late each beat was, and how much of that the
        loop's own thread was on a processor: the rest is a machine that is busy with others."""
        loop = asyncio.get_running_loop()
        while True:
            due, worked = loop.time() + HEARTBEAT_SECONDS, time.thread_time()
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self.lag_seconds = max(0.0, loop.time() - due)
            lagged(self.lag_seconds, min(self.lag_seconds, time.thread_time() - worked))

    def faults(self, checks: dict[str, Check]) -> dict[str, str]:
        """Failing checks with their words."""
        found = {name: check() for name, check in checks.items()}
        return {name: words for name, words in found.items() if words is not None}


def older_than(limit_seconds: float, age: Callable[[], float], what: str) -> Check:
    """A check that fails when `age()` exceeds a limit."""

    def check() -> str | None:
        seconds = age()
        return None if seconds <= limit_seconds else f"{what} is {seconds:.0f} s old"

    return check


class HttpServers:
    """The two ports: probes, and metrics (to which others may have access)."""

    def __init__(self, health: Health, registry: CollectorRegistry) -> None:
        self._health = health
        self._registry = registry
        self._runners: list[web.AppRunner] = []
        self.ports: dict[str, int] = {}
        """Ports in use by name (IPv4's where there is one), for port 0."""

    async def start(self, probe_port: int, metrics_port: int) -> None:
        """Listen on both ports."""
        probes = web.Application()
        probes.router.add_get("/healthz", self._answer(self._health.liveness))
        probes.router.add_get("/readyz", self._answer(self._health.readiness))
        await self._listen("probes", probes, probe_port)
        metrics = web.Application()
        metrics.router.add_get("/metrics", self._metrics)
        await self._listen("metrics", metrics, metrics_port)

    async def stop(self) -> None:
        """Close both ports."""
        for runner in self._runners:
            await runner.cleanup()

    async def _listen(self, name: str, application: web.Application, port: int) -> None:
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, port=port).start()
        # Port 0 gives IPv4 and IPv6 a port each, in no fixed order; IPv6 addresses are 4-tuples.
        ipv4 = [address for address in runner.addresses if len(address) == 2]
        self.ports[name] = (ipv4 or runner.addresses)[0][1]

    def _answer(self, checks: dict[str, Check]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(_: web.Request) -> web.Response:
            faults = self._health.faults(checks)
            lines = [f"{name}: {faults.get(name, 'ok')}" for name in checks]
            return web.Response(text="\n".join(lines) + "\n", status=503 if faults else 200)

        return handle

    async def _metrics(self, _: web.Request) -> web.Response:
        # Tens of milliseconds with hundreds of services: not on the loop that decides.
        body = await asyncio.to_thread(generate_latest, self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
