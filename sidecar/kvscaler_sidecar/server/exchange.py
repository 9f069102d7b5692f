"""One HTTP request and its response on bare ASGI: bounded reading, and knowing when a client left.

Starlette's request and response objects either read a whole body into memory or tie the watch for
a disconnect to a response that has started. A request that waits for admission needs both the
bound and the watch before there is a response, so this is done here, once.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from kvscaler.protocol.refusals import RefusalReason
from starlette.types import Receive, Scope, Send

from kvscaler_sidecar.server.errors import Refusal

BODY_SECONDS = 60.0


class ClientGone(Exception):
    """The client closed the connection before the response was complete."""


class HeldBytes:
    """Bytes of all bodies that are being read or parsed: bounded, since memory is.

    Admission bounds what waits after that. Bytes count as they come, so that a client can't take
    room by announcing what it does not send.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.bytes = 0

    def add(self, count: int) -> None:
        """Count more bytes, or refuse their request."""
        if self.bytes + count > self._limit_bytes:
            raise Refusal(
                RefusalReason.QUEUE_BYTES_FULL,
                f"Request bodies of {self.bytes} bytes are being read; try again shortly.",
                retry_after_seconds=1,
            )
        self.bytes += count

    def release(self, count: int) -> None:
        """Bytes that are no longer held."""
        self.bytes -= count


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

    async def read_body(self, limit_bytes: int, held: HeldBytes | None = None) -> bytes:
        """The body, at most `limit_bytes`, counted into `held` until the caller releases it.

        A longer one is refused by its Content-Length before a byte of it is read, and by counting
        when it comes in chunks; never more than the limit is held in memory. A client that does
        not finish within `BODY_SECONDS` is refused too: it would hold up a drain.
        """
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._read_body(limit_bytes, held)
        except TimeoutError:
            raise Refusal(
                RefusalReason.INVALID_REQUEST,
                f"The request body did not arrive within {BODY_SECONDS:.0f} s. Send it at once.",
            ) from None

    async def _read_body(self, limit_bytes: int, held: HeldBytes | None) -> bytes:
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
            raise _too_large(f"{int(declared)} bytes", limit_bytes)
        parts: list[bytes] = []
        length = counted = 0
        complete = False
        try:
            while not complete:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                length += len(chunk)
                if length > limit_bytes:
                    raise _too_large(f"more than {limit_bytes} bytes", limit_bytes)
                if held is not None:
                    held.add(len(chunk))
                    counted += len(chunk)
                parts.append(chunk)
                complete = not message.get("more_body", False)
        finally:
            if held is not None and not complete:
                held.release(counted)
        return b"".join(parts)

    async def body_parts(self) -> AsyncIterator[bytes]:
        """The body as it comes, for who passes it on; raises `ClientGone`."""
        more = True
        while more:
            message = await self._receive()
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

    async def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Send status and headers."""
        await self.start_raw(status, _raw(headers))

    async def start_raw(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send status and headers of an answer that is passed on."""
        self.started = True
        both = [*headers, *_raw(self.extra_headers)]
        await self._send({"type": "http.response.start", "status": status, "headers": both})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body; waits while the client reads slowly."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

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
