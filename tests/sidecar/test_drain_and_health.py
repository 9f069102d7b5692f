"""Drain, probes, and what a replica says while it loads, serves and leaves."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvscaler.protocol.drain import DrainPhase
from kvscaler_sidecar.drain import ADMIN, SIGTERM, Drain
from kvscaler_sidecar.replica import Loaded

from tests.sidecar.replicas import ByteTokenizer, ParrotExecutor, running


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_drain(live: list[int], clock: Clock) -> Drain:
    return Drain(15, 600, lambda: live[0], clock, lambda: 1.8e9)


def test_phases_follow_time_and_live_requests() -> None:
    clock, live = Clock(), [1]
    drain = make_drain(live, clock)
    assert drain.phase is DrainPhase.SERVING
    drain.begin(ADMIN)
    assert drain.phase is DrainPhase.LINGERING
    clock.now += 14.9
    assert drain.phase is DrainPhase.LINGERING
    clock.now += 0.1
    assert drain.phase is DrainPhase.DRAINING
    live[0] = 0
    assert drain.phase is DrainPhase.EMPTY
    assert not drain.over, "only SIGTERM ends a process"


def test_a_drain_says_when_it_began_by_the_wall_clock() -> None:
    clock = Clock()
    drain = make_drain([1], clock)
    drain.begin(ADMIN)
    assert drain.report().since == 1.8e9
    drain.cancel()
    assert drain.report().since is None


async def test_a_drain_lasts_as_long_when_the_wall_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is put right by an hour must not end streams at once."""
    async with running(tmp_path, drain_linger_seconds="1") as replica:
        replica.replica.drain.begin(ADMIN)
        ahead = time.time() + 3600
        with monkeypatch.context() as set_clock:
            set_clock.setattr(time, "time", lambda: ahead)
            phase = replica.replica.drain.phase
    assert phase is DrainPhase.LINGERING


def test_sigterm_leaves_streams_their_full_time_even_after_a_long_drain() -> None:
    clock, live = Clock(), [1]
    drain = make_drain(live, clock)
    drain.begin(ADMIN, 60)
    clock.now += 500
    drain.begin(SIGTERM)
    assert drain.phase is DrainPhase.DRAINING, "the linger was over"
    assert not drain.over
    clock.now += 59
    assert not drain.over
    clock.now += 1
    assert drain.over


def test_sigterm_is_over_when_the_last_stream_is() -> None:
    clock, live = Clock(), [1]
    drain = make_drain(live, clock)
    drain.begin(SIGTERM)
    clock.now += 15
    assert not drain.over
    live[0] = 0
    assert drain.over


def test_an_idle_replica_lingers_before_it_is_empty() -> None:
    clock, live = Clock(), [0]
    drain = make_drain(live, clock)
    drain.begin(SIGTERM)
    assert drain.phase is DrainPhase.LINGERING
    assert not drain.over


def test_only_an_admin_drain_can_be_taken_back() -> None:
    clock, live = Clock(), [0]
    drain = make_drain(live, clock)
    drain.begin(ADMIN)
    since = drain.report().since
    clock.now += 5
    drain.begin(ADMIN)
    assert drain.report().since == since
    assert drain.cancel()
    assert drain.phase is DrainPhase.SERVING
    drain.begin(ADMIN)
    drain.begin(SIGTERM)
    drain.begin(ADMIN, 1)
    assert drain.report().reason == SIGTERM
    assert not drain.cancel()
    clock.now += 20
    assert drain.phase is DrainPhase.EMPTY
    assert drain.by_sigterm


async def ready_status(replica: Any) -> int:
    answer = await replica.client.get(replica.url("metrics", "/health/ready"))
    return int(answer.status_code)


async def test_lingering_accepts_and_says_close(tmp_path: Path) -> None:
    async with running(tmp_path, drain_linger_seconds="3600", drain_timeout_seconds="0") as replica:
        before = await replica.complete("abc", max_tokens=2)
        replica.replica.drain.begin(ADMIN)
        assert await ready_status(replica) == 503
        during = await replica.complete("abc", max_tokens=2)
        stream = await replica.complete("abc", max_tokens=2, stream=True)
        live = await replica.client.get(replica.url("metrics", "/health/live"))
        state = await replica.state()
        assert replica.replica.drain.cancel()
        assert await ready_status(replica) == 200
        after = await replica.complete("abc", max_tokens=2)
    assert "connection" not in before.headers
    assert during.status_code == 200
    assert during.headers["connection"] == "close"
    assert stream.headers["connection"] == "close"
    assert live.status_code == 200
    assert state.drain.phase is DrainPhase.LINGERING
    assert not state.ready
    assert "connection" not in after.headers


