"""What a client can get wrong: each gets its status, a reason header and words that help."""

import asyncio
import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from kvscaler_sidecar.server.errors import Refusal
from kvscaler_sidecar.server.schema import parse_chat, parse_completion
from pydantic import ValidationError

from tests.sidecar.replicas import MODEL, Running, eventually, running

OK = {"model": MODEL, "prompt": "abc"}
CHAT_OK = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


async def refused(replica: Running, body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
    answer = await replica.post(path, body)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, (answer.headers["x-kvscaler-reason"], error)


async def test_over_http(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        status, (reason, error) = await refused(replica, b'{"model": "parrot", ')
        assert (status, reason) == (400, "InvalidRequest")
        assert "not valid JSON" in error["message"]
        status, (reason, error) = await refused(replica, {**OK, "model": "cat"})
        assert (status, reason, error["code"]) == (404, "UnknownModel", "model_not_found")
        assert MODEL in error["message"]
        status, (reason, error) = await refused(replica, {**OK, "prompt": ""})
        assert (status, reason) == (400, "InvalidRequest")
        assert "empty" in error["message"]
        status, (reason, error) = await refused(replica, {**OK, "prompt": []})
        assert (status, reason) == (400, "InvalidRequest")
        status, (reason, error) = await refused(replica, {**OK, "prompt": [1, 256]})
        assert (status, reason) == (400, "InvalidRequest")
        assert "256" in error["message"]
        status, (reason, error) = await refused(replica, {**OK, "prompt": "x" * 128})
        assert (status, reason) == (413, "ContextTooLong")
        assert "maximum context length is 128 tokens" in error["message"]
        assert error["code"] == "context_length_exceeded"
        status, (reason, error) = await refused(replica, {**OK, "max_tokens": 126})
        assert (status, reason, error["param"]) == (413, "ContextTooLong", "max_tokens")
        status, (reason, error) = await refused(
            replica, {**CHAT_OK, "tools": [{"type": "function"}]}, "/v1/chat/completions"
        )
        assert (status, reason, error["param"]) == (400, "UnsupportedField", "tools")
        state = await replica.state()
        assert state.traffic.refused == {
            "InvalidRequest": 4,
            "UnknownModel": 1,
            "ContextTooLong": 2,
            "UnsupportedField": 1,
        }
        assert (await replica.complete("still here", max_tokens=2)).status_code == 200


async def test_hostile_words_come_back_short_and_whole(tmp_path: Path) -> None:
    cases: list[tuple[bytes, int]] = [
        (b'{"model": "parrot", "prompt": "x", "\\ud800": 1}', 400),
        (b'{"model": "parrot", "prompt": "\\ud800"}', 400),
        (b'{"model": "\\udfff", "prompt": "x"}', 400),
        (b'{"model": "' + b"m" * 100_000 + b'", "prompt": "x"}', 404),
        (b'{"model": "parrot", "prompt": "x", "' + b"f" * 100_000 + b'": 1}', 400),
        (b'{"model": "parrot", "prompt": "x", "temperature": NaN}', 400),
        (b'{"model": "parrot", "prompt": "x", "max_tokens": 1e999}', 400),
        (b'{"model": "parrot", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", 400),
        (b'{"model": "parrot", "prompt": "x", "max_tokens": ' + b"9" * 50 + b"}", 413),
        (b'{"model": "parrot", "prompt": [' + b"9" * 50 + b"]}", 400),
    ]
    async with running(tmp_path) as replica:
        for body, status in cases:
            answer = await replica.post("/v1/completions", body)
            assert answer.status_code == status, body[:80]
            assert answer.json()["error"]["message"]
            assert len(answer.content) < 1000, body[:80]


async def test_unknown_paths_and_methods(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        missing = await replica.post("/v1/embeddings", OK)
        method = await replica.client.get(replica.url("http", "/v1/completions"))
    assert missing.status_code == 404
    assert "/v1/chat/completions" in missing.json()["error"]["message"]
    assert method.status_code == 405
    assert method.headers["allow"] == "POST"
    assert method.json()["error"]["message"] == "/v1/completions takes POST, not GET."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": 2**70}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"model": None}, "model"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_wrong_values_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse_completion(json.dumps({**OK, **fields}).encode())
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert param.split(".", maxsplit=1)[0] in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": 1}},
        {"functions": [{}]},
        {"audio": {}},
        {"web_search_options": {}},
        {"reasoning_effort": "low"},
        {"store": True},
        {"no_such_field": 1},
        {"stream_options": {"include_obfuscation": True}},
    ],
)
def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        parse_chat(json.dumps({**CHAT_OK, **fields}).encode())
    assert str(caught.value.reason) == "UnsupportedField"
    assert next(iter(fields)) in (caught.value.param or "")


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"best_of": 2},
        {"suffix": "x"},
        {"prompt_logprobs": 1},
        {"use_beam_search": True},
    ],
)
def test_unsupported_fields_of_completions(fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        parse_completion(json.dumps({**OK, **fields}).encode())
    assert caught.value.param == next(iter(fields))


def test_what_asks_for_nothing_is_accepted() -> None:
    parse_completion(
        json.dumps(
            {
                **OK,
                "user": "u-1",
                "echo": False,
                "best_of": 1,
                "suffix": None,
                "logit_bias": {},
                "logprobs": None,
                "stop": None,
                "temperature": None,
                "n": None,
                "stream_options": None,
            }
        ).encode()
    )
    parse_chat(
        json.dumps(
            {
                **CHAT_OK,
                "tools": None,
                "response_format": {"type": "text"},
                "metadata": {"a": "b"},
                "store": False,
                "service_tier": "auto",
            }
        ).encode()
    )


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"role": "tool", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "content": "x", "tool_calls": []}],
    ],
)
def test_messages_that_are_not_understood(messages: Any) -> None:
    with pytest.raises(Refusal) as caught:
        parse_chat(json.dumps({"model": MODEL, "messages": messages}).encode())
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith("messages")


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_bodies_that_are_no_object(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        parse_completion(body)
    assert caught.value.status == 400


async def test_a_100_mb_body_is_refused_without_reading_it(tmp_path: Path) -> None:
    """The answer comes after the head alone: none of the body was sent yet."""
    async with running(tmp_path) as replica:
        reader, writer = await asyncio.open_connection("127.0.0.1", replica.ports["http"])
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 104857600\r\n\r\n"
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"x-kvscaler-reason: BodyTooLarge" in head


async def test_a_chunked_body_is_counted(tmp_path: Path) -> None:
    """One byte more than the limit is enough, long before the client's end of the body."""
    async with running(tmp_path, max_body_bytes=100_000) as replica:
        reader, writer = await asyncio.open_connection("127.0.0.1", replica.ports["http"])
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(11):
            writer.write(b"%x\r\n%s\r\n" % (10_000, b"x" * 10_000))
        await writer.drain()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()
    assert head.startswith(b"HTTP/1.1 413 ")


async def test_bodies_that_are_being_read_are_bounded_together(tmp_path: Path) -> None:
    """Many large bodies at once are refused, not kept; when they are gone there is room again."""
    part = b"x" * 1_000_000
    async with running(tmp_path) as replica:
        held = replica.replica._api.intake.held
        writers = []
        for _ in range(8):
            _, writer = await asyncio.open_connection("127.0.0.1", replica.ports["http"])
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            writer.write(b"Content-Length: 8388608\r\n\r\n")
            writer.write(part * 8)
            await writer.drain()
            writers.append(writer)
        await eventually(lambda: held.bytes == 64_000_000)
        refused = await replica.complete("x" * 4_000_000)
        for writer in writers:
            writer.transport.abort()
        await eventually(lambda: held.bytes == 0)
        served = await replica.complete("abc", max_tokens=2)
    assert refused.status_code == 429
    assert refused.headers["x-kvscaler-reason"] == "QueueBytesFull"
    assert served.status_code == 200


async def test_a_long_prompt_is_tokenized_in_a_thread_and_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        answer = await replica.complete("x" * 300_000)
    assert answer.status_code == 413
    assert "300000 tokens" in answer.json()["error"]["message"]


HALF_PAIR = b"\xed\xa0\x80"  # U+D800 as UTF-8 would have it, if it were a character


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "prompt": "a' + HALF_PAIR + b'"}',
        '{"model": "m", "prompt": "a\ud800"}'.encode("utf-16-le", "surrogatepass"),
        r'{"model": "m", "prompt": "a\ud800"}'.encode("utf-16-le"),
        rb'{"model": "m", "prompt": "a\uD800"}',
    ],
)
def test_text_that_is_no_unicode_is_no_json(body: bytes) -> None:
    with pytest.raises(Refusal) as raised:
        parse_completion(body)
    assert raised.value.status == 400
    assert "not valid JSON" in raised.value.message


