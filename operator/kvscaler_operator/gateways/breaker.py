"""A half-open circuit breaker: after some failures in a row, one probe at a time.

Without it a dead Prometheus costs every tick its full timeout and a blocked thread each.
"""

import asyncio
from enum import StrEnum


class BreakerState(StrEnum):
    """Closed lets all through, open none, half-open one probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Opens after `threshold` failures in a row; probes after a pause that doubles up to a cap.

    A probe costs one query, and the cap is the longest that a server which is back goes unseen.
    """

    def __init__(
        self, threshold: int = 3, pause_seconds: float = 5.0, pause_cap_seconds: float = 15.0
    ) -> None:
        self._threshold = threshold
        self._first_pause = pause_seconds
        self._cap = pause_cap_seconds
        self._pause = pause_seconds
        self._failures = 0
        self._opened_at = 0.0
        self.state = BreakerState.CLOSED

    def allows(self) -> bool:
        """Whether a call may go out now; in the half-open state only the first one may."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.OPEN and _now() - self._opened_at >= self._pause:
            self.state = BreakerState.HALF_OPEN
            return True
        return False

    def succeeded(self) -> None:
        """A call went well: close, and forget the pauses."""
        self._failures = 0
        self._pause = self._first_pause
        self.state = BreakerState.CLOSED

    def failed(self) -> None:
        """A call failed: open at the threshold, or at once when it was the probe."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause = min(self._cap, self._pause * 2)
        elif self._failures < self._threshold:
            return
        self.state = BreakerState.OPEN
        self._opened_at = _now()


def _now() -> float:
    return asyncio.get_running_loop().time()
