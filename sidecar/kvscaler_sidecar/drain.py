"""The drain of a replica: it finishes what it accepted, and says goodbye before it refuses.

Serving → Lingering (not ready, still accepting, answers say `Connection: close`) → Draining
(refusing) → Empty. The linger is for the way that news takes from a readiness probe to each
client: a replica that refuses at once breaks requests that were sent in good faith.

A drain that the admin API began can be taken back; one by SIGTERM can't, and ends the process.
"""

from collections.abc import Callable
from threading import Lock

from kvscaler.protocol.drain import DrainPhase, DrainReport

ADMIN = "admin"
SIGTERM = "sigterm"


class Drain:
    """The phase of this process. Thread-safe.

    Times are measured by `clock`, which must never be set: a step of the wall clock would end a
    drain early and break its streams. `unix_clock` only says when it began.
    """

    def __init__(
        self,
        linger_seconds: float,
        timeout_seconds: float,
        live_requests: Callable[[], int],
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        self._linger_seconds = linger_seconds
        self._timeout_seconds = timeout_seconds
        self._live_requests = live_requests
        self._clock = clock
        self._unix_clock = unix_clock
        self._lock = Lock()
        self._since: float | None = None
        self._since_unix: float | None = None
        self._reason = ""
        self._sigterm_at: float | None = None

    def begin(self, reason: str, timeout_seconds: float | None = None) -> None:
        """Start a drain, or keep the one that runs; SIGTERM takes over one by the admin API.

        `timeout_seconds` replaces the configured time that SIGTERM will leave to streams.
        """
        with self._lock:
            if self._since is None:
                self._since, self._since_unix = self._clock(), self._unix_clock()
            if self._sigterm_at is not None:
                return
            self._reason = reason
            if timeout_seconds is not None:
                self._timeout_seconds = timeout_seconds
            if reason == SIGTERM:
                self._sigterm_at = self._clock()

    def cancel(self) -> bool:
        """Serve again; false when the drain came by SIGTERM and can't be taken back."""
        with self._lock:
            if self._sigterm_at is not None:
                return False
            self._since, self._since_unix, self._reason = None, None, ""
            return True

    @property
    def phase(self) -> DrainPhase:
        """Where the drain is now."""
        since = self._since
        if since is None:
            return DrainPhase.SERVING
        if self._clock() - since < self._linger_seconds:
            return DrainPhase.LINGERING
        return DrainPhase.DRAINING if self._live_requests() else DrainPhase.EMPTY

    @property
    def by_sigterm(self) -> bool:
        """Whether the process ends when this drain does."""
        return self._sigterm_at is not None

    @property
    def over(self) -> bool:
        """Whether a process that got SIGTERM may end: nothing is left, or the time is up.

        The time counts from SIGTERM, however long the admin API had drained before.
        """
        if self._sigterm_at is None:
            return False
        timed_out = self._clock() - self._sigterm_at >= self._timeout_seconds
        return timed_out or self.phase is DrainPhase.EMPTY

    def report(self) -> DrainReport:
        """For `/state` and the admin API."""
        return DrainReport(
            phase=self.phase,
            since=self._since_unix,
            live_requests=self._live_requests(),
            reason=self._reason,
        )
