"""One serving process: what starts it, what it says about itself, and what ends it.

The order at start keeps the promises of a container: configuration and budget are checked before
anything is loaded, listeners answer while weights load (live, not ready), and limits are in force
before the first request. The order at the end keeps the promise that no stream breaks.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvscaler.protocol.limits import LimitsPut, LimitsReport
from kvscaler.protocol.state import ReplicaState, StepCosts

from kvscaler_sidecar.admin.app import EngineUnavailable
from kvscaler_sidecar.config import Settings
from kvscaler_sidecar.engine.loop import EngineLoop
from kvscaler_sidecar.executors.seam import Executor, SamplingParams, Tokenizer
from kvscaler_sidecar.process import TICK_SECONDS, ServingProcess
from kvscaler_sidecar.server.answer import Serving
from kvscaler_sidecar.server.observe import Health, readiness
from kvscaler_sidecar.server.openai import OpenAIServer
from kvscaler_sidecar.start import EXIT_REFUSED, LOADING_THREAD, Plan, StartRefused
from kvscaler_sidecar.state import StateBuilder

log = logging.getLogger(__name__)

STALLED_SECONDS = 120.0
"""An engine whose loop has not turned for this long is stuck: the slowest step takes seconds."""
ENGINE_ANSWER_SECONDS = 10.0
EXIT_ENGINE_FAILED = 70
EXIT_LOAD_FAILED = 71


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run."""

    executor: Executor
    tokenizer: Tokenizer
    step_costs: StepCosts | None = None
    """Measured before the first request."""
    unsupported_field: Callable[[SamplingParams], str | None] = lambda _: None
    """Names the first field of a request that this executor can't honour."""


Loader = Callable[[Settings, Plan], Loaded]


class Replica(ServingProcess):
    """A process with our engine in it; `run` is its life and returns its exit code."""

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        loader: Loader,
        sockets: dict[str, socket.socket],
    ) -> None:
        super().__init__(settings, sockets)
        self._settings = settings
        self._plan = plan
        self._loader = loader
        self._engine: EngineLoop | None = None
        self._serving: Serving | None = None
        self._state = StateBuilder(settings, plan, self._started_at)
        self._api = OpenAIServer(
            served_names=settings.served_names,
            serving=lambda: self._serving,
            door=self._door,
            max_body_bytes=settings.max_body_bytes,
            max_held_bytes=plan.limits(plan.budget.blocks).queue_bytes,
            started_at=self._started_at,
        )
        self._listen(self._api.app())

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

    # Life

    def _stopped(self) -> None:
        if self._engine is not None:
            self._engine.stop()

    async def _serve_to_the_end(self) -> int:
        loop = asyncio.get_running_loop()
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
        self._serving = Serving(
            engine,
            loaded.tokenizer,
            self._plan.budget.max_context_tokens,
            loaded.executor.report,
            loaded.unsupported_field,
        )
        log.info(
            "ready",
            extra={
                "kv_blocks": loaded.executor.kv_blocks,
                "executor": loaded.executor.report.type,
                "device": loaded.executor.report.device,
                "time_scale": loaded.executor.report.time_scale,
                "compute_dtype": loaded.executor.report.compute_dtype,
                "limits": self._plan.limits(loaded.executor.kv_blocks).content_hash,
                "seconds": round(time.time() - self._started_at, 3),
            },
        )
        while True:
            if engine.failure is not None:
                self.last_words = f"the engine failed: {engine.failure}"
                return EXIT_ENGINE_FAILED
            ended = self._end()
            if ended is not None:
                return ended
            await asyncio.sleep(TICK_SECONDS)

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
