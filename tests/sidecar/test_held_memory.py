"""Memory that clients decide on: bounded while requests are read, offered, waiting and unread."""

import asyncio
import json
import socket
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from kvscaler_sidecar.engine import job
from kvscaler_sidecar.server.errors import Refusal
from kvscaler_sidecar.server.held import HeldBytes, Lane
from kvscaler_sidecar.server.schema import MAX_VALUES, parse_chat, parse_completion

from tests.sidecar.replicas import MODEL, ParrotExecutor, eventually, running

ROOMY = {
    "charge": "WorstCase",
    "watermark_percent": 0,
    "queue_requests": 100_000,
    "queue_tokens": 1_000_000,
}


def test_what_is_held_is_bounded_and_given_back() -> None:
    held = HeldBytes(100)
    with held.hold() as first, held.hold() as second:
        first.add(60)
        second.add(40)
        with pytest.raises(Refusal) as raised:
            second.add(1)
        assert (raised.value.status, raised.value.retry_after_seconds) == (429, 1)
        second.settle(10)
        first.settle(90)
        assert held.bytes == 100
        first.release()
        assert held.bytes == 10
    assert held.bytes == 0


async def test_heavy_work_is_done_one_at_a_time() -> None:
    lane, running_now, most = Lane(), 0, 0
    lock = threading.Lock()

    def work(number: int) -> int:
        nonlocal running_now, most
        with lock:
            running_now += 1
            most = max(most, running_now)
        threading.Event().wait(0.01)
        with lock:
            running_now -= 1
        return number

    assert await asyncio.gather(*(lane.run(work, n) for n in range(8))) == list(range(8))
    assert most == 1


@pytest.mark.parametrize(
    "prompt",
    [
        "[" + "1," * 2_000_000 + "1]",
        "[" + "[]," * 1_000_000 + "[]]",
        "[" + '"",' * 1_000_000 + '""]',
        "[" + r'"\"[",' * 700_000 + '""]',
    ],
)
def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(prompt: str) -> None:
    """As objects they take 30 times their text, and no other thread runs meanwhile."""
    body = b'{"model": "m", "prompt": ' + prompt.encode() + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(Refusal) as raised:
            parse_completion(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (raised.value.status, str(raised.value.reason)) == (413, "BodyTooLarge")
    assert str(MAX_VALUES) in raised.value.message
    assert peak_bytes < 3 * len(body)


def test_marks_within_a_text_are_no_values() -> None:
    text = '[{,:"\\' * MAX_VALUES
    request = parse_completion(json.dumps({"model": "m", "prompt": text}).encode())
    assert request.prompt == text
    ids = [7] * (MAX_VALUES - 10)
    assert parse_completion(json.dumps({"model": "m", "prompt": ids}).encode()).prompt == ids


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model": "m", "prompt": "a", "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
        (b'{"model": "m", "prompt": "a", "prompt": "a"}', "prompt"),
    ],
)
def test_a_field_that_is_given_twice_is_refused(body: bytes, param: str) -> None:
    with pytest.raises(Refusal) as raised:
        parse_completion(body)
    assert (raised.value.status, raised.value.param) == (400, param)
    assert "twice" in raised.value.message


def test_the_name_of_a_message_is_refused_since_nothing_renders_it() -> None:
    message = {"role": "user", "content": "x", "name": "ada"}
    with pytest.raises(Refusal) as raised:
        parse_chat(json.dumps({"model": "m", "messages": [message]}).encode())
    assert (str(raised.value.reason), raised.value.param) == (
        "UnsupportedField",
        "messages.0.name",
    )
    parse_chat(json.dumps({"model": "m", "messages": [{**message, "name": None}]}).encode())


async def test_requests_that_the_engine_has_not_seen_are_bounded(tmp_path: Path) -> None:
    """A step may take seconds; what arrives meanwhile is in no queue that admission bounds."""
    limits = {**ROOMY, "queue_bytes": 1_000_000}
    async with running(tmp_path, limits=limits, max_body_bytes=100_000) as replica:
        held = replica.replica._api.intake.held
        replica.executor.gate.clear()
        first = asyncio.create_task(replica.complete("a", max_tokens=2))
        await replica.stepping()
        posts = [
            asyncio.create_task(replica.complete("x" * 100, max_tokens=2, n=128)) for _ in range(6)
        ]
        await eventually(lambda: any(post.done() for post in posts))
        assert 0 < held.bytes <= 1_000_000
        replica.executor.gate.set()
        answers = await asyncio.gather(first, *posts)
        assert held.bytes == 0
    assert {answer.status_code for answer in answers} == {200, 429}
    reasons = {a.headers["x-kvscaler-reason"] for a in answers if a.status_code == 429}
    assert reasons == {"QueueBytesFull"}


async def test_the_queues_bytes_are_what_waiting_requests_hold(tmp_path: Path) -> None:
    """A body of 700 bytes that asks for 128 choices held a hundred times its length."""
    limits = {**ROOMY, "queue_bytes": 4_000_000}
    executor = ParrotExecutor(kv_blocks=32)
    async with running(tmp_path, executor, limits=limits, max_body_bytes=100_000) as replica:
        replica.executor.gate.clear()
        first = asyncio.create_task(replica.complete("a" * 64, max_tokens=64))
        await replica.stepping()
        executor.closes = True
        tracemalloc.start()
        posts = [
            asyncio.create_task(replica.complete("x" * 100, max_tokens=2, n=128)) for _ in range(12)
        ]
        try:
            # Step by step: after each the engine takes what came.
            state = await replica.until(
                lambda s: (
                    executor.gate.set() or (s.occupancy and s.occupancy.waiting_requests > 256)
                )
            )
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            executor.closes = False
            executor.gate.set()
            for post in (first, *posts):
                post.cancel()
    assert state.traffic.refused["QueueBytesFull"] > 0
    assert grown < 4_000_000 + 2_000_000, "the queue's bound, and what the test's clients hold"


async def test_a_client_that_leaves_its_stream_unread_is_cut_and_frees_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "MAX_UNREAD", 100)
    executor = ParrotExecutor(kv_blocks=4096)
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": "abc",
        "max_tokens": 16_000,
        "stream": True,
        "logprobs": 20,
        "ignore_eos": True,
    }
    async with running(tmp_path, executor, max_context_tokens="16384") as replica:
        data = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", replica.ports["http"])) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
                % (len(data), data)
            )
            state = await replica.until(lambda s: s.traffic.cancelled == 1)
            await eventually(lambda: replica.replica._door.live_requests == 0)
        state = await replica.until(lambda s: s.occupancy is not None)
    assert state.occupancy is not None
    assert state.occupancy.referenced_blocks == 0
    assert state.traffic.finished == 0
