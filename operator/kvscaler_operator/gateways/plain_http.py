"""The plainest HTTP there is, for a thousand small answers a second.

A general client spends five times as long on a request as on what is in it. Here a connection is
kept for each address, one request is under way on it at a time, and exactly one form of answer is
understood: HTTP/1.1, status 200, a Content-Length within the bound, not encoded. Whatever else
arrives is no error but `None`: the caller then asks with a client that knows all of HTTP, and that
one says what is wrong.
"""

import asyncio
import re

HEAD_BYTES = 8 * 1024
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,9}) *(?=\r\n)", re.IGNORECASE)
_NOT_PLAIN = re.compile(rb"\r\n(?:transfer-encoding|content-encoding):", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


class _Connection(asyncio.Protocol):
    """One connection. `ask` fails with `ConnectionError` when it ends before an answer."""

    def __init__(self, largest_bytes: int) -> None:
        self._largest = largest_bytes
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._answer: asyncio.Future[bytes | None] | None = None
        self.reusable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self, request: bytes) -> "asyncio.Future[bytes | None]":
        """Send a request; the future gets the body of a plain answer, or `None`."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nobody asked
            return
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            if len(self._received) > HEAD_BYTES:
                self._finish(None)
            return
        length = self._body_bytes(bytes(self._received[: end + 2]))
        if length is None or len(self._received) > end + 4 + length:
            self._finish(None)
        elif len(self._received) == end + 4 + length:
            self._finish(bytes(self._received[end + 4 :]))

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._answer is not None and not self._answer.done():
            words = str(error) if error is not None else "the connection was closed"
            self._answer.set_exception(ConnectionError(words))

    def close(self) -> None:
        """Close at once."""
        self.reusable = False
        self._transport.abort()

    def _body_bytes(self, head: bytes) -> int | None:
        """Bytes of the body that a plain head announces; `None` for any other head."""
        lengths = _LENGTH.findall(head)
        if not head.startswith(b"HTTP/1.1 200 ") or len(lengths) != 1 or _NOT_PLAIN.search(head):
            return None
        if _CLOSES.search(head):
            self.reusable = False
        return length if (length := int(lengths[0])) <= self._largest else None

    def _finish(self, body: bytes | None) -> None:
        assert self._answer is not None
        self._received.clear()
        answer, self._answer = self._answer, None
        answer.set_result(body)
        if body is None or not self.reusable:
            self.close()


class PlainClient:
    """Plain GETs of one path, each on its address's own connection."""

    def __init__(self, path: str, largest_bytes: int) -> None:
        self._path = path
        self._largest = largest_bytes
        self._idle: dict[tuple[str, int], _Connection] = {}

    def close(self) -> None:
        """Close all connections."""
        for connection in self._idle.values():
            connection.close()
        self._idle.clear()

    async def get(self, ip: str, port: int, timeout_seconds: float) -> bytes | None:
        """The body; `None` when the answer has any other form than the plain one.

        Raises `TimeoutError` or `OSError`.
        """
        address = (ip, port)
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(timeout_seconds):
                connection = self._idle.pop(address, None)
                if connection is not None and connection.reusable:
                    try:
                        body = await connection.ask(self._request(ip, port))
                    except ConnectionError:
                        connection = None  # it was closed as idle: no fault of the replica
                    else:
                        return self._keep(address, connection, body)
                connection = await self._connect(ip, port)
                body = await connection.ask(self._request(ip, port))
                return self._keep(address, connection, body)
        except BaseException:
            if connection is not None:
                connection.close()
            raise

    def _keep(
        self, address: tuple[str, int], connection: _Connection, body: bytes | None
    ) -> bytes | None:
        if connection.reusable:
            other = self._idle.pop(address, None)
            if other is not None:
                other.close()
            self._idle[address] = connection
        return body

    def forget(self, ips: set[str]) -> None:
        """Close the connections to all other addresses than these."""
        for address in [a for a in self._idle if a[0] not in ips]:
            self._idle.pop(address).close()

    async def _connect(self, ip: str, port: int) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self._largest), ip, port)
        return connection

    def _request(self, ip: str, port: int) -> bytes:
        host = f"[{ip}]" if ":" in ip else ip
        return (
            f"GET {self._path} HTTP/1.1\r\nHost: {host}:{port}\r\nAccept-Encoding: identity\r\n\r\n"
        ).encode()
