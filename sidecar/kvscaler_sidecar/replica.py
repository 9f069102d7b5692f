"""One serving process: what starts it, what it says about itself, and what ends it.

The order at start keeps the promises of a container: configuration and budget are checked before
anything is loaded, listeners answer while weights load (live, not ready), and limits are in force
before the first request. The order at the end keeps the promise that no stream breaks.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvscaler.protocol.limits import LimitsPut, LimitsReport
from kvscaler.protocol.refusals import RefusalReason
from kvscaler.protocol.state import ReplicaState, StepCosts
from kvscaler.protocol.tokens import audience
from prometheus_client import CollectorRegistry

from kvscaler_sidecar.admin.app import AdminServer, EngineUnavailable
from kvscaler_sidecar.admin.verifier import KeyFolder, TokenVerifier
from kvscaler_sidecar.config import Settings
from kvscaler_sidecar.drain import SIGTERM, Drain
from kvscaler_sidecar.engine.loop import EngineLoop
from kvscaler_sidecar.executors.seam import Executor, Tokenizer
from kvscaler_sidecar.metrics import Latencies, StateCollector
from kvscaler_sidecar.server.answer import Serving
from kvscaler_sidecar.server.listeners import Listeners
from kvscaler_sidecar.server.observe import Health, observe_app, readiness
from kvscaler_sidecar.server.openai import OpenAIServer
from kvscaler_sidecar.start import EXIT_REFUSED, LOADING_THREAD, Plan, StartRefused
from kvscaler_sidecar.state import StateBuilder

log = logging.getLogger(__name__)

STALLED_SECONDS = 120.0
"""An engine whose loop has not turned for this long is stuck: the slowest step takes seconds."""
ENGINE_ANSWER_SECONDS = 10.0
TICK_SECONDS = 0.05
STOP_GRACE_SECONDS = 5.0
EXIT_ENGINE_FAILED = 70
EXIT_LOAD_FAILED = 71
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run."""

    executor: Executor
    tokenizer: Tokenizer
    step_costs: StepCosts | None = None
    """Measured before the first request."""


Loader = Callable[[Settings, Plan], Loaded]


