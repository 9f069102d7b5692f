"""What a gate says of itself and its engine, and how it begins and ends."""

import asyncio
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from kvscaler.protocol.drain import DrainPhase, DrainPut
from kvscaler.protocol.limits import LimitsPut
from kvscaler.protocol.state import TrafficCounters
from kvscaler_operator.gateways.sidecar import Endpoint, Fault, SidecarError, SidecarGateway
from kvscaler_operator.keys import SigningKey
from kvscaler_sidecar.drain import ADMIN, Drain
from kvscaler_sidecar.gate import watch
from kvscaler_sidecar.server.observe import drained

from tests.sidecar.gates import Gated, answers, before, body_of, gated, scripted, small_state
from tests.sidecar.replicas import ParrotExecutor, eventually, running

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def ready(gate: Gated) -> tuple[int, str]:
    answer = await gate.client.get(gate.url("metrics", "/health/ready"))
    return answer.status_code, answer.text


async def test_the_operator_talks_to_a_gate_as_to_a_replica(tmp_path: Path) -> None:
    pem = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    key = SigningKey.from_pem(pem, "a test")
    (tmp_path / "gate-keys").mkdir()
    (tmp_path / "gate-keys" / "current.pem").write_text(key.public_pem)
    async with (
        running(tmp_path) as engine,
        before(engine, admin_keys_dir=str(tmp_path / "gate-keys")) as gate,
    ):
        gateway = SidecarGateway(lambda: key, timeout_seconds=20)
        here = Endpoint(
            service_uid="service-1", pod_uid="pod-1", pod_name="chat-abc", ip="127.0.0.1",
            state_port=gate.ports["metrics"], admin_port=gate.ports["admin"],
        )  # fmt: skip
        try:
            state = await gateway.state(here)
            assert state.limits is not None and state.capacity is not None
            assert state.limits.hash == state.limits.own_hash
            assert state.limits.applied.kv_blocks == state.capacity.kv_blocks == 64
            tight = state.limits.applied.model_copy(update={"kv_blocks": 10})
            report = await gateway.put_limits(
                here, LimitsPut(if_hash=state.limits.hash, limits=tight)
            )
            assert report.applied.kv_blocks == 10
            with pytest.raises(SidecarError) as conflict:
                await gateway.put_limits(here, LimitsPut(if_hash=state.limits.hash, limits=tight))
            assert conflict.value.fault is Fault.CONFLICT
            more = tight.model_copy(update={"kv_blocks": 9999})
            report = await gateway.put_limits(here, LimitsPut(if_hash=report.hash, limits=more))
            assert (report.applied.kv_blocks, report.clamped) == (64, ("kv_blocks",))
            assert (await gateway.put_drain(here, DrainPut(drain=True))).phase is DrainPhase.EMPTY
            assert (await gate.complete("abc")).status_code == 503
            assert (await gateway.put_drain(here, DrainPut(drain=False))).phase is (
                DrainPhase.SERVING
            )
            assert (await gate.complete("abc")).status_code == 200
        finally:
            await gateway.close()
        unsigned = await gate.client.put(gate.url("admin", "/admin/v1/drain"), content=b"{}")
        inside = await engine.state()
    assert unsigned.status_code == 401
    assert inside.limits is not None and inside.limits.requested_hash is None


async def test_occupancy_is_the_engines_own(tmp_path: Path) -> None:
    executor = ParrotExecutor(kv_blocks=64)
    async with running(tmp_path, executor) as engine, before(engine) as gate:
        await gate.complete("abcd" * 4, max_tokens=8)
        executor.gate.clear()
        executor.entered.clear()
        request = asyncio.create_task(gate.complete([65] * 16, max_tokens=8))
        await engine.stepping()
        await engine.until(lambda s: s.occupancy is not None and s.occupancy.running_requests == 1)
        inside = await engine.state()
        state = await gate.until(
            lambda s: s.occupancy is not None and s.occupancy.running_requests == 1
        )
        page = await gate.metrics()
        executor.gate.set()
        await request
    assert state.occupancy is not None and inside.occupancy is not None
    assert state.occupancy.referenced_blocks == inside.occupancy.referenced_blocks > 0
    assert state.occupancy.cached_blocks == inside.occupancy.cached_blocks > 0
    assert state.capacity == inside.capacity
    assert state.executor == inside.executor
    assert state.model == inside.model
    assert state.budget == inside.budget
    assert (state.service_uid, state.pod_uid) == ("service-1", "pod-1")
    assert 'kvscaler_kv_blocks{state="cached"}' in page
    assert state.traffic.steps == inside.traffic.steps


