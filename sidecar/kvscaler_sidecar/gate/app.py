"""Port 8000 of a gate: everything passes to the engine as it is, once there is room for it.

The order keeps two promises: a request that is refused gets its status before anything was sent,
and a client that leaves, at any time, has its request to the engine closed at once.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from email.utils import formatdate

from kvscaler.protocol.refusals import RefusalReason
from starlette.types import ASGIApp, Receive, Scope, Send

from kvscaler_sidecar.gate.account import Account, GateCounts
from kvscaler_sidecar.gate.adapters.seam import EngineAdapter
from kvscaler_sidecar.gate.charge import UNKNOWN_ENDPOINT, Asked, Work, read_body, work_of
from kvscaler_sidecar.gate.desk import Desk
from kvscaler_sidecar.gate.headers import (
    BODILESS_STATUSES,
    Headers,
    asks_for_websocket,
    end_to_end,
    is_chunked,
    request_head,
)
from kvscaler_sidecar.gate.upstream import Connection, EngineBroke, Upstream
from kvscaler_sidecar.metrics import Latencies
from kvscaler_sidecar.server.door import Door
from kvscaler_sidecar.server.errors import Refusal
from kvscaler_sidecar.server.exchange import (
    BODY_BYTES_PER_SECOND,
    BODY_START_SECONDS,
    ClientGone,
    Exchange,
)
from kvscaler_sidecar.server.held import Hold
from kvscaler_sidecar.server.intake import Intake

log = logging.getLogger(__name__)

METRICS_PATH = "/metrics"


class GateServer:
    """The application. `desk` is `None` until the engine has said what it has."""

    def __init__(
        self,
        *,
        engine: Upstream,
        engine_metrics: Upstream,
        adapter: EngineAdapter,
        desk: Callable[[], Desk | None],
        problem: Callable[[], str | None],
        door: Door,
        max_body_bytes: int,
        silence_seconds: float,
        latencies: Latencies,
    ) -> None:
        self.engine = engine
        self.engine_metrics = engine_metrics
        self.adapter = adapter
        self.door = door
        self.intake = Intake(max_body_bytes)
        self.silence_seconds = silence_seconds
        self.latencies = latencies
        self.counts = GateCounts()
        self._desk = desk
        self._problem = problem

    def ready_desk(self) -> Desk:
        """Admission, once there is any; raises `Refusal`."""
        desk = self._desk()
        if desk is None:
            raise Refusal(
                RefusalReason.NOT_READY,
                f"The engine is not ready ({self._problem() or 'it has no KV cache yet'}); "
                "try again shortly.",
                retry_after_seconds=2,
            )
        return desk

    def app(self) -> ASGIApp:
        """The ASGI application."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return
            passage = _Passage(self, scope, Exchange(scope, receive, send))
            await self.door.handle(passage.exchange, self.door.counted(passage.go))

        return serve


