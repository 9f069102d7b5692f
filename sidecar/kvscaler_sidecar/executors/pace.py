"""Time that steps take without computing: waits that do not drift.

Each step of a busy replica begins when the one before ended by the model, not when this process
came round to it. So a late wake-up, or what the loop does between two steps, is taken off the next
wait, and a thousand steps take the time of a thousand steps. How far the process is behind is
bounded: one that stood still (stopped, or starved of CPU) must not rush through what it missed.
"""

import time
from collections.abc import Callable

MAX_BEHIND_SECONDS = 1.0
"""Lost time beyond this is lost: the steps then take longer than the model says."""


class Pace:
    """The clock of one replica's steps; used by the engine's thread only."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._ended: float | None = None
        """When the last step ended by the model; `None` while there is nothing to do."""

    def step(self, seconds: float) -> None:
        """Return when a step of `seconds` that began where the last one ended is over."""
        now = self._clock()
        began = now if self._ended is None else max(self._ended, now - MAX_BEHIND_SECONDS)
        self._ended = began + seconds
        if self._ended > now:
            self._sleep(self._ended - now)

    def rest(self) -> None:
        """There is nothing to do: the next step begins when it is asked for."""
        self._ended = None
