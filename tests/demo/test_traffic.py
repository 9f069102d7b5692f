"""The demo's traffic: arrivals as asked, and every body judged, not every connection."""

import asyncio

import pytest
from aiohttp import web

from hack.demo.traffic import Request, Result, Shape, Traffic

STREAM = (
    b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
    b'data: {"choices": [{"text": "b", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
    b"data: [DONE]\n\n"
)


async def serve(handler):
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    return runner, f"http://127.0.0.1:{port}"


async def run(handler, until) -> list[Request]:
    """Offer requests to `handler` until `until` of them have ended; all must then be judged."""
    runner, url = await serve(handler)
    traffic = Traffic(url, "m", Shape())
    task = asyncio.create_task(traffic.run())
    traffic.set_phase("spike", 200.0)
    async with asyncio.timeout(20):
        while sum(1 for r in traffic.requests if r.result) < until:
            await asyncio.sleep(0.01)
        traffic.set_phase("idle", 0.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await runner.cleanup()
    assert traffic.live == 0
    assert all(r.result for r in traffic.requests)
    return traffic.requests


async def test_a_whole_stream_is_ok_and_its_tokens_are_counted():
    async def handler(request):
        assert (await request.json())["stream"] is True
        return web.Response(body=STREAM, content_type="text/event-stream")

    requests = await run(handler, 5)
    assert {r.result for r in requests} == {Result.OK}
    assert {r.output_tokens for r in requests} == {2}
    assert all(r.first_token_seconds is not None for r in requests)


async def test_a_refusal_in_our_words_is_refused_and_any_other_answer_is_broken():
    async def ours(_):
        return web.json_response(
            {"error": {"message": "full"}}, status=429, headers={"x-kvscaler-reason": "QueueFull"}
        )

    async def theirs(_):
        return web.Response(status=404)

    assert {(r.result, r.reason) for r in await run(ours, 3)} == {(Result.REFUSED, "QueueFull")}
    assert {r.result for r in await run(theirs, 3)} == {Result.BROKEN}


@pytest.mark.parametrize("cut", [b"[DONE]", b'"finish_reason": "length"', b"usage"])
async def test_a_stream_that_ends_early_is_broken(cut):
    async def handler(_):
        return web.Response(body=STREAM.replace(cut, b"null"), content_type="text/event-stream")

    assert {r.result for r in await run(handler, 3)} == {Result.BROKEN}


async def test_ending_while_the_rate_changes_ends():
    async def handler(_):
        return web.Response(body=STREAM, content_type="text/event-stream")

    for _ in range(20):
        await run(handler, 1)
