"""One HTTP request and its response on bare ASGI: bounded reading, and knowing when a client left.

Starlette's request and response objects either read a whole body into memory or tie the watch for
a disconnect to a response that has started. A request that waits for admission needs both the
bound and the watch before there is a response, so this is done here, once.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

from kvscaler.protocol.refusals import RefusalReason
from starlette.types import Message, Receive, Scope, Send

from kvscaler_sidecar.server.errors import Refusal
from kvscaler_sidecar.server.held import Hold

log = logging.getLogger(__name__)

BODY_SECONDS = 60.0
"""Longest time for a body, however long it is."""
BODY_START_SECONDS = 10.0
BODY_BYTES_PER_SECOND = 16 * 1024
"""A body that comes slower than this, after `BODY_START_SECONDS`, is given up: what has come of it
is held meanwhile, and takes room from others."""
UNREAD_SECONDS = 60.0
"""How long a client may leave an answer unread before its connection is cut."""
ABORT = "kvscaler.abort"
"""ASGI extension: `scope["extensions"][ABORT]["abort"]()` closes the connection, sending nothing."""


class ClientGone(Exception):
    """The client closed the connection before the response was complete."""


class Exchange:
    """A request that can be read once and answered once."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None
        self.extra_headers: list[tuple[str, str]] = []
        self.started = False

    def header(self, name: bytes) -> str | None:
        """A request header's value; `name` in lower case."""
        for key, value in self._scope["headers"]:
            if key == name:
                return str(value.decode("latin-1"))
        return None

    def path_parameter(self, name: str) -> str:
        """A parameter of the route's path."""
        return str(self._scope["path_params"][name])

    async def read_body(self, limit_bytes: int, hold: Hold | None = None) -> bytes:
        """The body, at most `limit_bytes`, counted into `hold` as it comes.

        A longer one is refused by its Content-Length before a byte of it is read, and by counting
        when it comes in chunks; never more than the limit is held in memory. A client that sends
        too slowly is refused too: it would hold up a drain and keep memory from others.
        """
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
            raise _too_large(f"{int(declared)} bytes", limit_bytes)
        loop = asyncio.get_running_loop()
        began = loop.time()
        parts: list[bytes] = []
        length = 0
        complete = False
        try:
            async with asyncio.timeout_at(began + BODY_START_SECONDS) as patience:
                while not complete:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk = message.get("body", b"")
                    length += len(chunk)
                    if length > limit_bytes:
                        raise _too_large(f"more than {limit_bytes} bytes", limit_bytes)
                    if hold is not None:
                        hold.add(len(chunk))
                    parts.append(chunk)
                    complete = not message.get("more_body", False)
                    allowed = BODY_START_SECONDS + length / BODY_BYTES_PER_SECOND
                    patience.reschedule(began + min(BODY_SECONDS, allowed))
        except TimeoutError:
            raise Refusal(
                RefusalReason.REQUEST_TIMEOUT,
                f"{length} bytes of the request body arrived within {loop.time() - began:.0f} s. "
                "Send it at once.",
            ) from None
        return b"".join(parts)

    async def body_parts(self) -> AsyncIterator[bytes]:
        """The body as it comes, for who passes it on.

        Raises `ClientGone`, also for a client of which nothing comes for `BODY_SECONDS`: its
        connection is cut.
        """
        more = True
        while more:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    message = await self._receive()
            except TimeoutError:
                self.abort()
                raise ClientGone from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]

    def watch_disconnect(self) -> asyncio.Task[None]:
        """A task that ends when the client leaves; call after the body is read."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._wait_disconnect(), name="disconnect-watch")
        return self._watch

    async def _wait_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        """Stop watching; the request is over."""
        if self._watch is not None:
            self._watch.cancel()

    def abort(self) -> None:
        """Close the connection without another word; what is unsent is dropped."""
        extension = self._scope.get("extensions", {}).get(ABORT)
        if extension is not None:
            extension["abort"]()

    async def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Send status and headers."""
        await self.start_raw(status, _raw(headers))

    async def start_raw(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send status and headers of an answer that is passed on."""
        self.started = True
        both = [*headers, *_raw(self.extra_headers)]
        await self._send_in_time({"type": "http.response.start", "status": status, "headers": both})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body; waits while the client reads slowly, `UNREAD_SECONDS` at most.

        Then the connection is cut and `ClientGone` raised: what is not read is held in memory, and
        a drain waits for it.
        """
        await self._send_in_time({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_in_time(self, message: Message) -> None:
        try:
            async with asyncio.timeout(UNREAD_SECONDS):
                await self._send(message)
        except TimeoutError:
            log.info("cut: the client does not read", extra={"seconds": UNREAD_SECONDS})
            self.abort()
            await asyncio.sleep(0)  # until the server knows that its connection is lost
            raise ClientGone from None

    async def send_json(
        self, status: int, payload: Any, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """A whole JSON response."""
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
        data = text.encode(errors="replace")  # an error may quote half a surrogate pair
        base = [("content-type", "application/json"), ("content-length", str(len(data)))]
        await self.start(status, [*base, *headers])
        await self.write(data, more=False)

    async def refuse(self, refusal: Refusal) -> None:
        """The response of a refusal."""
        await self.send_json(refusal.status, refusal.body, refusal.headers)


def _too_large(length: str, limit_bytes: int) -> Refusal:
    return Refusal(
        RefusalReason.BODY_TOO_LARGE,
        f"The request body has {length}; this server reads at most {limit_bytes} bytes "
        "(--max-body-bytes). Send a shorter prompt.",
    )


def _raw(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