class Replica:
    """The process as one object; `run` is its life and returns its exit code."""

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        loader: Loader,
        sockets: dict[str, socket.socket],
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._loader = loader
        self._started_at = time.time()
        self._engine: EngineLoop | None = None
        self._serving: Serving | None = None
        self._interrupted = False
        self._refusals: dict[str, int] = {}
        self._registry = CollectorRegistry()
        self._latencies = Latencies(self._registry)
        self._state = StateBuilder(settings, plan, self._started_at)
        self._registry.register(StateCollector(self.state, self._heartbeat_age))
        self._api = OpenAIServer(
            served_names=settings.served_names,
            serving=lambda: self._serving,
            drain=self._make_drain(),
            refused=self._count_refusal,
            max_body_bytes=settings.max_body_bytes,
            started_at=self._started_at,
        )
        verifier = TokenVerifier(
            KeyFolder(settings.admin_keys_dir),
            audience(settings.service_uid, settings.pod_uid),
            time.time,
        )
        self.listeners = Listeners(
            {
                "http": (self._api.app(), sockets["http"]),
                "metrics": (
                    observe_app(self.state, self._registry, self.live, self.ready),
                    sockets["metrics"],
                ),
                "admin": (AdminServer(verifier, self, self.drain).app(), sockets["admin"]),
            }
        )

    def _make_drain(self) -> Drain:
        self.drain = Drain(
            self._settings.drain_linger_seconds,
            self._settings.drain_timeout_seconds,
            lambda: self._api.live_requests,
            time.monotonic,
            time.time,
        )
        return self.drain

    # What others ask

    def state(self) -> ReplicaState:
        """Everything about this replica, from the engine's last look at itself."""
        look = self._engine.look if self._engine is not None else None
        return self._state.build(look, self.ready().ok, self.drain.report(), self._refusals)

    def live(self) -> Health:
        """Whether this process can still make progress."""
        if self._engine is None:
            return Health(True, "loading")
        if self._engine.failure is not None:
            return Health(False, f"engine failed: {self._engine.failure}")
        age = self._engine.heartbeat_age_seconds
        if age > STALLED_SECONDS:
            return Health(False, f"the engine's loop has not turned for {age:.0f} s")
        return Health(True, "live")

    def ready(self) -> Health:
        """Whether this replica belongs in its Service."""
        failure = self._engine.failure if self._engine is not None else None
        return readiness(self._serving is not None, failure, self.drain.phase)

    async def limits_report(self) -> LimitsReport:
        """For the admin API."""
        return await self._ask(lambda engine: engine.limits_report())

    async def put_limits(self, message: LimitsPut) -> LimitsReport:
        """For the admin API; raises `HashConflict` from the engine's thread."""
        return await self._ask(lambda engine: engine.put_limits(message))

    async def _ask(self, question: Callable[[EngineLoop], LimitsReport]) -> LimitsReport:
        engine = self._engine
        if engine is None or self._serving is None:
            raise EngineUnavailable("the model is still loading")
        answer = asyncio.wrap_future(engine.call(lambda: question(engine)))
        try:
            return await asyncio.wait_for(answer, ENGINE_ANSWER_SECONDS)
        except TimeoutError:
            raise EngineUnavailable(
                f"the engine is in a step for more than {ENGINE_ANSWER_SECONDS:.0f} s"
            ) from None

    def _heartbeat_age(self) -> float | None:
        return self._engine.heartbeat_age_seconds if self._engine is not None else None

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
            return await self._serve_to_the_end(loop)
        finally:
            await self.listeners.stop(STOP_GRACE_SECONDS)
            if self._engine is not None:
                self._engine.stop()

    def begin_end(self) -> None:
        """What SIGTERM does; a second one changes nothing, and breaks no stream."""
        if not self.drain.by_sigterm:
            log.info("SIGTERM: draining", extra={"live": self._api.live_requests})
        self.drain.begin(SIGTERM)

    def _interrupt(self) -> None:
        """Ctrl-C drains as SIGTERM does; a second one is a person who wants out."""
        self._interrupted = self.drain.by_sigterm
        self.begin_end()

    async def _serve_to_the_end(self, loop: asyncio.AbstractEventLoop) -> int:
        loading = self._start_loading(loop)
        while not loading.done():
            if self.drain.by_sigterm:
                return 0  # nothing was accepted yet, so there is nothing to finish
            await asyncio.wait([loading], timeout=TICK_SECONDS)
        try:
            loaded = loading.result()
        except StartRefused as refused:
            log.error("refused to start", extra={"why": str(refused)})
            self.last_words = str(refused)
            return EXIT_REFUSED
        except Exception as error:
            log.exception("loading failed")
            self.last_words = f"{self._settings.model_uri} could not be loaded: {error}"
            return EXIT_LOAD_FAILED
        engine = EngineLoop(
            loaded.executor,
            loaded.tokenizer,
            self._plan.limits(loaded.executor.kv_blocks),
            loop,
            self._latencies,
            prefix_caching=self._settings.prefix_caching,
            step_costs=loaded.step_costs,
        )
        self._state.loaded(loaded.executor)
        engine.start()
        self._engine = engine
        self._serving = Serving(engine, loaded.tokenizer, self._plan.budget.max_context_tokens)
        log.info(
            "ready",
            extra={
                "kv_blocks": loaded.executor.kv_blocks,
                "executor": loaded.executor.report.type,
                "compute_dtype": loaded.executor.report.compute_dtype,
                "limits": self._plan.limits(loaded.executor.kv_blocks).content_hash,
                "seconds": round(time.time() - self._started_at, 3),
            },
        )
        while True:
            if engine.failure is not None:
                self.last_words = f"the engine failed: {engine.failure}"
                return EXIT_ENGINE_FAILED
            if self._interrupted:
                self.last_words = "interrupted"
                return EXIT_INTERRUPTED
            if self.drain.over:
                live = self._api.live_requests
                if live:
                    log.warning("the drain's time is up", extra={"live": live})
                log.info("drained", extra={"live": live})
                return 0
            await asyncio.sleep(TICK_SECONDS)

    last_words = ""
    """Why the exit code is not 0."""

    def _start_loading(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Loaded]:
        """Load in a daemon thread: a SIGTERM while loading must not wait for it."""
        future: asyncio.Future[Loaded] = loop.create_future()

        def settle(loaded: Loaded | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if loaded is not None:
                future.set_result(loaded)
            elif error is not None:
                future.set_exception(error)

        def load() -> None:
            loaded: Loaded | None = None
            error: BaseException | None = None
            try:
                loaded = self._loader(self._settings, self._plan)
            except BaseException as caught:
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop closed: the process is ending
                loop.call_soon_threadsafe(settle, loaded, error)

        threading.Thread(target=load, name=LOADING_THREAD, daemon=True).start()
        return future
