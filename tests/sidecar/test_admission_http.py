"""Admission seen from outside: refusals before headers, queueing, disconnects, lowered limits."""

import asyncio
import json
from pathlib import Path

from tests.sidecar.replicas import MODEL, ParrotExecutor, eventually, running


async def test_a_full_queue_is_429_with_a_reason_and_retry_after(tmp_path: Path) -> None:
    executor = ParrotExecutor(kv_blocks=8)
    limits = {"charge": "WorstCase", "watermark_percent": 0, "queue_requests": 1}
    async with running(tmp_path, executor, limits=limits) as replica:
        assert (await replica.complete("warm", max_tokens=2)).status_code == 200
        executor.gate.clear()
        executor.entered.clear()
        running_one = asyncio.create_task(replica.complete("b" * 20, max_tokens=12))
        await replica.stepping()
        waiting = asyncio.create_task(replica.complete("c" * 20, max_tokens=12))
        refused = asyncio.create_task(replica.complete("d" * 20, max_tokens=12, stream=True))
        await eventually(lambda: replica.inbox >= 2)
        executor.gate.set()
        answers = await asyncio.gather(running_one, waiting, refused)
        state = await replica.until(lambda s: s.traffic.finished == 3)
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200, 200, 429]
    full = next(answer for answer in answers if answer.status_code == 429)
    assert full.headers["x-kvscaler-reason"] == "QueueFull"
    assert int(full.headers["retry-after"]) >= 1
    assert full.json()["error"]["type"] == "rate_limit_error"
    assert state.traffic.refused == {"QueueFull": 1}
    assert state.traffic.admitted == 3
    assert state.traffic.arrivals == 4


async def test_waiting_too_long_is_503(tmp_path: Path) -> None:
    executor = ParrotExecutor(kv_blocks=8)
    limits = {"charge": "WorstCase", "watermark_percent": 0, "max_wait_seconds": 0}
    async with running(tmp_path, executor, limits=limits) as replica:
        executor.gate.clear()
        first = asyncio.create_task(replica.complete("a" * 20, max_tokens=12))
        await replica.stepping()
        second = asyncio.create_task(replica.complete("b" * 20, max_tokens=12))
        await eventually(lambda: replica.inbox)
        executor.gate.set()
        late = await second
        assert (await first).status_code == 200
    assert late.status_code == 503
    assert late.headers["x-kvscaler-reason"] == "QueueTimeout"
    assert int(late.headers["retry-after"]) >= 1


async def test_what_can_never_fit_is_413(tmp_path: Path) -> None:
    async with running(tmp_path, ParrotExecutor(kv_blocks=8)) as replica:
        answer = await replica.complete("a" * 20, max_tokens=40)
        fits = await replica.complete("a" * 20, max_tokens=12)
    assert answer.status_code == 413
    assert answer.headers["x-kvscaler-reason"] in {"NeverFits", "ContextTooLong"}
    assert "32" in answer.json()["error"]["message"]
    assert fits.status_code == 200


async def test_one_refused_choice_refuses_the_request_and_frees_the_others(tmp_path: Path) -> None:
    executor = ParrotExecutor(kv_blocks=8)
    limits = {"charge": "WorstCase", "watermark_percent": 0, "queue_requests": 0}
    async with running(tmp_path, executor, limits=limits) as replica:
        executor.gate.clear()
        answer = await replica.complete(["a" * 20, "b" * 20], max_tokens=12)
        executor.gate.set()
        state = await replica.until(lambda s: s.traffic.cancelled == 1)
    assert answer.status_code == 429
    assert state.occupancy is not None and state.occupancy.referenced_blocks == 0
    assert state.traffic.finished == 0


async def test_a_client_that_leaves_frees_its_blocks_within_one_step(tmp_path: Path) -> None:
    executor = ParrotExecutor(kv_blocks=64)
    async with running(tmp_path, executor) as replica:
        body = json.dumps(
            {"model": MODEL, "prompt": "abcd", "max_tokens": 120, "stream": True}
        ).encode()
        executor.gate.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", replica.ports["http"])
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        await replica.stepping()
        writer.transport.abort()
        await eventually(lambda: replica.inbox)
        steps = executor.steps
        executor.gate.set()
        state = await replica.until(lambda s: s.traffic.cancelled == 1)
    assert executor.steps == steps + 1
    assert state.occupancy is not None
    assert state.occupancy.referenced_blocks == 0
    assert state.in_flight.requests == 0


async def test_a_client_that_leaves_the_queue_is_forgotten(tmp_path: Path) -> None:
    executor = ParrotExecutor(kv_blocks=8)
    async with running(tmp_path, executor) as replica:
        executor.gate.clear()
        first = asyncio.create_task(replica.complete("a" * 20, max_tokens=12))
        await replica.stepping()
        second = asyncio.create_task(replica.complete("b" * 20, max_tokens=12))
        await eventually(lambda: replica.inbox)
        second.cancel()
        await eventually(lambda: replica.inbox >= 2)
        executor.gate.set()
        assert (await first).status_code == 200
        state = await replica.until(lambda s: s.traffic.finished == 1)
    assert state.traffic.cancelled == 1
    assert state.occupancy is not None and state.occupancy.waiting_requests == 0


async def test_probes_and_pages_answer_while_a_step_blocks(tmp_path: Path) -> None:
    executor = ParrotExecutor()
    async with running(tmp_path, executor) as replica:
        executor.gate.clear()
        stuck = asyncio.create_task(replica.complete("abc", max_tokens=4))
        await replica.stepping()
        for path in ("/health/live", "/health/ready", "/metrics", "/state"):
            answer = await replica.client.get(replica.url("metrics", path))
            assert answer.status_code == 200, path
        models = await replica.client.get(replica.url("http", "/v1/models"))
        refused = await replica.complete("x" * 500)
        assert models.status_code == 200
        assert refused.status_code == 413
        assert not stuck.done()
        executor.gate.set()
        assert (await stuck).status_code == 200


async def test_an_engine_that_fails_says_so_everywhere(tmp_path: Path) -> None:
    executor = ParrotExecutor()
    async with running(tmp_path, executor) as replica:
        executor.gate.clear()
        executor.explode = True
        whole = asyncio.create_task(replica.complete("abc", max_tokens=4))
        stream = asyncio.create_task(replica.complete("abc", max_tokens=4, stream=True))
        await replica.stepping()
        executor.gate.set()
        broken = await whole
        told = await stream
        assert await asyncio.wait_for(asyncio.shield(replica.task), 20) == 70
    assert broken.status_code == 503
    assert broken.headers["x-kvscaler-reason"] == "EngineFailed"
    assert "the parrot is dead" in told.text
    assert "[DONE]" not in told.text
    assert "the parrot is dead" in replica.replica.last_words
