"""Workers: take a key, reconcile it within a deadline, and put it back when that failed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvscaler_operator.cache import Key
from kvscaler_operator.gateways.kube import ConflictError, UnavailableError
from kvscaler_operator.metrics import MachineryMetrics
from kvscaler_operator.queue import WorkQueue

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 60.0


class Workers:
    """Runs `reconcile` over the keys of a queue."""

    def __init__(
        self,
        queue: WorkQueue[Key],
        reconcile: Callable[[Key], Awaitable[float | None]],
        metrics: MachineryMetrics,
    ) -> None:
        self._queue = queue
        self._reconcile = reconcile
        self._metrics = metrics
        self._started: dict[Key, float] = {}
        self.done: set[Key] = set()
        """Keys that were reconciled without an error at least once."""

    async def run(self, count: int) -> None:
        """Run `count` workers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._work())

    def longest_running_seconds(self) -> float:
        """Age of the reconcile that runs longest now."""
        now = asyncio.get_running_loop().time()
        return max((now - at for at in self._started.values()), default=0.0)

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            try:
                await self.process(key)
            finally:
                self._queue.done(key)

    async def process(self, key: Key) -> None:
        """Reconcile one key and schedule the next look at it."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        self._started[key] = begun
        self._metrics.active.inc()
        result = "success"
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                again = await self._reconcile(key)
        except Exception as error:
            result = "error"
            self._failed(key, error)
        else:
            self.done.add(key)
            self._queue.forget(key)
            if again is not None:
                result = "requeue_after"
                self._queue.add_after(key, again)
        finally:
            self._started.pop(key, None)
            self._metrics.active.dec()
            self._metrics.reconciled(result, loop.time() - begun)

    def _failed(self, key: Key, error: Exception) -> None:
        asked = error.retry_after_seconds if isinstance(error, UnavailableError) else None
        delay = self._queue.add_failed(key, asked or 0.0)
        where = f"{key[0]}/{key[1]}"
        words = str(error) or type(error).__name__
        if isinstance(error, ConflictError) and self._queue.failures(key) <= 3:
            logger.info("%s: conflict, tried again in %.1f s: %s", where, delay, words)
        elif isinstance(error, UnavailableError):
            logger.warning("%s: tried again in %.1f s: %s", where, delay, words)
        else:
            # The whole trace once per series of failures; a permanent fault must not flood the log.
            first = self._queue.failures(key) == 1
            logger.error(
                "%s: reconcile failed, tried again in %.1f s: %s",
                where,
                delay,
                words,
                exc_info=error if first else None,
            )