class _Passage:
    """One request on its way through."""

    def __init__(self, gate: GateServer, scope: Scope, exchange: Exchange) -> None:
        self._gate = gate
        self.exchange = exchange
        self._method: str = scope["method"]
        self._path: str = scope["path"]
        query: bytes = scope["query_string"]
        raw: bytes = scope.get("raw_path") or self._path.encode()
        self._target = raw + b"?" + query if query else raw
        self._headers: Headers = list(scope["headers"])
        self._body: bytes | None = None
        """A body that was read in full, until it is on its way; `None` passes it as it comes."""
        self._hold: Hold | None = None
        self._left = False
        self._refusal: Refusal | None = None
        """Why the body was not passed to its end."""

    async def go(self, _: Exchange) -> None:
        """All of it; raises `Refusal` and `ClientGone`."""
        gate = self._gate
        if asks_for_websocket(self._headers):
            self.exchange.extra_headers.append(("connection", "close"))
            raise self._dated(
                Refusal(
                    RefusalReason.UPGRADE_UNSUPPORTED,
                    "This gate passes HTTP only, no WebSocket. Use the HTTP API.",
                )
            )
        work = work_of(self._method, self._path)
        try:
            if work is Work.NONE:
                metrics = self._method in ("GET", "HEAD") and self._path == METRICS_PATH
                await self._pass(gate.engine_metrics if metrics else gate.engine, None)
            else:
                gate.door.check_open()
                await self._charged(work)
        except Refusal as refusal:
            raise self._dated(refusal) from None

    def _dated(self, refusal: Refusal) -> Refusal:
        """The engine gives its answers a date; ours need one too."""
        self.exchange.extra_headers.append(("date", formatdate(usegmt=True)))
        return refusal

    async def _charged(self, work: Work) -> None:
        gate = self._gate
        desk = gate.ready_desk()
        with gate.intake.hold() as hold:
            self._hold = hold
            asked: Asked = UNKNOWN_ENDPOINT
            if work is not Work.UNKNOWN:
                self._body, asked, _ = await gate.intake.read(self.exchange, read_body, hold)
            await self._admitted(desk, work, asked)

    async def _admitted(self, desk: Desk, work: Work, asked: Asked) -> None:
        gate, in_hand = self._gate, self._body is not None
        default = gate.adapter.default_output_tokens(self._path)
        charged = desk.charge(self._path, asked, work, default)
        gate.counts.charges[str(charged.basis)] += 1
        body_bytes = len(self._body or b"")
        async with desk.admitted(self.exchange, charged, body_bytes, body_read=in_hand) as gated:
            for sequence in gated.sequences:
                gate.latencies.prompt_length.observe(sequence.prompt_tokens)
            account = Account(gate, desk, self._path, charged, gated)
            try:
                await self._pass(gate.engine, account)
            except Refusal as refusal:
                account.refused(refusal.reason)
                refusal.counted = True
                raise

    async def _pass(self, upstream: Upstream, account: Account | None) -> None:
        """Send the request on and its answer back."""
        connection = await upstream.connection()
        length = None if self._body is None else len(self._body)
        head = request_head(
            self._method, self._target, self._headers, body_bytes=length, host=upstream.netloc
        )
        connection.send_head(self._method, head)
        feed = asyncio.create_task(self._feed(connection), name="gate-feed")
        try:
            await self._answer(connection, account)
        except (Refusal, EngineBroke):
            if self._refusal is not None and not self.exchange.started:
                raise self._refusal from None
            if self._left:
                raise ClientGone from None
            raise
        finally:
            feed.cancel()
            self.exchange.close()
            upstream.give_back(connection)

    async def _feed(self, connection: Connection) -> None:
        """The body to the engine, then watch the client; when it leaves, so do we."""
        try:
            if self._body is None:
                await self._feed_parts(connection)
            else:
                # Not kept while the answer lasts: a hundred streams would keep a hundred bodies.
                body, self._body = self._body, b""
                await connection.write(body)
                del body
                if self._hold is not None:
                    self._hold.release()
            connection.request_sent = True
            await self.exchange.watch_disconnect()
        except ClientGone:
            pass
        except TimeoutError:
            self._refusal = Refusal(
                RefusalReason.REQUEST_TIMEOUT,
                "The request body came too slowly. Send it at once.",
            )
        self._left = True
        connection.abort()

    async def _feed_parts(self, connection: Connection) -> None:
        """Pass the body on as it comes; a client that stops sending must not keep its room."""
        chunked = is_chunked(self._headers)
        parts = self.exchange.body_parts()
        received, waited = 0, 0.0
        while True:
            began = time.monotonic()
            patience = BODY_START_SECONDS + received / BODY_BYTES_PER_SECOND - waited
            async with asyncio.timeout(patience):
                part = await anext(parts, None)
            if part is None:
                break
            waited += time.monotonic() - began
            received += len(part)
            await connection.write(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
        if chunked:
            await connection.write(b"0\r\n\r\n")

    async def _answer(self, connection: Connection, account: Account | None) -> None:
        gate = self._gate
        answer = await connection.head(gate.silence_seconds)
        headers = end_to_end(answer.headers)
        if answer.status in BODILESS_STATUSES:
            headers = [(n, v) for n, v in headers if n.lower() != b"content-length"]
        if account is not None:
            account.begin(answer)
        await self.exchange.start_raw(answer.status, headers)
        try:
            while data := await connection.read(gate.silence_seconds):
                if account is not None:
                    account.feed(data)
                await self.exchange.write(data)
        except EngineBroke as broke:
            if self._left:
                raise ClientGone from None
            # Nothing can be said any more: the answer stays without an end, and the client sees it.
            gate.counts.broken += 1
            if account is not None:
                account.broke()
            log.warning("an answer broke", extra={"path": self._path[:200], "why": str(broke)})
            return
        if account is not None:
            account.end()
        await self.exchange.write(b"", more=False)
