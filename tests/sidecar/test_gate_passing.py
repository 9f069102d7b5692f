"""What passes a gate passes as it is: bytes, order, endpoints, errors, and as soon as it comes."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.sidecar.gates import answers, before, body_of, exchange, gated, post, scripted
from tests.sidecar.replicas import MODEL, ParrotExecutor, eventually, running

COMPLETION = json.dumps({"model": MODEL, "prompt": "abcd", "max_tokens": 4}).encode()


async def test_the_same_answer_as_the_engine_gives(tmp_path: Path) -> None:
    async with running(tmp_path) as engine, before(engine) as gate:
        for body in (
            {"prompt": "héllo", "max_tokens": 5, "logprobs": 2},
            {"prompt": ["ab", "cd"], "max_tokens": 3, "n": 2},
            {"prompt": [1, 2, 3], "max_tokens": 2},
        ):
            through = await gate.post("/v1/completions", {"model": MODEL, **body})
            direct = await engine.post("/v1/completions", {"model": MODEL, **body})
            assert through.status_code == 200
            assert through.json()["choices"] == direct.json()["choices"]
            assert {**through.json()["usage"], "prompt_tokens_details": 0} == {
                **direct.json()["usage"],
                "prompt_tokens_details": 0,  # the second finds the first one's prefix
            }
        models = await gate.client.get(gate.url("http", "/v1/models"))
        direct_models = await engine.client.get(engine.url("http", "/v1/models"))
    assert models.content == direct_models.content


async def test_errors_of_the_engine_are_its_own(tmp_path: Path) -> None:
    async with running(tmp_path) as engine, before(engine) as gate:
        for path, body in (
            ("/v1/completions", {"model": "gpt-4", "prompt": "x"}),
            ("/v1/completions", {"model": MODEL, "prompt": "x", "logit_bias": {"1": 2}}),
            ("/v1/completions", "no JSON"),
            ("/v1/chat/completions", {"model": MODEL, "messages": []}),
            ("/no/such/endpoint", {"any": "thing"}),
        ):
            through, direct = await gate.post(path, body), await engine.post(path, body)
            assert through.status_code == direct.status_code >= 400
            assert through.content == direct.content
            assert through.headers.get("x-kvscaler-reason") == direct.headers.get(
                "x-kvscaler-reason"
            )
        state = await gate.state()
    assert state.in_flight.requests == 0
    assert sum(state.traffic.refused.values()) == 5
    assert state.traffic.refused["UnknownModel"] == 1


async def test_each_chunk_comes_as_the_engine_sends_it() -> None:
    """The engine sends a chunk only when the client has the one before."""
    got: asyncio.Queue[bytes] = asyncio.Queue()
    chunks = [b'data: {"choices":[{"text":"%d"}]}\n\n' % i for i in range(5)]
    step = asyncio.Semaphore(1)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(reader, engine.requests[-1])
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for chunk in chunks:
            await step.acquire()
            # In two writes, which are no events of their own.
            writer.write(b"%x\r\n%s" % (len(chunk), chunk[:9]))
            await writer.drain()
            writer.write(chunk[9:] + b"\r\n")
        await step.acquire()
        writer.write(b"0\r\n\r\n")

    async with scripted(script) as engine, gated(engine.url, engine.pages_url) as gate:
        body = {"prompt": "a", "max_tokens": 9, "stream": True}
        async with gate.client.stream("POST", gate.url("http", "/v1/completions"), json=body) as r:
            assert r.headers["content-type"] == "text/event-stream"
            received = b""
            async for part in r.aiter_raw():
                received += part
                if received in (b"".join(chunks[: i + 1]) for i in range(5)):
                    got.put_nowait(received)
                    step.release()
    assert got.qsize() == 5
    assert received == b"".join(chunks)


async def test_heads_and_bodies_pass_byte_for_byte() -> None:
    seen: list[bytes] = []
    raw = (
        b"HTTP/1.1 418 Whatever\r\nX-Odd: \xff\xfe caf\xc3\xa9\r\nX-Twice: 1\r\nX-Twice: 2\r\n"
        b"Set-Cookie: a=b\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nServer: engine/9\r\n"
        b"Connection: X-Private\r\nX-Private: hop\r\nKeep-Alive: timeout=1\r\n"
        b"Content-Type: application/x-strange\r\nContent-Length: 5\r\n\r\n\x00\xff\r\n!"
    )

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await body_of(reader, engine.requests[-1]))
        writer.write(raw)

    async with scripted(script) as engine, gated(engine.url, engine.pages_url) as gate:
        body = b'{"prompt": "\\u00e9", "zzz": [1.50, 1e3],\n "prompt2": null}'
        answer = await exchange(
            gate.ports["http"],
            post(
                body,
                "/v1/completions?a=%2F&b=c%20d",
                "Authorization: Bearer s3cret\r\nX-Odd: \xe9\r\nX-Twice: 1\r\nX-Twice: 2\r\n"
                "TE: trailers\r\nX-Hop: 1\r\n".replace("\xe9", "e"),
            ).replace(b"Connection: close", b"Connection: close, x-hop"),
        )
    head = engine.requests[-1]
    assert head.startswith(b"POST /v1/completions?a=%2F&b=c%20d HTTP/1.1\r\n")
    lines = head.lower().split(b"\r\n")
    assert b"host: x" in lines
    assert b"authorization: bearer s3cret" in lines
    assert lines.index(b"x-twice: 1") < lines.index(b"x-twice: 2")
    assert not any(line.startswith((b"te:", b"connection:", b"x-hop:")) for line in lines)
    assert lines.count(b"via: 1.1 kvscaler-gate") == 1
    assert seen == [body]
    top, _, rest = answer.partition(b"\r\n\r\n")
    assert rest == b"\x00\xff\r\n!"
    fields = top.split(b"\r\n")
    assert fields[0].startswith(b"HTTP/1.1 418 ")
    for field in (
        b"x-odd: \xff\xfe caf\xc3\xa9",
        b"x-twice: 1",
        b"x-twice: 2",
        b"set-cookie: a=b",
        b"date: Sun, 06 Nov 1994 08:49:37 GMT",
        b"server: engine/9",
        b"content-type: application/x-strange",
        b"content-length: 5",
    ):
        assert fields.count(field) == 1, field
    assert b"x-private" not in top.lower()
    assert b"keep-alive" not in top.lower()


@pytest.mark.parametrize(
    "method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND", "PURGE"]
)
async def test_unknown_endpoints_and_methods_pass(method: str) -> None:
    reply = answers(b"HTTP/1.1 207 Multi\r\ncontent-length: 2\r\n\r\nok")
    async with scripted(reply) as engine, gated(engine.url, engine.pages_url) as gate:
        answer = await gate.client.request(method, gate.url("http", "/v9/wonder?x=1"))
    assert (answer.status_code, answer.content) == (207, b"ok")
    assert engine.requests[-1].startswith(f"{method} /v9/wonder?x=1 HTTP/1.1\r\n".encode())


async def test_a_body_of_an_unknown_endpoint_passes_as_it_comes() -> None:
    """More than a gate would keep, and the engine has its beginning before the client sent its end."""
    began, total = asyncio.Event(), 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal total
        while True:
            size = int(await reader.readline(), 16)
            total += len(await reader.readexactly(size + 2)) - 2
            began.set()
            if not size:
                break
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async def upload() -> object:
        yield b"first"
        await began.wait()
        for _ in range(300):
            yield b"x" * 65536

    async with (
        scripted(script) as engine,
        gated(engine.url, engine.pages_url, max_body_bytes="1000") as gate,
    ):
        answer = await gate.client.post(
            gate.url("http", "/v1/audio/transcriptions"), content=upload()
        )
        page = await gate.metrics()
    assert answer.status_code == 200
    assert total == 5 + 300 * 65536
    assert 'kvscaler_gate_charges_total{basis="UnknownEndpoint"} 1.0' in page


async def test_a_body_that_is_too_long_is_refused_before_the_engine_hears_of_it() -> None:
    async with (
        scripted(answers(b"")) as engine,
        gated(engine.url, engine.pages_url, max_body_bytes="100") as gate,
    ):
        answer = await gate.post("/v1/completions", b"x" * 101)
    assert answer.status_code == 413
    assert answer.headers["x-kvscaler-reason"] == "BodyTooLarge"
    assert "date" in answer.headers
    assert engine.requests == []


async def test_bodies_are_not_kept_while_their_answers_last() -> None:
    """The gate holds what it reads, until the engine has it."""
    body = json.dumps({"prompt": [1, 2], "max_tokens": 2, "user": "x" * 1_000_000}).encode()
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await body_of(reader, engine.requests[-1]) == body
        await go.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with (
        scripted(script, kv_blocks=4) as engine,
        gated(engine.url, engine.pages_url) as gate,
    ):
        requests = [asyncio.create_task(gate.post("/v1/completions", body)) for _ in range(5)]
        await gate.until(lambda s: s.occupancy is not None and s.occupancy.waiting_requests == 1)
        held = gate.gate._server.intake.held
        await eventually(lambda: held.bytes == len(body))
        go.set()
        answers_ = await asyncio.gather(*requests)
    assert [answer.status_code for answer in answers_] == [200] * 5
    assert held.bytes == 0


async def test_connections_are_kept_on_both_sides(tmp_path: Path) -> None:
    reply = answers(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    async with scripted(reply) as engine, gated(engine.url, engine.pages_url) as gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.ports["http"])
        for _ in range(5):
            writer.write(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"connection" not in head.lower()
            assert await reader.readexactly(2) == b"ok"
        writer.close()
    assert len(engine.requests) == 5
    assert engine.opened == 1


async def test_heads_without_bodies_pass() -> None:
    scripts = {
        b"HEAD": b"HTTP/1.1 200 OK\r\ncontent-length: 1234\r\netag: x\r\n\r\n",
        b"GET": b"HTTP/1.1 304 Not Modified\r\ncontent-length: 99\r\netag: x\r\n\r\n",
        b"DELETE": b"HTTP/1.1 204 No Content\r\n\r\n",
        b"PUT": b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 200 OK\r\n"
        b"content-length: 1\r\n\r\n!",
        b"PATCH": b"HTTP/1.1 200 OK\r\n\r\nuntil the end",
    }

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method = engine.requests[-1].split()[0]
        writer.write(scripts[method])
        if method == b"PATCH":
            writer.close()

    async with scripted(script) as engine, gated(engine.url, engine.pages_url) as gate:
        found = {m: await gate.client.request(m.decode(), gate.url("http", "/x")) for m in scripts}
    assert found[b"HEAD"].headers["content-length"] == "1234"
    assert (found[b"GET"].status_code, found[b"GET"].headers["etag"]) == (304, "x")
    assert found[b"DELETE"].status_code == 204
    assert (found[b"PUT"].status_code, found[b"PUT"].content) == (200, b"!")
    assert found[b"PATCH"].content == b"until the end"


async def test_metrics_on_the_service_port_are_the_engines(tmp_path: Path) -> None:
    async with running(tmp_path) as engine, before(engine) as gate:
        await gate.complete("abc", max_tokens=2)
        on_service_port = await gate.client.get(gate.url("http", "/metrics"))
        own = await gate.metrics()
        direct = await engine.metrics()
    assert "kvscaler_gate_charges_total" in own
    assert "kvscaler_gate_charges_total" not in on_service_port.text
    names = {line.split("{")[0].split(" ")[0] for line in direct.splitlines()}
    assert {line.split("{")[0].split(" ")[0] for line in on_service_port.text.splitlines()} == names


async def test_a_websocket_is_refused_in_clear_words() -> None:
    async with scripted(answers(b"")) as engine, gated(engine.url, engine.pages_url) as gate:
        answer = await exchange(
            gate.ports["http"],
            b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        )
    assert answer.startswith(b"HTTP/1.1 501 ")
    assert b"x-kvscaler-reason: UpgradeUnsupported" in answer
    assert b"no WebSocket" in answer
    assert engine.requests == []


async def test_a_slow_reader_makes_the_engine_wait_and_not_the_gate_grow() -> None:
    """The client reads nothing: what the engine can send is bounded by a few buffers."""
    sent = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (1 << 30))
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with scripted(script) as engine, gated(engine.url, engine.pages_url) as gate:
        _, writer = await asyncio.open_connection("127.0.0.1", gate.ports["http"], limit=1024)
        writer.write(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        before_that = -1
        while before_that != sent:  # until a while brings nothing more
            before_that = sent
            await asyncio.sleep(0.3)
        assert 0 < sent < 64 << 20
        writer.transport.abort()
        await_closed = asyncio.get_running_loop().time() + 20
        while engine.open:
            assert asyncio.get_running_loop().time() < await_closed
            await asyncio.sleep(0.01)


async def test_a_client_of_openai_works_through_the_gate(tmp_path: Path) -> None:
    import openai

    async with running(tmp_path, ParrotExecutor(kv_blocks=128)) as engine, before(engine) as gate:
        client = openai.AsyncOpenAI(base_url=gate.url("http", "/v1"), api_key="x", max_retries=0)
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        state = await gate.until(lambda s: s.traffic.finished == 1)
        await client.close()
    usage = chunks[-1].usage
    assert usage is not None
    assert state.traffic.finished_output_tokens == usage.completion_tokens == 6
    assert state.traffic.finished_prompt_tokens == usage.prompt_tokens
    assert isinstance(gate.client, httpx.AsyncClient)