async def test_before_the_engine_is_seen_nothing_is_admitted_and_nothing_invented() -> None:
    async with (
        scripted(answers(OK)) as engine,
        gated(engine.url, "http://127.0.0.1:9", wait_ready=False) as gate,
    ):
        refused = await gate.complete("abc")
        passed = await gate.client.get(gate.url("http", "/v1/models"))
        state, page = await gate.state(), await gate.metrics()
        status, words = await ready(gate)
        live = await gate.client.get(gate.url("metrics", "/health/live"))
        limits = gate.gate.limits_report
        with pytest.raises(Exception, match="can't be reached"):
            await eventually(lambda: gate.gate._watch.problem != watch.NOT_SEEN)
            await limits()
    assert (refused.status_code, refused.headers["x-kvscaler-reason"]) == (503, "NotReady")
    assert passed.content == b"ok"
    assert state.occupancy is None and state.capacity is None and state.limits is None
    assert "kvscaler_kv_blocks" not in page
    assert status == 503 and "engine unknown" in words
    assert live.status_code == 200


async def test_an_engine_that_falls_silent_is_unknown_and_not_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "FRESH_SECONDS", 0.5)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)
    async with scripted(answers(OK)) as engine, gated(engine.url, engine.pages_url) as gate:
        good = engine.state
        engine.pages_status = b"500 Oops"
        lost = await gate.until(lambda s: not s.ready)
        status, words = await ready(gate)
        engine.pages_status = b"200 OK"
        assert good is not None
        engine.state = good.model_copy(update={"ready": False})
        await gate.until(lambda s: s.occupancy is not None)
        unready = await ready(gate)
        engine.state = good
        await gate.until(lambda s: s.ready)
    assert lost.occupancy is None and lost.step_costs is None
    assert lost.capacity is not None, "what was allocated does not change"
    assert status == 503 and "500" in words
    assert unready == (503, "the engine is not ready\n")


async def test_an_engine_that_comes_back_with_another_pool_sets_other_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)
    async with scripted(answers(OK)) as engine, gated(engine.url, engine.pages_url) as gate:
        assert engine.state is not None
        counted = engine.state.model_copy(update={"traffic": TrafficCounters(steps=70)})
        engine.state = counted
        await gate.until(lambda s: s.traffic.steps == 70)
        desk = gate.desk
        tight = desk.limits_report().applied.model_copy(update={"kv_blocks": 5})
        desk.put_limits(LimitsPut(limits=tight))
        engine.state = small_state(kv_blocks=24, started_at=2.0).model_copy(
            update={"traffic": TrafficCounters(steps=3)}
        )
        state = await gate.until(lambda s: s.traffic.steps == 73)
        fits = await gate.complete(list(range(8)), max_tokens=80)
        never = await gate.complete(list(range(8)), max_tokens=100)
    assert state.limits is not None
    assert state.limits.hash == state.limits.own_hash
    assert state.limits.applied.kv_blocks == 24
    assert (fits.status_code, never.status_code) == (200, 413)


async def test_sigterm_finishes_streams_refuses_others_and_tells_who_waits() -> None:
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(reader, engine.requests[-1])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                     b"transfer-encoding: chunked\r\n\r\n6\r\nfirst \r\n")  # fmt: skip
        await go.wait()
        writer.write(b"4\r\nlast\r\n0\r\n\r\n")

    async with scripted(script) as engine, gated(engine.url, engine.pages_url) as gate:
        stream = asyncio.create_task(gate.complete([1], max_tokens=9, stream=True))
        await eventually(lambda: engine.requests)
        waits = asyncio.create_task(gate.client.get(gate.url("metrics", "/drain/wait"), timeout=60))
        gate.gate.begin_end()
        state = await gate.until(lambda s: s.drain.phase is DrainPhase.DRAINING)
        refused = await gate.complete([1], max_tokens=9)
        assert not waits.done() and not gate.task.done()
        go.set()
        answer = await stream
        told = await waits
        assert await asyncio.wait_for(asyncio.shield(gate.task), 20) == 0
    assert answer.text == "first last"
    assert state.drain.live_requests == 1
    assert (refused.status_code, refused.headers["x-kvscaler-reason"]) == (503, "Draining")
    assert refused.headers["connection"] == "close"
    assert (told.status_code, told.text) == (200, "drained\n")


async def never() -> bool:
    return False


async def test_waiting_for_a_drain_that_does_not_begin_ends() -> None:
    drain = Drain(0, 600, lambda: 1, lambda: 0.0, lambda: 0.0)
    health = await drained(drain, never, begin_seconds=0.1)
    assert not health.ok and "no drain has begun" in health.message


async def test_waiting_survives_a_drain_that_is_taken_back() -> None:
    live = [1]
    drain = Drain(0, 600, lambda: live[0], lambda: 0.0, lambda: 0.0)
    drain.begin(ADMIN)
    waits = asyncio.create_task(drained(drain, never, begin_seconds=30))
    await asyncio.sleep(0)
    drain.cancel()
    await asyncio.sleep(0)
    assert not waits.done()
    drain.begin(ADMIN)
    live[0] = 0
    assert (await asyncio.wait_for(waits, 20)).ok


async def test_who_waits_no_more_is_let_go() -> None:
    async def left() -> bool:
        return True

    drain = Drain(0, 600, lambda: 1, lambda: 0.0, lambda: 0.0)
    drain.begin(ADMIN)
    assert not (await asyncio.wait_for(drained(drain, left), 20)).ok
