"""What every mode of the sidecar shares: its ports, its drain, what it says, and how it ends.

Listeners answer before there is anything to serve (live, not ready). SIGTERM begins a drain, and
the process ends when it is over, so no mode can break a stream that another would finish.
"""

import asyncio
import logging
import signal
import socket
import time
from abc import ABC, abstractmethod

from kvscaler.protocol.limits import LimitsPut, LimitsReport
from kvscaler.protocol.refusals import RefusalReason
from kvscaler.protocol.state import ReplicaState
from kvscaler.protocol.tokens import audience
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from kvscaler_sidecar.admin.app import AdminServer
from kvscaler_sidecar.admin.verifier import KeyFolder, TokenVerifier
from kvscaler_sidecar.config import ProcessSettings
from kvscaler_sidecar.drain import SIGTERM, Drain
from kvscaler_sidecar.metrics import Latencies, StateCollector
from kvscaler_sidecar.server.connections import ConnectionLimits
from kvscaler_sidecar.server.door import Door
from kvscaler_sidecar.server.listeners import Listener, Listeners
from kvscaler_sidecar.server.observe import Health, observe_app

log = logging.getLogger(__name__)

MACHINE_LIMITS = ConnectionLimits(connections=64, per_client=16)
"""Of the pages for machines and the admin API: a few probes, scrapers and operators call them."""
TICK_SECONDS = 0.05
STOP_GRACE_SECONDS = 5.0
EXIT_INTERRUPTED = 130


class ServingProcess(ABC):
    """The process as one object; `run` is its life and returns its exit code."""

    last_words = ""
    """Why the exit code is not 0."""

    def __init__(self, settings: ProcessSettings, sockets: dict[str, socket.socket]) -> None:
        self._common = settings
        self._sockets = sockets
        self._started_at = time.time()
        self._interrupted = False
        self._refusals: dict[str, int] = {}
        self._registry = CollectorRegistry()
        self._latencies = Latencies(self._registry)
        self.drain = Drain(
            settings.drain_linger_seconds,
            settings.drain_timeout_seconds,
            lambda: self._door.live_requests,
            time.monotonic,
            time.time,
        )
        self._door = Door(self.drain, self._count_refusal)

    def _listen(self, api: ASGIApp, *, api_dates: bool = True) -> None:
        """Make the three servers, when everything that they ask exists.

        `api_dates` has the API's server add the Date; one that passes answers on has it already.
        """
        self._registry.register(StateCollector(self.state, self._heartbeat_age))
        verifier = TokenVerifier(
            KeyFolder(self._common.admin_keys_dir),
            audience(self._common.service_uid, self._common.pod_uid),
            time.time,
        )
        admin = AdminServer(verifier, self, self.drain).app()
        pages = observe_app(self.state, self._registry, self.live, self.ready, self.drain)
        self.listeners = Listeners(
            {
                "http": Listener(
                    api,
                    self._sockets["http"],
                    ConnectionLimits(self._common.max_connections),
                    self._count_refusal,
                    dates=api_dates,
                ),
                "metrics": Listener(pages, self._sockets["metrics"], MACHINE_LIMITS),
                "admin": Listener(admin, self._sockets["admin"], MACHINE_LIMITS),
            }
        )

    # What others ask

    @abstractmethod
    def state(self) -> ReplicaState:
        """Everything about this replica."""

    @abstractmethod
    def live(self) -> Health:
        """Whether this process can still make progress."""

    @abstractmethod
    def ready(self) -> Health:
        """Whether this replica belongs in its Service."""

    @abstractmethod
    async def limits_report(self) -> LimitsReport:
        """For the admin API; raises `EngineUnavailable`."""

    @abstractmethod
    async def put_limits(self, message: LimitsPut) -> LimitsReport:
        """For the admin API; raises `HashConflict` and `EngineUnavailable`."""

    def _heartbeat_age(self) -> float | None:
        """Time since the engine's own loop turned, in a process that has one."""
        return None

    def _count_refusal(self, reason: RefusalReason) -> None:
        """Refusals at the door; those by admission are counted where they are decided too."""
        self._refusals[str(reason)] = self._refusals.get(str(reason), 0) + 1

    # Life

    async def run(self, install_signals: bool = True) -> int:
        """Serve until a drain by SIGTERM is over; 0, or a code that says what failed."""
        loop = asyncio.get_running_loop()
        if install_signals:
            loop.add_signal_handler(signal.SIGTERM, self.begin_end)
            loop.add_signal_handler(signal.SIGINT, self._interrupt)
        await self.listeners.start()
        log.info("listening", extra=self.listeners.ports)
        try:
            return await self._serve_to_the_end()
        finally:
            await self.listeners.stop(STOP_GRACE_SECONDS)
            self._stopped()

    @abstractmethod
    async def _serve_to_the_end(self) -> int:
        """Everything between listening and the end; the exit code."""

    @abstractmethod
    def _stopped(self) -> None:
        """The listeners are closed: let go of everything else."""

    def begin_end(self) -> None:
        """What SIGTERM does; a second one changes nothing, and breaks no stream."""
        if not self.drain.by_sigterm:
            log.info("SIGTERM: draining", extra={"live": self._door.live_requests})
        self.drain.begin(SIGTERM)

    def _interrupt(self) -> None:
        """Ctrl-C drains as SIGTERM does; a second one is a person who wants out."""
        self._interrupted = self.drain.by_sigterm
        self.begin_end()

    def _end(self) -> int | None:
        """The exit code once the process may end, `None` until then; ask it every tick."""
        if self._interrupted:
            self.last_words = "interrupted"
            return EXIT_INTERRUPTED
        if self.drain.over:
            live = self._door.live_requests
            if live:
                log.warning("the drain's time is up", extra={"live": live})
            log.info("drained", extra={"live": live})
            return 0
        return None
