"""The OpenAI API over a real socket: answers, streams, stops, usage, refusals."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from tests.sidecar.replicas import MODEL, ParrotExecutor, running


def chunks(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_completion_repeats_its_prompt(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        answer = (await replica.complete("abc", max_tokens=7)).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "abcabca", "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 7,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_end_of_sequence_stops_unless_ignored(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        stopped = (await replica.complete([104, 105, 0], max_tokens=9)).json()
        ignored = (await replica.complete([104, 105, 0], max_tokens=5, ignore_eos=True)).json()
    assert stopped["choices"][0]["text"] == "hi"
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == 3
    assert ignored["choices"][0]["text"] == "hi\0hi"
    assert ignored["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_ends_across_tokens_and_is_not_sent(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        whole = (await replica.complete("hello world", max_tokens=40, stop=["o w", "xyz"])).json()
        stream = await replica.complete("hello world", max_tokens=40, stop="o w", stream=True)
        state = await replica.until(lambda s: s.traffic.finished == 2)
    assert whole["choices"][0]["text"] == "hell"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 7
    pieces = [c["choices"][0]["text"] for c in chunks(stream)]
    assert "".join(pieces) == "hell"
    assert state.occupancy is not None and state.occupancy.referenced_blocks == 0


async def test_a_stream_has_one_chunk_a_token_and_usage_when_asked(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        response = await replica.complete(
            "né", max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    parts = chunks(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert [c["choices"][0]["text"] for c in parts[:-2]] == ["n", "é", "n", "é"]
    assert parts[-2]["choices"][0]["finish_reason"] == "length"
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 6
    assert all(part["usage"] is None for part in parts[:-1])
    assert len({part["id"] for part in parts}) == 1


async def test_incomplete_characters_come_out_at_the_end(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        answer = (await replica.complete("né", max_tokens=2)).json()
    assert answer["choices"][0]["text"] == "n�"


async def test_chat_streams_a_role_then_content(tmp_path: Path) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hey"}]}],
        "max_completion_tokens": 4,
    }
    async with running(tmp_path) as replica:
        whole = (await replica.post("/v1/chat/completions", body)).json()
        stream = await replica.post("/v1/chat/completions", {**body, "stream": True})
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["content"] == "user"
    assert whole["choices"][0]["message"]["role"] == "assistant"
    deltas = [c["choices"][0]["delta"] for c in chunks(stream)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content", "") for d in deltas) == "user"
    assert chunks(stream)[0]["object"] == "chat.completion.chunk"


async def test_several_prompts_and_choices_keep_their_order(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        answer = (await replica.complete(["ab", "xyz"], n=2, max_tokens=2, seed=7)).json()
        seeds = replica.executor
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in answer["choices"]] == ["ab", "ab", "xy", "xy"]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 8
    assert seeds.known == {}


async def test_logprobs_of_both_endpoints(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        plain = (await replica.complete("ab", max_tokens=2, logprobs=2)).json()
        chat = (
            await replica.post(
                "/v1/chat/completions",
                {
                    "model": MODEL,
                    "messages": [{"role": "user", "content": "x"}],
                    "max_tokens": 1,
                    "logprobs": True,
                    "top_logprobs": 1,
                },
            )
        ).json()
    assert plain["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}],
        "text_offset": [0, 1],
    }
    assert chat["choices"][0]["logprobs"]["content"] == [
        {
            "token": "u",
            "logprob": -0.5,
            "bytes": [117],
            "top_logprobs": [{"token": "u", "logprob": -0.5, "bytes": [117]}],
        }
    ]


async def test_cached_prompt_tokens_are_in_the_usage(tmp_path: Path) -> None:
    prompt = "0123456789abcdef"
    async with running(tmp_path) as replica:
        first = (await replica.complete(prompt, max_tokens=1)).json()
        second = (await replica.complete(prompt, max_tokens=1)).json()
        salted = (await replica.complete(prompt, max_tokens=1, cache_salt="mine")).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 12
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_models(tmp_path: Path) -> None:
    async with running(tmp_path, served_names="parrot,polly") as replica:
        listed = (await replica.client.get(replica.url("http", "/v1/models"))).json()
        one = await replica.client.get(replica.url("http", "/v1/models/polly"))
        none = await replica.client.get(replica.url("http", "/v1/models/cat"))
    assert [m["id"] for m in listed["data"]] == ["parrot", "polly"]
    assert one.json()["max_model_len"] == 128
    assert none.status_code == 404


async def test_many_streams_share_a_small_pool(tmp_path: Path) -> None:
    async with running(tmp_path, ParrotExecutor(kv_blocks=32)) as replica:
        answers = await asyncio.gather(
            *(replica.complete(f"stream {i:02d}", max_tokens=20) for i in range(40))
        )
        state = await replica.until(lambda s: s.traffic.finished == 40)
    for i, answer in enumerate(answers):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == (f"stream {i:02d}" * 3)[:20]
    assert state.occupancy is not None
    assert state.occupancy.referenced_blocks == 0
    assert state.traffic.preemptions == 0
