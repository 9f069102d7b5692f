"""Connections to the engine: HTTP/1.1, kept alive, read as it comes, closed at once when told.

Small on purpose: one host, no redirects, no decoding, no retries of what the engine may have begun.
What a hostile or dying engine can do to it ends in one of two ways: a `Refusal` before the answer
began, or `EngineBroke` after it.
"""

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
from kvscaler.protocol.refusals import RefusalReason

from kvscaler_sidecar.gate.headers import BODILESS_STATUSES, value_of
from kvscaler_sidecar.server.errors import Refusal

MAX_HEAD_BYTES = 64 * 1024
HIGH_WATER_BYTES = 256 * 1024
"""An answer that a client reads slowly is read from the engine no further ahead than this."""
IDLE_SECONDS = 2.0
"""Shorter than engines keep an idle connection, so that none closes one that is being used."""
MAX_IDLE = 256


class EngineBroke(Exception):
    """The engine closed or spoilt an answer that had begun."""


@dataclass(slots=True)
class Answer:
    """The head of an answer."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._changed = asyncio.Event()
        self._lost = False
        self._paused = False
        self.idle_since = 0.0
        self._begin("")

    def _begin(self, method: str) -> None:
        self._method = method
        self._parser = None
        self._answer = Answer()
        self._head_bytes = 0
        self._head_done = False
        self._until_eof = False
        self._complete = False
        self._reusable = False
        self.request_sent = False
        """Set by the caller when the whole request is on its way."""
        self._fault: str | None = None
        self._body: deque[bytes] = deque()
        self._body_bytes = 0
        self._changed.clear()

    # Used by the gate

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        transport = self._transport
        return not self._lost and transport is not None and not transport.is_closing()

    def send_head(self, method: str, head: bytes) -> None:
        """Begin a request."""
        assert self._transport is not None
        self._begin(method)
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(head)

    async def write(self, data: bytes) -> None:
        """Send a part of the body; waits while the engine reads slowly.

        An engine that has closed its side reads no more; what it answered is still read.
        """
        if self._transport is not None and self.usable:
            self._transport.write(data)
            await self._writable.wait()

    async def head(self, silence_seconds: float) -> Answer:
        """The head of the answer; raises `Refusal`."""
        try:
            async with asyncio.timeout(silence_seconds):
                while not self._head_done and self._fault is None:
                    await self._change()
        except TimeoutError:
            self.abort()
            raise Refusal(
                RefusalReason.ENGINE_TIMEOUT,
                f"The engine began no answer within {silence_seconds:g} s.",
            ) from None
        if not self._head_done:
            raise Refusal(
                RefusalReason.ENGINE_BROKE,
                f"The engine {self._fault} before it answered; try again.",
                retry_after_seconds=1,
            )
        return self._answer

    async def read(self, silence_seconds: float) -> bytes:
        """What has come of the body, as soon as there is any; empty at its end.

        Raises `EngineBroke`.
        """
        try:
            async with asyncio.timeout(silence_seconds):
                while not self._body and not self._complete and self._fault is None:
                    await self._change()
        except TimeoutError:
            self.abort()
            raise EngineBroke(f"the engine sent nothing for {silence_seconds:g} s") from None
        if self._body:
            data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
            self._body_bytes = 0
            if self._paused and self.usable:
                self._paused = False
                cast(asyncio.Transport, self._transport).resume_reading()
            return data
        if self._complete:
            return b""
        raise EngineBroke(f"the engine {self._fault} in the middle of its answer")

    def abort(self) -> None:
        """Close at once: the engine learns that nobody waits."""
        if self._transport is not None:
            self._transport.abort()
        self._fail("was left")

    @property
    def reusable(self) -> bool:
        """Whether the answer has ended in a way that lets another request follow."""
        return (
            self._complete
            and self._reusable
            and self.request_sent
            and not self._body
            and not self._paused
            and self.usable
        )

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _fail(self, fault: str) -> None:
        if not self._complete and self._fault is None:
            self._fault = fault
        self._reusable = False
        self._writable.set()
        self._changed.set()

    # From asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A new connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of another class

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer, or of nothing that was asked for."""
        if self._parser is None or self._complete:
            self.abort()
            return
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._spoilt(f"sent what is no HTTP ({error})")
            return
        if not self._head_done and self._head_bytes > MAX_HEAD_BYTES:
            self._spoilt(f"sent a head of more than {MAX_HEAD_BYTES} bytes")
        elif self._body_bytes > HIGH_WATER_BYTES and not self._paused and self.usable:
            self._paused = True
            cast(asyncio.Transport, self._transport).pause_reading()
        self._changed.set()

    def eof_received(self) -> bool:
        """The engine closes: the end of an answer that has no other."""
        if self._until_eof and self._head_done and self._fault is None:
            self._complete = True
        self._fail("closed the connection")
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        self._lost = True
        self._fail("closed the connection")

    def pause_writing(self) -> None:
        """The engine reads slowly."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It has read."""
        self._writable.set()

    # From the parser

    def on_message_begin(self) -> None:
        """A head begins; one behind a whole answer was not asked for."""
        if self._complete:
            self._reusable = False
            if self._transport is not None:
                self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head; what comes behind the body is dropped."""
        if not self._head_done:
            self._answer.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is whole, unless it was an interim one."""
        assert self._parser is not None
        if self._complete:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            return
        headers = self._answer.headers
        coding = value_of(headers, b"transfer-encoding")
        chunked = coding is not None and coding.strip().lower() == b"chunked"
        if not 200 <= status <= 599 or (coding is not None and not chunked):
            self._spoilt(f"answered with status {status} and transfer coding {coding!r}")
            return
        self._answer.status = status
        self._head_done = True
        bodiless = self._method == "HEAD" or status in BODILESS_STATUSES
        framed = chunked or value_of(headers, b"content-length") is not None
        self._until_eof = not bodiless and not framed
        if self._method == "HEAD":
            # The parser would wait for the body that the length announces.
            self._complete, self._reusable = True, self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        if not self._complete:
            self._body.append(data)
            self._body_bytes += len(data)

    def on_message_complete(self) -> None:
        """The answer is whole, or the interim one is."""
        assert self._parser is not None
        if self._complete or self._fault is not None:
            return
        if not self._head_done:
            self._answer = Answer()
            return
        self._complete, self._reusable = True, self._parser.should_keep_alive()

    def _spoilt(self, fault: str) -> None:
        self._fail(fault)
        if self._transport is not None:
            self._transport.abort()


