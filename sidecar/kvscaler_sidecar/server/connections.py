"""What a client may do to a connection: uvicorn's protocol with bounds on time, number and memory.

uvicorn bounds the idle time after a response and nothing else: a head may come a byte a minute,
headers and pipelined requests may be as many as memory holds, and a cap on connections would
refuse the probes first. Here a connection without a request in service has a deadline, what one
connection holds before a request is served is bounded, and where connections are used up the one
that has waited longest for its client makes room, so that nobody gains by holding many.

A request in service is never cut here: its body's time is `Exchange.read_body`'s, and how long a
client may leave an answer unread is `Exchange.write`'s.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvscaler.protocol.refusals import RefusalReason
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvscaler_sidecar.server.errors import Refusal, error_body
from kvscaler_sidecar.server.exchange import ABORT, Exchange

SPARE_CONNECTIONS = 64
"""Above the cap and still told so by a 503; beyond these a connection is closed without a word."""
MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 * 1024
"""Of a request that are no body: head, trailers, and what chunks need beyond `CHUNK_OVERHEAD`."""
CHUNK_OVERHEAD = 8
"""Bytes around each byte of a body that comes in the smallest chunks."""
MAX_PIPELINED = 8
"""Requests of one connection that wait behind the one in service; each holds kilobytes."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of one listener."""

    connections: int = 1024
    """Open at a time; with all of them in service, the next is refused."""
    per_client: int | None = None
    """Of them, from one address; `None` where one address may be a proxy for everybody."""
    head_seconds: float = 10.0
    """From a connection's start, or a request's first byte, to the end of the head."""
    idle_seconds: int = 75
    """Between two requests; longer than in common proxies, so that the proxy closes first."""
    linger_seconds: float = 5.0
    """In which the rest of a body is thrown away whose request was answered before its end."""


class _TooMuch(Exception):
    """Raised into the parser: the connection is told that its request is malformed, and closed."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Its clock runs while no request is in service."""

    def __init__(
        self,
        *args: Any,
        limits: ConnectionLimits,
        refused: Callable[[RefusalReason], None],
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self._limits = limits
        self._refused = refused
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_since: float | None = None
        """Since when nothing is in service; `None` while something is."""
        self._in_head = True
        self._in_message = False
        self._messages = 0
        self._head_bytes = 0
        self._body_bytes = 0
        """Of the body, in the data that is being parsed."""

    @property
    def in_service(self) -> bool:
        """Whether a request was received and is not yet answered in full."""
        return self.cycle is not None and not self.cycle.response_complete

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        self._set_deadline(self._limits.head_seconds)
        if self._limits.per_client is not None and self._siblings() > self._limits.per_client:
            self._cut()
            return
        excess = len(self.connections) - self._limits.connections
        if excess > 0 and self._make_room():
            excess -= 1
        if excess > SPARE_CONNECTIONS:
            self._refused(RefusalReason.CONNECTIONS_FULL)
            self._cut()
        elif excess > 0:
            self.app = self._refuse

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _siblings(self) -> int:
        """Connections of the same client, this one included."""
        address = self.client[0] if self.client else None
        return sum(
            isinstance(each, GuardedProtocol)
            and each.client is not None
            and each.client[0] == address
            for each in self.connections
        )

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for its client; never one in service."""
        waiting = [
            connection
            for connection in self.connections
            if isinstance(connection, GuardedProtocol)
            and connection is not self
            and connection._waits_since is not None
        ]
        if not waiting:
            return False
        min(waiting, key=lambda connection: connection._waits_since or 0.0)._cut()
        return True

    def _cut(self) -> None:
        self.connections.discard(self)
        self._clear_deadline()
        self.transport.abort()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        exchange.extra_headers.append(("connection", "close"))
        self._refused(RefusalReason.CONNECTIONS_FULL)
        await exchange.refuse(
            Refusal(
                RefusalReason.CONNECTIONS_FULL,
                f"All {self._limits.connections} connections of this replica are in use; try "
                "again shortly, or use another replica.",
                retry_after_seconds=1,
            )
        )

    # Time

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._late)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            self.transport.abort()  # what was written is not being read
        elif self.in_service:
            # A pipelined head that does not go on: nobody waits for it while another is answered.
            self._set_deadline(self._limits.head_seconds)
        elif self._in_head and self._head_bytes:
            self._answer(
                408,
                RefusalReason.REQUEST_TIMEOUT,
                f"The request's head did not arrive within {self._limits.head_seconds:g} s.",
            )
        else:
            self.transport.close()

    # What comes in

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        messages, self._body_bytes = self._messages, 0
        super().data_received(data)
        if self.transport.is_closing():
            return
        if messages == self._messages:
            head_bytes = self._head_bytes + len(data) - CHUNK_OVERHEAD * self._body_bytes
            self._head_bytes = max(0, head_bytes)
        else:  # the next one begins in this data, if at all
            self._head_bytes = int(self._in_message)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._too_long()
        elif not self.in_service and self._deadline is None and not self.timeout_keep_alive_task:
            self._set_deadline(self._limits.head_seconds)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise _TooMuch(f"more than {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _TooMuch(f"more than {MAX_PIPELINED} requests wait behind one")
        self._in_head = False
        super().on_headers_complete()
        self._waits_since = None
        self._clear_deadline()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message = False
        self._in_head = True
        self._messages += 1
        if not self.in_service:
            self._clear_deadline()  # of a body that nobody wanted; the next head has its own

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self.in_service:
            return  # what is written is being read; the kernel ends it when that stops
        self._waits_since = self.loop.time()
        if self._in_message:
            self._unset_keepalive_if_required()
            self._set_deadline(self._limits.linger_seconds)

    def send_400_response(self, msg: str) -> None:
        """Of the parser, for what is no HTTP; never into the middle of an answer."""
        if self.in_service:
            self._cut()
        else:
            self._answer(400, RefusalReason.INVALID_REQUEST, msg)

    def _too_long(self) -> None:
        if self.in_service:
            self._cut()
        else:
            message = f"The request's head is longer than {MAX_HEAD_BYTES} bytes."
            self._answer(431, RefusalReason.INVALID_REQUEST, message)

    def _answer(self, status: int, reason: RefusalReason, message: str) -> None:
        """The last words on a connection whose request never came to be."""
        self._refused(reason)
        body = json.dumps(error_body(status, message, None, str(reason))).encode()
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        self.transport.close()
        self._set_deadline(self._limits.linger_seconds)
