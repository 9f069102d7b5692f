"""A process that stands before an engine: what starts it, what it says, and what ends it.

It is ready when the engine is, and limits that follow from the engine's own pool are in force
before that. It ends by a drain: streams end in full while the engine still runs, which is why the
engine's container must wait for it (`/drain/wait`).
"""

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

from kvscaler.budget import AdmissionPolicy
from kvscaler.protocol import metrics as names
from kvscaler.protocol.limits import LimitsPut, LimitsReport
from kvscaler.protocol.state import ReplicaState
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscaler_sidecar.admin.app import EngineUnavailable
from kvscaler_sidecar.config import GateSettings
from kvscaler_sidecar.gate.account import GateCounts
from kvscaler_sidecar.gate.adapters.seam import EngineAdapter, EngineReport
from kvscaler_sidecar.gate.app import GateServer
from kvscaler_sidecar.gate.desk import Desk
from kvscaler_sidecar.gate.state import gate_state
from kvscaler_sidecar.gate.upstream import Upstream
from kvscaler_sidecar.gate.watch import EngineWatch
from kvscaler_sidecar.process import TICK_SECONDS, ServingProcess
from kvscaler_sidecar.server.observe import Health, readiness

log = logging.getLogger(__name__)


class Gate(ServingProcess):
    """A process before an engine; `run` is its life and returns its exit code."""

    def __init__(
        self,
        settings: GateSettings,
        adapter: EngineAdapter,
        policy: AdmissionPolicy,
        overrides: dict[str, Any],
        sockets: dict[str, socket.socket],
    ) -> None:
        super().__init__(settings, sockets)
        self._settings = settings
        self._policy, self._overrides = policy, overrides
        self._desk: Desk | None = None
        connect = settings.engine_connect_seconds
        self._engine = Upstream(settings.engine_url, connect)
        self._pages = Upstream(settings.engine_metrics_url, connect)
        self._watch = EngineWatch(self._pages, adapter, self._engine_seen)
        self._server = GateServer(
            engine=self._engine,
            engine_metrics=self._pages,
            adapter=adapter,
            desk=lambda: self._desk,
            problem=lambda: self._watch.problem,
            door=self._door,
            max_body_bytes=settings.max_body_bytes,
            silence_seconds=settings.engine_silence_seconds,
            latencies=self._latencies,
        )
        self._registry.register(_GateCollector(self._server.counts))
        self._listen(self._server.app(), api_dates=False)

    def _engine_seen(self, report: EngineReport) -> None:
        if report.capacity is None:
            return
        if self._desk is not None:
            self._desk.engine_has(report.capacity)
            return
        self._desk = Desk(report.capacity, self._policy, self._overrides)
        log.info(
            "ready",
            extra={
                "kv_blocks": report.capacity.kv_blocks,
                "engine": self._settings.engine_url,
                "limits": self._desk.limits_report().hash,
                "seconds": round(time.time() - self._started_at, 3),
            },
        )

    # What others ask

    def state(self) -> ReplicaState:
        """The gate's books and limits, and what the engine says of itself."""
        return gate_state(
            self._settings,
            self._started_at,
            self._desk,
            self._watch,
            self.ready().ok,
            self.drain.report(),
            self._refusals,
        )

    def live(self) -> Health:
        """A gate that answers is live; its engine has a probe of its own."""
        return Health(True, "live")

    def ready(self) -> Health:
        """Whether the engine is ready and this gate is not draining."""
        report = self._watch.fresh
        if report is None:
            return Health(False, f"engine unknown: {self._watch.problem or 'its page is old'}")
        if not report.ready:
            return Health(False, "the engine is not ready")
        return readiness(self._desk is not None, None, self.drain.phase)

    async def limits_report(self) -> LimitsReport:
        """For the admin API."""
        return self._known_desk().limits_report()

    async def put_limits(self, message: LimitsPut) -> LimitsReport:
        """For the admin API; raises `HashConflict`."""
        return self._known_desk().put_limits(message)

    def _known_desk(self) -> Desk:
        if self._desk is None:
            raise EngineUnavailable(self._watch.problem or "the engine has no KV cache yet")
        return self._desk

    # Life

    async def _serve_to_the_end(self) -> int:
        watching = asyncio.create_task(self._watch.run(), name="engine-watch")
        try:
            while True:
                ended = self._end()
                if ended is not None:
                    return ended
                if watching.done():
                    watching.result()
                if self._desk is not None:
                    self._desk.tick()
                await asyncio.sleep(TICK_SECONDS)
        finally:
            watching.cancel()

    def _stopped(self) -> None:
        self._engine.close()
        self._pages.close()


class _GateCollector(Collector):
    """Families that only a gate has."""

    def __init__(self, counts: GateCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """From the counts."""
        charges = CounterMetricFamily(
            names.GATE_CHARGES,
            "Requests charged, by what their cost was known from.",
            labels=["basis"],
        )
        for basis, count in sorted(self._counts.charges.items()):
            charges.add_metric([basis], count)
        yield charges
        yield CounterMetricFamily(
            names.GATE_BROKEN,
            "Answers that the engine broke off after their first byte.",
            value=self._counts.broken,
        )
        yield CounterMetricFamily(
            names.GATE_UNMEASURED,
            "Answers whose lengths the engine did not tell: they count in no length statistics.",
            value=self._counts.unmeasured,
        )
