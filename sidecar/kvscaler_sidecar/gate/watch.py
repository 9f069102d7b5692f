"""Looks at the engine's own page twice a second, and never takes an old look for a new one.

The engine's counters begin at 0 when it restarts and the gate's do not: what only the engine counts
is carried over, so that the sum never falls.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from kvscaler_sidecar.gate.adapters.seam import EngineAdapter, EngineReport, PageNotUnderstood
from kvscaler_sidecar.gate.headers import request_head
from kvscaler_sidecar.gate.upstream import EngineBroke, Upstream
from kvscaler_sidecar.server.errors import Refusal

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
ANSWER_SECONDS = 2.0
FRESH_SECONDS = 5.0
MAX_PAGE_BYTES = 4 * 1024 * 1024
NOT_SEEN = "the engine has not answered yet"


class EngineWatch:
    """The last look at the engine, and why there is no newer one."""

    def __init__(
        self, upstream: Upstream, adapter: EngineAdapter, seen: Callable[[EngineReport], None]
    ) -> None:
        self._upstream = upstream
        self._adapter = adapter
        self._seen = seen
        self._report: EngineReport | None = None
        self._looked_at = 0.0
        self._before: dict[str, float] = {}
        """Counts of engines that ended."""
        self.problem: str | None = NOT_SEEN

    @property
    def last(self) -> EngineReport | None:
        """The last look, however old: for what does not change."""
        return self._report

    @property
    def fresh(self) -> EngineReport | None:
        """The last look, if it is young enough to act on."""
        young = time.monotonic() - self._looked_at <= FRESH_SECONDS
        return self._report if young else None

    @property
    def counters(self) -> dict[str, float]:
        """Cumulative counts of the engine over all its lives."""
        now = self._report.counters if self._report is not None else {}
        return {n: self._before.get(n, 0) + now.get(n, 0) for n in {*now, *self._before}}

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """One look; a failure is a problem in words, and never raises."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                page = await self._fetch()
            report = self._adapter.read(page)
        except TimeoutError:
            self._trouble(f"the engine's page did not come within {ANSWER_SECONDS:g} s")
            return
        except Refusal as refusal:
            self._trouble(refusal.message)
            return
        except (EngineBroke, PageNotUnderstood) as error:
            self._trouble(str(error))
            return
        if self._report is not None and report.started_at != self._report.started_at:
            log.warning("the engine restarted")
            self._before = self.counters
        self._report, self._looked_at, self.problem = report, time.monotonic(), None
        self._seen(report)

    def _trouble(self, words: str) -> None:
        if self.problem != words:
            log.warning("no look at the engine", extra={"why": words})
        self.problem = words

    async def _fetch(self) -> bytes:
        upstream, path = self._upstream, self._adapter.report_path
        connection = await upstream.connection()
        try:
            head = request_head("GET", path.encode(), [], body_bytes=None, host=upstream.netloc)
            connection.send_head("GET", head)
            connection.request_sent = True
            answer = await connection.head(ANSWER_SECONDS)
            if answer.status != 200:
                raise PageNotUnderstood(f"{upstream.url}{path} answered {answer.status}")
            parts: list[bytes] = []
            length = 0
            while data := await connection.read(ANSWER_SECONDS):
                length += len(data)
                if length > MAX_PAGE_BYTES:
                    raise PageNotUnderstood(f"{path} has more than {MAX_PAGE_BYTES} bytes")
                parts.append(data)
            return b"".join(parts)
        finally:
            upstream.give_back(connection)
