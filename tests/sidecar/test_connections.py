"""What one client can do to a listener, and to the other clients: time, number and memory."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from kvscaler.protocol.refusals import RefusalReason
from kvscaler_sidecar.server import connections, exchange
from kvscaler_sidecar.server.connections import ConnectionLimits
from kvscaler_sidecar.server.errors import Refusal
from kvscaler_sidecar.server.exchange import ClientGone, Exchange
from kvscaler_sidecar.server.listeners import Listener, Listeners, bind
from starlette.types import Receive, Scope, Send

from tests.sidecar.replicas import eventually

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Door:
    """A listener whose application answers when `gate` is open, after reading what it is told to."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    refused: Counter[RefusalReason] = field(default_factory=Counter)
    served: int = 0
    in_service: int = 0
    gone: int = 0
    answer_bytes: int = 3
    in_parts: bool = True
    reads_bodies: bool = False
    port: int = 0

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        talk = Exchange(scope, receive, send)
        self.in_service += 1
        try:
            if self.reads_bodies:
                await talk.read_body(1_000_000)
            await self.gate.wait()
            await talk.start(200, [])
            if not self.in_parts:
                await talk.write(b"x" * self.answer_bytes, more=False)
            else:
                for _ in range(0, self.answer_bytes, 65_536):
                    await talk.write(b"x" * min(self.answer_bytes, 65_536))
                await talk.write(b"", more=False)
            self.served += 1
        except Refusal as refusal:
            await talk.refuse(refusal)
        except ClientGone:
            self.gone += 1
        finally:
            self.in_service -= 1

    @asynccontextmanager
    async def connect(
        self, sent: bytes = b""
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


@asynccontextmanager
async def listening(limits: ConnectionLimits, *, is_open: bool = True) -> AsyncIterator[Door]:
    door = Door()
    if is_open:
        door.gate.set()
    listeners = Listeners(
        {
            "door": Listener(
                door.app,
                bind("127.0.0.1", 0),
                limits,
                lambda reason: door.refused.update([reason]),
            )
        }
    )
    await listeners.start()
    door.port = listeners.ports["door"]
    try:
        yield door
    finally:
        door.gate.set()
        await asyncio.wait_for(listeners.stop(1), 20)


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes, be it by a reset since it had not read all."""
    got = b""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):
            while more := await reader.read(65_536):
                got += more
    return got


@contextlib.asynccontextmanager
async def dripping(writer: asyncio.StreamWriter, drops: Iterator[bytes]) -> AsyncIterator[None]:
    """`drops` one by one, often enough that no idle time runs out."""

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            for drop in drops:
                writer.write(drop)
                await writer.drain()
                await asyncio.sleep(0.01)

    task = asyncio.create_task(drip())
    try:
        yield
    finally:
        task.cancel()


def forever(drop: bytes) -> Iterator[bytes]:
    while True:
        yield drop


SHORT = ConnectionLimits(head_seconds=0.2, linger_seconds=0.2)


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with listening(SHORT) as door, door.connect() as (reader, _):
        assert await all_of(reader) == b""


async def test_a_head_that_drips_is_cut_after_its_time() -> None:
    async with (
        listening(SHORT) as door,
        door.connect(GET[:-2]) as (reader, writer),
        dripping(writer, forever(b"X-A: b\r\n")),
    ):
        answer = await all_of(reader)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code": "RequestTimeout"' in answer
    assert door.refused == {RefusalReason.REQUEST_TIMEOUT: 1}


async def test_a_head_after_an_answer_has_its_time_too() -> None:
    async with listening(SHORT) as door, door.connect(GET) as (reader, writer):
        await eventually(lambda: door.served == 1)
        async with dripping(writer, forever(b"\r\n")):  # before a request they mean nothing
            answer = await all_of(reader)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1 ") <= 2


async def test_a_head_of_any_length_is_not_held() -> None:
    async with listening(ConnectionLimits()) as door:
        async with (
            door.connect(b"GET / HTTP/1.1\r\nX-Long: ") as (reader, writer),
            dripping(writer, forever(b"x" * 20_000)),
        ):
            answer = await all_of(reader)
        assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""
        many = b"".join(b"X-%d: y\r\n" % n for n in range(connections.MAX_HEADERS + 1))
        async with door.connect(b"GET / HTTP/1.1\r\n" + many + b"\r\n") as (reader, _):
            answer = await all_of(reader)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert door.served == 0


async def test_trailers_of_any_length_are_not_held() -> None:
    head = (
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Long: "
    )
    async with listening(ConnectionLimits()) as door:
        door.reads_bodies = True
        async with door.connect(head) as (reader, writer), dripping(writer, forever(b"x" * 20_000)):
            assert await all_of(reader) == b""
        await eventually(lambda: door.in_service == 0)
    assert door.gone == 1


async def test_a_body_in_the_smallest_chunks_is_read() -> None:
    chunks = b"1;x\r\ny\r\n" * 30_000
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with listening(ConnectionLimits()) as door:
        door.reads_bodies = True
        async with door.connect(head + chunks + b"0\r\n\r\n") as (reader, _):
            answer = await all_of(reader)
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_pipelined_requests_are_answered_in_order_and_bounded() -> None:
    async with listening(ConnectionLimits(), is_open=False) as door:
        async with door.connect(GET * 4) as (reader, _):
            door.gate.set()
            await eventually(lambda: door.served == 4)
            answers = await asyncio.wait_for(reader.read(10_000), 20)
            assert answers.startswith(b"HTTP/1.1 200 ")
        door.gate.clear()
        async with door.connect(GET * 1000) as (reader, _):
            assert await all_of(reader) == b""
    assert door.served <= 5


async def test_no_refusal_is_written_into_an_answer() -> None:
    async with listening(ConnectionLimits(), is_open=False) as door:
        async with door.connect(GET) as (reader, writer):
            await eventually(lambda: door.in_service == 1)
            writer.write(b"this is no HTTP\r\n\r\n")
            assert await all_of(reader) == b""
        async with door.connect(b"this is no HTTP\r\n\r\n") as (reader, _):
            answer = await all_of(reader)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"type": "invalid_request_error"' in answer


async def test_when_all_connections_are_in_service_the_next_is_told_so() -> None:
    async with listening(ConnectionLimits(connections=2), is_open=False) as door:
        async with door.connect(GET), door.connect(GET):
            await eventually(lambda: door.in_service == 2)
            async with door.connect(GET) as (reader, _):
                answer = await all_of(reader)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"x-kvscaler-reason: ConnectionsFull" in answer
            assert b"retry-after: 1" in answer
            assert b"connection: close" in answer
            assert door.refused == {RefusalReason.CONNECTIONS_FULL: 1}
            door.gate.set()
            await eventually(lambda: door.served == 2)
        async with door.connect(GET) as (reader, _):
            assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200 ")


async def test_far_above_the_cap_connections_are_closed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "SPARE_CONNECTIONS", 0)
    limits = ConnectionLimits(connections=1)
    async with listening(limits, is_open=False) as door, door.connect(GET):
        await eventually(lambda: door.in_service == 1)
        async with door.connect() as (reader, _):
            assert await all_of(reader) == b""
    assert door.refused == {RefusalReason.CONNECTIONS_FULL: 1}


async def test_who_waits_longest_makes_room_for_a_new_client() -> None:
    async with (
        listening(ConnectionLimits(connections=2)) as door,
        door.connect(GET[:10]) as (partial, _),
        door.connect(GET) as (idle, _),
    ):
        await eventually(lambda: door.served == 1)
        async with door.connect(GET) as (new, _), door.connect(GET) as (newer, _):
            for served in (new, newer):
                line = await asyncio.wait_for(served.readline(), 20)
                assert line.startswith(b"HTTP/1.1 200 ")
            assert await all_of(partial) == b""
            assert (await all_of(idle)).endswith(b"\r\n0\r\n\r\n"), "its answer, and then the end"
        assert door.refused == {}


async def test_one_client_does_not_take_all_connections_of_a_page_for_machines() -> None:
    limits = ConnectionLimits(connections=8, per_client=2)
    async with listening(limits, is_open=False) as door, door.connect(GET), door.connect(GET):
        await eventually(lambda: door.in_service == 2)
        async with door.connect(GET) as (reader, _):
            assert await all_of(reader) == b""


async def test_a_body_that_goes_on_after_its_answer_is_cut() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with (
        listening(SHORT) as door,
        door.connect(head) as (reader, writer),
        dripping(writer, forever(b"1\r\nx\r\n")),
    ):
        answer = await all_of(reader)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_a_body_that_drips_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_START_SECONDS", 0.2)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    async with listening(SHORT) as door:
        door.reads_bodies = True
        async with door.connect(head) as (reader, writer), dripping(writer, forever(b"x")):
            answer = await all_of(reader)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"x-kvscaler-reason: RequestTimeout" in answer


async def test_who_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "UNREAD_SECONDS", 0.2)
    async with listening(ConnectionLimits()) as door:
        door.answer_bytes = 50_000_000
        async with door.connect(GET):
            await eventually(lambda: door.gone == 1)
        assert door.in_service == 0


async def test_a_long_answer_that_ends_its_connection_is_read_to_its_end() -> None:
    """It is written at once and read over a while; a draining replica answers so."""
    closing = GET[:-2] + b"Connection: close\r\n\r\n"
    async with listening(SHORT) as door:
        door.answer_bytes, door.in_parts = 3_000_000, False
        async with door.connect(closing) as (reader, _):
            got = await asyncio.wait_for(reader.read(65_536), 20)
            await eventually(lambda: door.served == 1)
            await asyncio.sleep(5 * SHORT.linger_seconds)  # slow, but within `UNREAD_SECONDS`
            got += await all_of(reader)
    assert got.count(b"x") == 3_000_000
    assert got.endswith(b"0\r\n\r\n")
