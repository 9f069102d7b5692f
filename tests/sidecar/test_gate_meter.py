"""Reading along with an answer, whatever way its bytes are cut."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler_sidecar.gate.meter import MAX_EVENT_BYTES, Meter, Usage

SSE = b"text/event-stream; charset=utf-8"


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}], "usage": None}


def events(*payloads: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(p).encode() + b"\n\n" for p in payloads)


CHAT = (
    events(
        chat(role="assistant", content=""),
        *(chat(content=f"tok{i}") for i in range(5)),
        {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 7}},
    )
    + b": a comment\r\n\r\nevent: x\ndata: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(CHAT)), max_size=12))
def test_a_stream_reads_the_same_however_it_is_cut(cuts: list[int]) -> None:
    meter = Meter(SSE, None)
    places = [0, *sorted(cuts), len(CHAT)]
    for start, end in itertools.pairwise(places):
        meter.feed(CHAT[start:end])
    assert meter.output_tokens == 5
    assert meter.usage == Usage(11, 7)
    assert not meter.failed


def test_no_event_before_the_first_output_is_a_token() -> None:
    meter = Meter(SSE, None)
    meter.feed(events(chat(role="assistant", content=""), chat(role="assistant", content=None)))
    assert meter.output_tokens == 0
    meter.feed(events(chat(reasoning_content="hm")))
    assert meter.output_tokens == 1


def test_usage_in_each_event_counts_output_too() -> None:
    meter = Meter(SSE, None)
    for tokens in (3, 6):
        event = {"choices": [{"text": "abc"}]}
        meter.feed(events({**event, "usage": {"prompt_tokens": 4, "completion_tokens": tokens}}))
    assert meter.output_tokens == 2
    assert meter.usage == Usage(4, 6)


def test_usage_that_comes_in_parts_is_put_together() -> None:
    """Anthropic's streams tell the prompt in the first event and the output in the last."""
    meter = Meter(SSE, None)
    meter.feed(
        events(
            {"type": "message_start", "message": {"usage": {"input_tokens": 9}}},
            {"type": "content_block_delta", "delta": {"text": "hi"}},
            {"type": "message_delta", "usage": {"output_tokens": 4}},
        )
    )
    assert meter.usage == Usage(9, 4)


def test_an_error_in_the_stream_is_one_and_the_word_in_a_text_is_not() -> None:
    meter = Meter(SSE, None)
    meter.feed(events(chat(content='"error": {"usage": {"prompt_tokens": 1}}')))
    assert not meter.failed and meter.usage is None
    meter.feed(events({"error": {"message": "boom"}}))
    assert meter.failed


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        ({"choices": [{"text": "x" * 200_000}], "usage": {"prompt_tokens": 1}}, Usage(1, None)),
        ({"usage": {"input_tokens": 2, "output_tokens": 3}, "id": "x"}, Usage(2, 3)),
        ({"choices": [{"text": '"usage": {"prompt_tokens": 9}'}]}, None),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": "many"}}, Usage(None, None)),
        ({"usage": 5}, None),
    ],
)
def test_whole_answers(body: Any, usage: Usage | None) -> None:
    meter = Meter(b"application/json", None)
    data = json.dumps(body).encode()
    for start in range(0, len(data), 1000):
        meter.feed(data[start : start + 1000])
    meter.end()
    assert meter.usage == usage


def test_what_is_compressed_or_of_another_kind_is_not_read() -> None:
    for kind, encoding in ((SSE, b"gzip"), (b"audio/wav", None), (None, None)):
        meter = Meter(kind, encoding)
        meter.feed(CHAT)
        meter.end()
        assert (meter.streams, meter.output_tokens, meter.usage) == (False, 0, None)


def test_an_event_without_an_end_is_not_kept() -> None:
    meter = Meter(SSE, None)
    for _ in range(200):
        meter.feed(b"data: " + b"x" * 100_000)
        assert len(meter._rest) <= MAX_EVENT_BYTES
    meter.feed(b"\n\n" + CHAT)
    assert meter.output_tokens == 5


@given(st.lists(st.binary(max_size=60), max_size=10))
def test_no_bytes_upset_it(parts: list[bytes]) -> None:
    for kind in (SSE, b"application/json"):
        meter = Meter(kind, None)
        for part in parts:
            meter.feed(part)
        meter.end()
        assert meter.output_tokens >= 0