class Upstream:
    """Connections to one address, the youngest idle one first."""

    def __init__(self, url: str, connect_seconds: float) -> None:
        split = urlsplit(url)
        assert split.hostname is not None and split.port is not None
        self.url = url
        self.netloc = split.netloc.encode("ascii")
        self._host, self._port = split.hostname, split.port
        self._connect_seconds = connect_seconds
        self._idle: list[Connection] = []

    async def connection(self) -> Connection:
        """A connection that is ready for a request; raises `Refusal`."""
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now - connection.idle_since <= IDLE_SECONDS:
                return connection
            connection.abort()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, made = await loop.create_connection(Connection, self._host, self._port)
                return made
        except TimeoutError:
            raise Refusal(
                RefusalReason.ENGINE_TIMEOUT,
                f"The engine accepted no connection within {self._connect_seconds:g} s.",
            ) from None
        except OSError as error:
            raise Refusal(
                RefusalReason.ENGINE_UNREACHABLE,
                f"The engine can't be reached ({error.strerror or error}); it may be starting. "
                "Try again shortly.",
                retry_after_seconds=2,
            ) from None

    def give_back(self, connection: Connection) -> None:
        """The request is over, in whatever way."""
        if connection.reusable and len(self._idle) < MAX_IDLE:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()

    def close(self) -> None:
        """Close idle connections."""
        for connection in self._idle:
            with contextlib.suppress(RuntimeError):
                connection.abort()
        self._idle.clear()
