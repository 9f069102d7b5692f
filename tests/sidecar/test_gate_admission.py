"""Admission at a gate: what it charges, what waits, what is refused, and what it learns."""

import asyncio
import json
from pathlib import Path
from typing import Any

from kvscaler.budget import AdmissionPolicy
from kvscaler.protocol.limits import ChargePolicy, LimitsPut

from tests.sidecar.gates import WORST_CASE, before, body_of, gated, scripted
from tests.sidecar.replicas import ParrotExecutor, eventually, running


class Held:
    """A script whose answers wait until they are let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.forwarded = 0
        self.usage: dict[str, int] | None = None

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = self.engine.requests[-1]
        await body_of(reader, head)
        self.forwarded += 1
        await self.go.wait()
        body = json.dumps({"choices": [], "usage": self.usage}).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )

    engine: Any = None


async def test_only_what_fits_is_forwarded_and_the_rest_waits_in_order() -> None:
    held = Held()
    async with (
        scripted(held, kv_blocks=8) as held.engine,
        gated(held.engine.url, held.engine.pages_url) as gate,
    ):
        ids = list(range(4))
        requests = [
            asyncio.create_task(gate.complete(ids, max_tokens=12)) for _ in range(5)
        ]  # 4 blocks each, of 8
        await gate.until(lambda s: s.occupancy is not None and s.occupancy.waiting_requests == 3)
        await eventually(lambda: held.forwarded == 2)
        state = await gate.state()
        assert state.occupancy is not None
        assert state.occupancy.reserved_blocks == 8
        assert state.occupancy.waiting_blocks == 12
        assert state.occupancy.waiting_tokens == 12
        assert held.forwarded == 2
        held.usage = {"prompt_tokens": 4, "completion_tokens": 12}
        held.go.set()
        answers = await asyncio.gather(*requests)
        after = await gate.state()
    assert [a.status_code for a in answers] == [200] * 5
    assert after.traffic.finished == after.traffic.admitted == after.traffic.arrivals == 5
    assert after.traffic.finished_output_tokens == 60
    assert after.in_flight.requests == 0


async def test_a_full_queue_a_long_wait_and_what_never_fits() -> None:
    held = Held()
    policy = AdmissionPolicy(
        charge=ChargePolicy.WORST_CASE, watermark_percent=0, queue_requests=1, max_wait_seconds=1
    )
    async with (
        scripted(held, kv_blocks=8) as held.engine,
        gated(held.engine.url, held.engine.pages_url, policy=policy) as gate,
    ):
        ids = list(range(4))
        first = asyncio.create_task(gate.complete(ids, max_tokens=28))
        await eventually(lambda: held.forwarded == 1)
        second = asyncio.create_task(gate.complete(ids, max_tokens=28))
        await gate.until(lambda s: s.occupancy is not None and s.occupancy.waiting_requests == 1)
        full = await gate.complete(ids, max_tokens=28)
        late = await second
        never = await gate.complete(ids, max_tokens=29)
        held.go.set()
        served = await first
        state = await gate.state()
    assert served.status_code == 200
    assert (full.status_code, full.headers["x-kvscaler-reason"]) == (429, "QueueFull")
    assert (late.status_code, late.headers["x-kvscaler-reason"]) == (503, "QueueTimeout")
    assert never.status_code == 413
    for refused in (full, late):
        assert int(refused.headers["retry-after"]) >= 1
        assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
    assert state.traffic.refused["QueueFull"] == state.traffic.refused["QueueTimeout"] == 1


async def test_what_cannot_be_computed_is_charged_the_worst_case() -> None:
    held = Held()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with (
        scripted(held, kv_blocks=32) as held.engine,
        gated(held.engine.url, held.engine.pages_url) as gate,
    ):
        bodies: list[tuple[str, Any, str]] = [
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1},
                "UnknownContent",
            ),
            ("/v1/completions", "{not JSON", "UnreadableBody"),
            ("/v9/wonder", {"prompt": "x", "max_tokens": 1}, "UnknownEndpoint"),
        ]
        for count, (path, body, basis) in enumerate(bodies, start=1):
            held.go.clear()
            request = asyncio.create_task(gate.post(path, body))
            await eventually(lambda count=count: held.forwarded == count)
            state = await gate.state()
            assert state.occupancy is not None
            assert state.occupancy.reserved_blocks == 32, basis
            held.go.set()
            assert (await request).status_code == 200
            assert f'kvscaler_gate_charges_total{{basis="{basis}"}} 1.0' in await gate.metrics()
        state, page = await gate.state(), await gate.metrics()
    assert state.traffic.finished == 0, "nobody told their lengths"
    assert state.traffic.admitted == 3
    assert "kvscaler_gate_unmeasured_answers_total 3.0" in page


async def test_embeddings_are_charged_their_prompt_only() -> None:
    held = Held()
    async with (
        scripted(held, kv_blocks=8) as held.engine,
        gated(held.engine.url, held.engine.pages_url) as gate,
    ):
        request = asyncio.create_task(
            gate.post("/v1/embeddings", {"input": list(range(10)), "max_tokens": 100})
        )
        await eventually(lambda: held.forwarded == 1)
        state = await gate.state()
        held.usage = {"prompt_tokens": 10, "total_tokens": 10}
        held.go.set()
        assert (await request).status_code == 200
        after = await gate.state()
    assert state.occupancy is not None and state.occupancy.reserved_blocks == 3
    assert (after.traffic.finished, after.traffic.finished_output_tokens) == (1, 0)


async def test_text_is_charged_by_what_answers_teach() -> None:
    """A byte is a token at first; the engine says that four are."""
    held = Held()
    held.go.set()
    async with (
        scripted(held, kv_blocks=32) as held.engine,
        gated(held.engine.url, held.engine.pages_url) as gate,
    ):
        held.usage = {"prompt_tokens": 15, "completion_tokens": 2}
        await gate.complete("x" * 60, max_tokens=4)
        held.go.clear()
        request = asyncio.create_task(gate.complete("y" * 60, max_tokens=4))
        await eventually(lambda: held.forwarded == 2)
        state, page = await gate.state(), await gate.metrics()
        held.go.set()
        await request
    assert state.occupancy is not None
    assert state.occupancy.reserved_blocks == 5  # 15 + 4 tokens
    assert 'basis="NothingLearned"} 1.0' in page
    assert 'basis="Learned"} 1.0' in page


async def test_usage_corrects_lengths_and_streams_are_counted_without_it(tmp_path: Path) -> None:
    async with running(tmp_path, ParrotExecutor(kv_blocks=128)) as engine, before(engine) as gate:
        plain = await gate.complete("abcdefgh", max_tokens=20, stream=True, ignore_eos=True)
        counted = await gate.until(lambda s: s.traffic.finished == 1)
        told = await gate.complete(
            "abcdefgh", max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        exact = await gate.until(lambda s: s.traffic.finished == 2)
    assert plain.text.endswith("data: [DONE]\n\n") and told.text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in plain.text, "the gate asked for nothing that the client did not ask for"
    assert abs(counted.traffic.finished_output_tokens - 20) <= 1
    more = exact.traffic.finished_output_tokens - counted.traffic.finished_output_tokens
    assert more == 20
    assert exact.traffic.finished_prompt_tokens - counted.traffic.finished_prompt_tokens == 8
    assert sum(exact.traffic.time_to_first_token.counts) == 2
    assert sum(exact.traffic.time_per_output_token.counts) == 2


async def test_a_whole_answer_says_nothing_of_its_first_token(tmp_path: Path) -> None:
    async with running(tmp_path) as engine, before(engine) as gate:
        await gate.complete("abcdefgh", max_tokens=20)
        state = await gate.until(lambda s: s.traffic.finished == 1)
    assert state.traffic.finished_output_tokens == 20
    assert sum(state.traffic.time_to_first_token.counts) == 0
    assert sum(state.traffic.time_per_output_token.counts) == 0


async def test_sequences_that_do_not_fit_together_run_all_the_same(tmp_path: Path) -> None:
    """Four choices of 8 blocks in a pool of 16: the engine runs them two by two."""
    executor = ParrotExecutor(kv_blocks=16)
    async with running(tmp_path, executor) as engine, before(engine) as gate:
        answers = await asyncio.gather(
            *(gate.complete("abcdefgh", max_tokens=24, n=4) for _ in range(3))
        )
        state = await gate.until(lambda s: s.in_flight.requests == 0)
    assert [a.status_code for a in answers] == [200] * 3
    assert all(len(a.json()["choices"]) == 4 for a in answers)
    assert state.traffic.finished == 12
    assert state.traffic.cancelled == 0


async def test_limits_tighten_and_the_engine_never_sees_more(tmp_path: Path) -> None:
    executor = ParrotExecutor(kv_blocks=64)
    async with running(tmp_path, executor) as engine, before(engine) as gate:
        own = (await gate.state()).limits
        assert own is not None and own.applied.kv_blocks == 64
        tight = own.applied.model_copy(update={"kv_blocks": 8, "max_sequences": 9999})
        report = gate.desk.put_limits(LimitsPut(if_hash=own.hash, limits=tight))
        assert report.clamped == ("max_sequences",)
        assert report.applied.kv_blocks == 8
        executor.gate.clear()
        requests = [
            asyncio.create_task(gate.complete([65, 66, 67, 68], max_tokens=12)) for _ in range(6)
        ]
        await gate.until(lambda s: s.occupancy is not None and s.occupancy.waiting_requests >= 4)
        inside = await engine.state()
        executor.gate.set()
        answers = await asyncio.gather(*requests)
        never = await gate.complete([1] * 8, max_tokens=30)
    assert (
        inside.in_flight.requests + (inside.occupancy.waiting_requests if inside.occupancy else 0)
        <= 2
    )
    assert [a.status_code for a in answers] == [200] * 6
    assert never.status_code == 413


async def test_many_hostile_bodies_end_in_answers_and_an_empty_desk(tmp_path: Path) -> None:
    bodies: list[Any] = [
        "", "null", "[]", "[" * 5000, "{}", '{"prompt": }', '{"prompt": 1e999, "max_tokens": -1}',
        {"prompt": None}, {"prompt": []}, {"prompt": {}}, {"prompt": [[]]}, {"prompt": [True]},
        {"prompt": "x", "max_tokens": 10**30}, {"prompt": "x", "max_tokens": "many"},
        {"prompt": "x", "n": 10**9}, {"prompt": "x", "n": True, "best_of": 3.7},
        {"prompt": ["x"] * 1000}, {"prompt": "\ud800"}, {"messages": "x"}, {"messages": [1, None]},
        {"prompt": "x", "stream": "yes", "parameters": {"max_new_tokens": 3}, "sampling_params": 1},
    ]  # fmt: skip
    async with running(tmp_path) as engine, before(engine) as gate:
        for body in bodies:
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v9"):
                answer = await gate.post(path, body)
                assert 400 <= answer.status_code < 500, (path, body)
                assert answer.headers.get("x-kvscaler-reason") or answer.status_code == 404
        state = await gate.state()
        assert (await gate.complete("abc", max_tokens=2)).status_code == 200
    assert state.in_flight.requests == 0
    assert state.occupancy is not None and state.occupancy.waiting_requests == 0


async def test_observe_and_off_forward_everything() -> None:
    held = Held()
    for mode in ("Observe", "Off"):
        held.go.clear()
        held.forwarded = 0
        async with scripted(held, kv_blocks=8) as held.engine:
            own = AdmissionPolicy(mode=mode, charge=ChargePolicy.WORST_CASE)  # type: ignore[arg-type]
            async with gated(held.engine.url, held.engine.pages_url, policy=own) as gate:
                requests = [
                    asyncio.create_task(gate.complete(list(range(4)), max_tokens=28))
                    for _ in range(5)
                ]
                await eventually(lambda: held.forwarded == 5)
                held.go.set()
                assert [(await r).status_code for r in requests] == [200] * 5
    assert WORST_CASE.mode == "Enforce"
