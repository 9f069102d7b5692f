"""Clients of the completions endpoint on bare sockets, well-behaved and hostile ones.

A client library retries, pools and times out by itself, and none of them vanishes or reads a byte
a second on request. Each client here makes one connection and says how its request ended.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ANSWER_SECONDS = 600.0
"""Longer than a request may wait for admission and run, so that silence is an error."""


@dataclass(frozen=True)
class End:
    """How a request ended: `200`, `429` …, or in words where no status says it.

    `vanished` is the client's own doing; `cut` is a connection that the server closed.
    """

    how: str
    complete: bool = False
    words: str = ""


def head(length: int | None, path: str = "/v1/completions") -> bytes:
    """A request's head; chunked without a `length`."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return (
        f"POST {path} HTTP/1.1\r\nHost: m\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\n{framing}\r\n\r\n"
    ).encode()


class Client:
    """Sends requests to one port."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def post(self, body: dict[str, Any] | bytes) -> End:
        """Send at once, read to the end."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._talk(head(len(data)) + data)

    async def raw(self, sent: bytes) -> End:
        """Send these bytes, read to the end."""
        return await self._talk(sent)

    async def drip(self, start: bytes, drops: Iterator[bytes], every_seconds: float) -> End:
        """Send `start`, then a drop now and then, until the server has had enough."""
        async with self._connection() as (reader, writer):
            writer.write(start)

            async def go_on() -> None:
                with contextlib.suppress(OSError):
                    for drop in drops:
                        await asyncio.sleep(every_seconds)
                        writer.write(drop)
                        await writer.drain()

            dripping = asyncio.create_task(go_on())
            try:
                return await self._read(reader)
            finally:
                dripping.cancel()

    async def vanish(self, body: dict[str, Any], after_bytes: int, cut_body: bool) -> End:
        """Leave in the middle of the own body, or after so many bytes of the answer."""
        data = json.dumps(body).encode()
        async with self._connection() as (reader, writer):
            writer.write(head(len(data)) + (data[: len(data) // 2] if cut_body else data))
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await writer.drain()
                if after_bytes and not cut_body:
                    await asyncio.wait_for(reader.readexactly(after_bytes), ANSWER_SECONDS)
        return End("vanished")

    async def read_slowly(self, body: dict[str, Any], bytes_a_second: int, seconds: float) -> End:
        """Read the answer at a trickle for a while, then leave."""
        data = json.dumps(body).encode()
        async with self._connection(4096) as (reader, writer):
            writer.write(head(len(data)) + data)
            got = b""
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(seconds):
                    while more := await reader.read(max(1, bytes_a_second // 4)):
                        got += more if len(got) < 4096 else b""
                        await asyncio.sleep(0.25)
                    return _end_of(got, complete=False)
            return End("vanished")

    async def _talk(self, sent: bytes) -> End:
        try:
            async with self._connection() as (reader, writer):
                writer.write(sent)
                return await self._read(reader)
        except OSError as error:
            return End("cut", words=str(error))

    async def _read(self, reader: asyncio.StreamReader) -> End:
        got = b""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while more := await reader.read(65536):
                    got += more
        except TimeoutError:
            return End("silence", words=got[:200].decode(errors="replace"))
        except OSError as error:  # a reset after the answer is the end of a body nobody wanted
            if not got:
                return End("cut", words=str(error))
        return _end_of(got, complete=b"data: [DONE]" in got or got.endswith(b"}"))

    @contextlib.asynccontextmanager
    async def _connection(self, limit: int = 65536) -> Any:
        end = socket.socket()
        if limit < 65536:  # what the kernel holds for it is unread as well
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limit)
        end.setblocking(False)
        await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", self._port))
        reader, writer = await asyncio.open_connection(sock=end, limit=limit)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


def _end_of(got: bytes, *, complete: bool) -> End:
    if not got.startswith(b"HTTP/1.1 "):
        return End("cut", words=got[:200].decode(errors="replace"))
    status = got[9:12].decode()
    return End(status, complete, "" if status == "200" else got[-300:].decode(errors="replace"))