async def test_sigterm_refuses_new_finishes_old_and_exits_0(tmp_path: Path) -> None:
    executor = ParrotExecutor()
    async with running(tmp_path, executor) as replica:
        executor.gate.clear()
        stream = asyncio.create_task(replica.complete("abc", max_tokens=50, stream=True))
        await replica.stepping()
        replica.replica.begin_end()
        refused = await replica.complete("abc", max_tokens=2)
        replica.replica.begin_end()  # a second SIGTERM
        state = await replica.until(lambda s: s.drain.phase is DrainPhase.DRAINING)
        assert not replica.task.done()
        executor.gate.set()
        finished = await stream
        assert await asyncio.wait_for(asyncio.shield(replica.task), 20) == 0
    assert refused.status_code == 503
    assert refused.headers["x-kvscaler-reason"] == "Draining"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["connection"] == "close"
    assert state.drain.live_requests == 1
    assert state.drain.reason == "sigterm"
    assert finished.text.endswith("data: [DONE]\n\n")
    assert finished.text.count('"finish_reason":"length"') == 1


async def test_at_the_timeout_the_process_ends_with_what_is_left(tmp_path: Path) -> None:
    executor = ParrotExecutor()
    async with running(tmp_path, executor, drain_timeout_seconds="0") as replica:
        executor.gate.clear()
        stream = asyncio.create_task(replica.complete("abc", max_tokens=50, stream=True))
        await replica.stepping()
        replica.replica.begin_end()
        assert await asyncio.wait_for(asyncio.shield(replica.task), 30) == 0
        with pytest.raises(httpx.HTTPError):
            await stream


async def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    executor = ParrotExecutor()
    async with running(tmp_path, executor, drain_linger_seconds="3600") as replica:
        replica.replica._interrupt()
        await replica.until(lambda s: s.drain.phase is DrainPhase.LINGERING)
        assert not replica.task.done()
        replica.replica._interrupt()
        assert await asyncio.wait_for(asyncio.shield(replica.task), 20) == 130


async def test_a_drain_by_the_admin_api_does_not_end_the_process(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        replica.replica.drain.begin(ADMIN)
        await replica.until(lambda s: s.drain.phase is DrainPhase.EMPTY)
        assert (await replica.complete("abc")).status_code == 503
        assert not replica.task.done()
        assert replica.replica.drain.cancel()
        assert (await replica.complete("abc")).status_code == 200


async def test_while_loading_it_is_live_and_not_ready(tmp_path: Path) -> None:
    release = threading.Event()

    def slow(*_: Any) -> Loaded:
        release.wait()
        return Loaded(ParrotExecutor(), ByteTokenizer())

    async with running(tmp_path, loader=slow, wait_ready=False) as replica:
        client: httpx.AsyncClient = replica.client
        live = await client.get(replica.url("metrics", "/health/live"))
        refused = await replica.complete("abc")
        state = await replica.state()
        text = await replica.metrics()
        status = await ready_status(replica)
        release.set()
        await replica.until(lambda s: s.ready)
        served = await replica.complete("abc")
    assert live.status_code == 200
    assert status == 503
    assert refused.status_code == 503
    assert refused.headers["x-kvscaler-reason"] == "NotReady"
    assert state.capacity is None and state.occupancy is None and state.limits is None
    assert "kvscaler_kv_blocks" not in text
    assert "kvscaler_ready 0.0" in text
    assert served.status_code == 200


async def test_sigterm_while_loading_ends_at_once(tmp_path: Path) -> None:
    release = threading.Event()

    def slow(*_: Any) -> Loaded:
        release.wait()
        return Loaded(ParrotExecutor(), ByteTokenizer())

    async with running(tmp_path, loader=slow, wait_ready=False) as replica:
        replica.replica.begin_end()
        assert await asyncio.wait_for(asyncio.shield(replica.task), 20) == 0
        release.set()


async def test_a_model_that_does_not_load_ends_the_process(tmp_path: Path) -> None:
    def broken(*_: Any) -> Loaded:
        raise OSError("model.safetensors is cut short")

    async with running(tmp_path, loader=broken, wait_ready=False) as replica:
        code = await asyncio.wait_for(asyncio.shield(replica.task), 20)
    assert code == 71
    assert "model.safetensors is cut short" in replica.replica.last_words


@pytest.mark.parametrize("path", ["/metrics", "/state"])
async def test_pages_are_only_on_their_port(tmp_path: Path, path: str) -> None:
    async with running(tmp_path) as replica:
        answer = await replica.client.get(replica.url("http", path))
    assert answer.status_code == 404
