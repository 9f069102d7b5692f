"""Clients that leave, and engines that die, hang or talk nonsense."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from kvscaler_sidecar.gate import app as gate_app

from tests.sidecar.gates import answers, before, body_of, exchange, gated, post, scripted
from tests.sidecar.replicas import MODEL, ParrotExecutor, eventually, running

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = b'data: {"choices":[{"text":"x"}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
IDS = [1, 2, 3, 4]


async def test_a_client_that_leaves_frees_the_engines_blocks_within_one_step(
    tmp_path: Path,
) -> None:
    executor = ParrotExecutor(kv_blocks=64)
    async with running(tmp_path, executor) as engine, before(engine) as gate:
        body = json.dumps({"model": MODEL, "prompt": "abcd", "max_tokens": 120, "stream": True})
        executor.gate.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", gate.ports["http"])
        writer.write(post(body.encode(), close=False))
        await engine.stepping()
        writer.transport.abort()
        await eventually(lambda: engine.inbox)
        steps = executor.steps
        executor.gate.set()
        inside = await engine.until(lambda s: s.traffic.cancelled == 1)
        state = await gate.until(lambda s: s.traffic.cancelled == 1)
    assert executor.steps == steps + 1
    assert inside.occupancy is not None and inside.occupancy.referenced_blocks == 0
    assert state.in_flight.requests == 0
    assert state.drain.live_requests == 0


async def test_a_client_that_leaves_in_mid_stream_closes_the_engines_connection() -> None:
    closed = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(reader, engine.requests[-1])
        writer.write(STREAM_HEAD + CHUNK)
        assert await reader.read() == b""
        closed.set()
        writer.close()

    async with scripted(script) as engine, gated(engine.url, engine.pages_url) as gate:
        async with gate.client.stream(
            "POST", gate.url("http", "/v1/completions"),
            json={"prompt": IDS, "max_tokens": 9, "stream": True},
        ) as stream:  # fmt: skip
            async for _ in stream.aiter_raw():
                break
        await asyncio.wait_for(closed.wait(), 20)
        state = await gate.until(lambda s: s.traffic.cancelled == 1)
    assert state.traffic.failed == 0
    assert state.in_flight.requests == 0


async def test_a_client_that_leaves_the_queue_never_reaches_the_engine() -> None:
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(reader, engine.requests[-1])
        await go.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with (
        scripted(script, kv_blocks=8) as engine,
        gated(engine.url, engine.pages_url) as gate,
    ):
        first = asyncio.create_task(gate.complete(IDS, max_tokens=28))
        await eventually(lambda: engine.requests)
        second = asyncio.create_task(gate.complete(IDS, max_tokens=28))
        await gate.until(lambda s: s.occupancy is not None and s.occupancy.waiting_requests == 1)
        second.cancel()
        state = await gate.until(lambda s: s.traffic.cancelled == 1)
        go.set()
        await first
    assert state.occupancy is not None and state.occupancy.waiting_requests == 0
    assert len(engine.requests) == 1


@pytest.mark.parametrize("framing", ["chunked", "length"])
async def test_an_engine_that_dies_in_mid_stream_breaks_it_visibly(framing: str) -> None:
    head = STREAM_HEAD if framing == "chunked" else (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999\r\n\r\n"
    )  # fmt: skip

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(reader, engine.requests[-1])
        writer.write(head + (CHUNK if framing == "chunked" else EVENT))
        await writer.drain()
        writer.close()

    async with scripted(script) as engine, gated(engine.url, engine.pages_url) as gate:
        received = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with gate.client.stream(
                "POST", gate.url("http", "/v1/completions"),
                json={"prompt": IDS, "max_tokens": 9, "stream": True},
            ) as stream:  # fmt: skip
                async for part in stream.aiter_raw():
                    received += part
        state, page = await gate.state(), await gate.metrics()
        with pytest.raises(httpx.RemoteProtocolError):
            await gate.client.get(gate.url("http", "/v1/files"))
        both = await gate.metrics()
    assert received == EVENT
    assert state.traffic.failed == 1
    assert state.in_flight.requests == 0
    assert "kvscaler_gate_broken_answers_total 1.0" in page
    assert "kvscaler_gate_broken_answers_total 2.0" in both


async def test_a_stream_that_says_that_it_failed_counts_as_broken(tmp_path: Path) -> None:
    executor = ParrotExecutor()
    async with running(tmp_path, executor) as engine, before(engine) as gate:
        executor.gate.clear()
        executor.explode = True
        request = asyncio.create_task(gate.complete("abc", max_tokens=4, stream=True))
        await engine.stepping()
        executor.gate.set()
        told = await request
        state = await gate.until(lambda s: s.traffic.failed == 1)
        await gate.until(lambda s: not s.ready)
    assert "the parrot is dead" in told.text
    assert state.in_flight.requests == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nxx",
        b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-big: " + b"x" * 100_000,
        b"HTTP/1.1 200 OK\r\nbad header\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_an_answer_that_is_none_is_502_before_the_first_byte(raw: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(reader, engine.requests[-1])
        writer.write(raw)
        writer.close()

    async with scripted(script) as engine, gated(engine.url, engine.pages_url) as gate:
        answer = await gate.complete(IDS, max_tokens=4)
        state = await gate.state()
    assert answer.status_code == 502
    assert answer.headers["x-kvscaler-reason"] == "EngineBroke"
    assert answer.json()["error"]["code"] == "EngineBroke"
    assert state.traffic.refused == {"EngineBroke": 1}
    assert state.in_flight.requests == 0


async def test_an_engine_that_is_not_there_is_503() -> None:
    async with scripted(answers(b"")) as pages:
        port = await _free_port()
        async with gated(f"http://127.0.0.1:{port}", pages.pages_url) as gate:
            answer = await gate.complete(IDS, max_tokens=4)
            models = await gate.client.get(gate.url("http", "/v1/models"))
    assert answer.status_code == models.status_code == 503
    assert answer.headers["x-kvscaler-reason"] == "EngineUnreachable"
    assert int(answer.headers["retry-after"]) >= 1
    assert "can't be reached" in answer.json()["error"]["message"]


async def test_an_engine_that_accepts_no_connection_is_504() -> None:
    """A backlog that is full: the kernel answers no further connection."""
    import socket

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    port = listener.getsockname()[1]
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(("127.0.0.1", port))
        fillers.append(filler)
    async with (
        scripted(answers(b"")) as pages,
        gated(f"http://127.0.0.1:{port}", pages.pages_url, engine_connect_seconds="0.3") as gate,
    ):
        answer = await gate.complete(IDS, max_tokens=4)
    for each in (*fillers, listener):
        each.close()
    assert answer.status_code == 504
    assert answer.headers["x-kvscaler-reason"] == "EngineTimeout"
    assert "0.3 s" in answer.json()["error"]["message"]


async def test_an_engine_that_never_answers_is_504_and_one_that_stops_is_broken() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(reader, engine.requests[-1])
        if b"/v1/completions" in engine.requests[-1]:
            writer.write(STREAM_HEAD + CHUNK)
        assert await reader.read() == b""
        writer.close()

    async with (
        scripted(script) as engine,
        gated(engine.url, engine.pages_url, engine_silence_seconds="0.3") as gate,
    ):
        silent = await gate.post("/v1/chat/completions", {"messages": [], "prompt": IDS})
        with pytest.raises(httpx.RemoteProtocolError):
            await gate.complete(IDS, max_tokens=4, stream=True)
        state = await gate.state()
        await eventually(lambda: engine.open == 0)
    assert silent.status_code == 504
    assert silent.headers["x-kvscaler-reason"] == "EngineTimeout"
    assert state.traffic.refused == {"EngineTimeout": 1}
    assert state.traffic.failed == 1


async def test_bytes_behind_an_answer_reach_nobody() -> None:
    """An engine that answers twice must not answer another client's request with it."""
    twice = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n" + b"a" + (
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother"
    )  # fmt: skip
    async with scripted(answers(twice)) as engine, gated(engine.url, engine.pages_url) as gate:
        found = [await gate.client.get(gate.url("http", "/x")) for _ in range(4)]
    assert [answer.content for answer in found] == [b"a"] * 4
    assert engine.opened == 4


