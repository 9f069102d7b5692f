"""A work queue of keys: any event only marks a key dirty.

The semantics are those of client-go's workqueue, because they close two races. A key that becomes
dirty while a worker holds it is handed out again only after `done`, so that no key is ever
reconciled twice at once; and any number of marks before it is handed out cost one reconcile.
All time comes from the event loop, so that tests can run it on a virtual clock.
"""

import asyncio
import random
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class QueueMetrics(Protocol):
    """What a queue tells whoever exports its metrics."""

    def depth(self, keys: int) -> None:
        """Keys that wait for a worker."""

    def added(self) -> None:
        """A key became dirty."""

    def retried(self) -> None:
        """A key was put back because its reconcile failed."""

    def waited(self, seconds: float) -> None:
        """A key was handed out after waiting for so long."""


class NoMetrics:
    """Metrics of a queue that nobody watches."""

    def depth(self, keys: int) -> None:
        """Ignored."""

    def added(self) -> None:
        """Ignored."""

    def retried(self) -> None:
        """Ignored."""

    def waited(self, seconds: float) -> None:
        """Ignored."""


class WorkQueue(Generic[K]):
    """Coalescing queue with one worker per key, delays, and exponential backoff per key.

    `backoff_base_seconds` doubles with every failure of a key up to `backoff_cap_seconds`, with up
    to 20 % of random lengthening so that keys that failed together do not return together.
    """

    def __init__(
        self,
        *,
        backoff_base_seconds: float = 0.2,
        backoff_cap_seconds: float = 60.0,
        metrics: QueueMetrics | None = None,
        randomness: random.Random | None = None,
    ) -> None:
        self._base = backoff_base_seconds
        self._cap = backoff_cap_seconds
        self._metrics: QueueMetrics = metrics or NoMetrics()
        self._random = randomness or random.Random()
        self._order: asyncio.Queue[K] = asyncio.Queue()
        self._dirty: dict[K, float] = {}
        self._processing: set[K] = set()
        self._failures: dict[K, int] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._closed = False

    def __len__(self) -> int:
        """Keys that wait for a worker now (not those that wait for their delay)."""
        return self._order.qsize()

    def add(self, key: K) -> None:
        """Mark `key` dirty. Cancels nothing: a pending delay of the key still fires."""
        if self._closed or key in self._dirty:
            return
        self._dirty[key] = _now()
        self._metrics.added()
        if key not in self._processing:
            self._enqueue(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Mark `key` dirty after `seconds`; of several pending delays the earliest holds.

        Zero and negative delays mark it dirty at once: they must never be lost.
        """
        if self._closed:
            return
        if seconds <= 0:
            self.add(key)
            return
        when = _now() + seconds
        pending = self._timers.get(key)
        if pending is not None:
            if pending.when() <= when:
                return
            pending.cancel()
        self._timers[key] = asyncio.get_running_loop().call_at(when, self._fire, key)

    def add_failed(self, key: K, at_least_seconds: float = 0.0) -> float:
        """Put a key back whose reconcile failed; returns the delay in seconds that it got.

        `at_least_seconds` is a wait that a server asked for.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = min(self._cap, self._base * 2.0 ** min(failures, 32))
        delay = max(delay, at_least_seconds) * (1.0 + 0.2 * self._random.random())
        self._metrics.retried()
        self.add_after(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """Forget the failures of a key: its next backoff starts from the base again."""
        self._failures.pop(key, None)

    def failures(self, key: K) -> int:
        """Failures of a key in a row."""
        return self._failures.get(key, 0)

    async def get(self) -> K:
        """Wait for a dirty key that no other worker holds. Call `done` with it afterwards."""
        key = await self._order.get()
        since = self._dirty.pop(key)
        self._processing.add(key)
        self._metrics.depth(self._order.qsize())
        self._metrics.waited(_now() - since)
        return key

    def done(self, key: K) -> None:
        """End the work on `key`; if it became dirty meanwhile, it is queued again."""
        self._processing.discard(key)
        if key in self._dirty:
            self._enqueue(key)

    def oldest_age_seconds(self) -> float:
        """For how long the key that waits longest has been dirty; 0 when none waits."""
        if not self._dirty:
            return 0.0
        return _now() - min(self._dirty.values())

    def close(self) -> None:
        """Take no more keys and fire no more delays."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _fire(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _enqueue(self, key: K) -> None:
        self._order.put_nowait(key)
        self._metrics.depth(self._order.qsize())


def _now() -> float:
    return asyncio.get_running_loop().time()
