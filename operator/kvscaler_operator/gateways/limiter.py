"""A token bucket, since neither Kubernetes client for Python limits its own rate."""

import asyncio


class TokenBucket:
    """Lets `rate_per_second` through on average and `burst` at once; the rest waits in order."""

    def __init__(self, rate_per_second: float, burst: int) -> None:
        self._rate = rate_per_second
        self._burst = float(burst)
        self._tokens = float(burst)
        self._updated: float | None = None
        self._turn = asyncio.Lock()

    async def take(self) -> None:
        """Wait for one token."""
        async with self._turn:
            self._refill()
            if self._tokens < 1.0:
                await asyncio.sleep((1.0 - self._tokens) / self._rate)
                self._refill()
            self._tokens -= 1.0

    def try_take(self) -> bool:
        """Take one token if there is one now."""
        self._refill()
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    @property
    def wait_seconds(self) -> float:
        """How long until there is a token; 0 when there is one."""
        self._refill()
        return max(0.0, (1.0 - self._tokens) / self._rate)

    def _refill(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._updated is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate)
        self._updated = now