async def test_an_early_answer_to_a_long_body_passes() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        await writer.drain()
        await asyncio.sleep(0)
        writer.close()

    async def endless() -> object:
        for _ in range(100):
            yield b"x" * 65536

    async with scripted(script) as engine, gated(engine.url, engine.pages_url) as gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.ports["http"])
        writer.write(b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\nfirst")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()
        state = await gate.until(lambda s: s.drain.live_requests == 0)
    assert head.startswith(b"HTTP/1.1 413 ")
    assert state.in_flight.requests == 0


async def test_two_requests_cannot_be_smuggled_as_one() -> None:
    async with (
        scripted(answers(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")) as engine,
        gated(engine.url, engine.pages_url) as gate,
    ):
        got = await exchange(
            gate.ports["http"],
            b"POST /v9 HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /admin HTTP/1.1\r\nHost: x\r\n\r\n",
        )
    assert got.startswith(b"HTTP/1.1 400 ")
    assert engine.requests == []


async def test_a_body_that_stops_coming_gives_its_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate_app, "BODY_START_SECONDS", 0.3)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b"first"
        writer.close()

    async with scripted(script) as engine, gated(engine.url, engine.pages_url) as gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.ports["http"])
        writer.write(b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\nfirst")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()
        state = await gate.until(lambda s: s.in_flight.requests == 0)
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"too slowly" in await reader.read()
    assert state.traffic.refused == {"RequestTimeout": 1}


async def _free_port() -> int:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port
