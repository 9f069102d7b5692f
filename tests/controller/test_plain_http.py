"""The plain client: what it understands, what it leaves to another one, and that it never hangs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from kvscaler_operator.gateways.plain_http import HEAD_BYTES, PlainClient

BODY = b'{"ready": true}'
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: x\r\nContent-Length: 15\r\n\r\n" + BODY
LARGEST = 1000
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], AsyncIterator[bytes]]


class Server:
    """Writes `answers` piece by piece to each request, and counts requests and connections."""

    def __init__(self, *pieces: bytes, closes: bool = False) -> None:
        self.pieces, self.closes = pieces, closes
        self.requests: list[bytes] = []
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[int]:
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    yield listening.sockets[0].getsockname()[1]
    listening.close()


@asynccontextmanager
async def client() -> AsyncIterator[PlainClient]:
    made = PlainClient("/state", LARGEST)
    yield made
    made.close()


async def answer(*pieces: bytes, closes: bool = False) -> bytes | None:
    async with serving(Server(*pieces, closes=closes)) as port, client() as plain:
        return await plain.get("127.0.0.1", port, 2.0)


async def test_a_plain_answer_is_read_and_its_connection_kept() -> None:
    server = Server(PLAIN)
    async with serving(server) as port, client() as plain:
        for _ in range(3):
            assert await plain.get("127.0.0.1", port, 2.0) == BODY
    assert server.connections == 1
    assert server.requests[0].startswith(b"GET /state HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_an_answer_in_pieces_is_put_together() -> None:
    assert await answer(PLAIN[:20], PLAIN[20:63], PLAIN[63:70], PLAIN[70:]) == BODY


async def test_a_connection_that_the_server_closed_meanwhile_is_made_again() -> None:
    server = Server(PLAIN, closes=True)
    async with serving(server) as port, client() as plain:
        for _ in range(3):
            assert await plain.get("127.0.0.1", port, 2.0) == BODY
            await asyncio.sleep(0.01)
    assert server.connections == 3


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nxxx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nxx",
        PLAIN + b"and more",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"x" * (HEAD_BYTES + 1),
    ],
)
async def test_any_other_form_is_left_to_the_client_that_knows_it(raw: bytes) -> None:
    assert await answer(raw) is None


async def test_silence_ends_in_time_and_a_refused_connection_at_once() -> None:
    async with serving(Server()) as port, client() as plain:
        with pytest.raises(TimeoutError):
            await plain.get("127.0.0.1", port, 0.05)
        with pytest.raises(TimeoutError):
            await plain.get("127.0.0.1", port, 0.05)
    async with client() as plain:
        with pytest.raises(OSError, match="Connect"):
            await plain.get("127.0.0.1", port, 1.0)


async def test_an_answer_cut_short_is_an_error_and_no_shorter_answer() -> None:
    with pytest.raises(ConnectionError):
        await answer(PLAIN[:-3], closes=True)


async def test_bytes_that_nobody_asked_for_close_the_connection() -> None:
    server = Server(PLAIN, b"", PLAIN)
    async with serving(server) as port, client() as plain:
        for _ in range(2):
            assert await plain.get("127.0.0.1", port, 2.0) in (BODY, None)
            await asyncio.sleep(0.02)
    assert server.connections == 2


async def test_connections_to_pods_that_are_gone_are_closed() -> None:
    server = Server(PLAIN)
    async with serving(server) as port, client() as plain:
        assert await plain.get("127.0.0.1", port, 2.0) == BODY
        plain.forget({"127.0.0.2"})
        assert await plain.get("127.0.0.1", port, 2.0) == BODY
    assert server.connections == 2