def test_half_a_surrogate_pair_in_a_chat_is_refused() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "' + HALF_PAIR + b'"}]}'
    with pytest.raises(Refusal) as raised:
        parse_chat(body)
    assert raised.value.status == 400


@pytest.mark.parametrize("wrong", [-1, [-1], None, {}])
def test_a_list_is_judged_by_its_first_wrong_item(wrong: object) -> None:
    """An error for each of a million items took minutes and gigabytes, and with them the replica."""
    body = json.dumps({"model": "m", "prompt": [wrong] * 100_000}).encode()
    tracemalloc.start()
    with pytest.raises(Refusal) as raised:
        parse_completion(body)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert raised.value.status == 400
    assert peak_bytes < 20 * len(body)


def test_messages_are_judged_by_the_first_wrong_one() -> None:
    for wrong in ({}, {"role": "user", "content": [{}] * 1000}):
        body = json.dumps({"model": "m", "messages": [wrong] * 100}).encode()
        with pytest.raises(Refusal) as raised:
            parse_chat(body)
        assert raised.value.status == 400
        assert isinstance(raised.value.__context__, ValidationError)
        assert raised.value.__context__.error_count() <= 3


async def test_a_long_chat_is_rendered_beside_the_event_loop(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []

    def render(messages: object) -> str:
        threads.append(threading.current_thread())
        return "x" * 200

    async with running(tmp_path) as replica:
        serving = replica.replica._serving
        assert serving is not None
        serving.text.render_chat = render  # type: ignore[method-assign]
        path = "/v1/chat/completions"
        for messages in (CHAT_OK["messages"], CHAT_OK["messages"] * 500):
            answer = await replica.post(path, {"model": MODEL, "messages": messages})
            assert answer.status_code == 413
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_what_can_not_fit_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    """Encoding takes 200 times a text's memory: a prompt of 8 MB would end the replica."""
    encoded: list[int] = []

    def encode(text: str) -> list[int]:
        encoded.append(len(text))
        return list(text.encode())

    async with running(tmp_path) as replica:
        serving = replica.replica._serving
        assert serving is not None
        serving.text.encode = encode  # type: ignore[method-assign]
        long = "x" * 2_000_000
        chat = {"model": MODEL, "messages": [{"role": "user", "content": long}]}
        for path, body in (
            ("/v1/completions", {"model": MODEL, "prompt": long}),
            ("/v1/chat/completions", chat),
        ):
            status, (reason, error) = await refused(replica, body, path)
            assert (status, reason) == (413, "ContextTooLong")
            assert "or more; this model's maximum context length is 128" in error["message"]
        many = {"model": MODEL, "prompt": ["a"] * 129}
        assert (await refused(replica, many))[0] == 400
        assert encoded == []
        assert (await replica.complete("abc", max_tokens=2)).status_code == 200
    assert encoded == [3]
