"""What bodies of all kinds ask for, and what that is charged."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvscaler.engine.token_estimate import TEMPLATE_TOKENS, ChargeBasis, LearnedTokens
from kvscaler_sidecar.gate.charge import (
    MESSAGE_TOKENS,
    UNKNOWN_ENDPOINT,
    Charge,
    Work,
    charge,
    read_body,
    work_of,
)

WORST = 1000
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}


def charged(body: Any, work: Work = Work.GENERATES, default: int | None = None) -> Charge:
    asked = read_body(body if isinstance(body, bytes) else json.dumps(body).encode())
    return charge(
        asked, work, LearnedTokens(), default_output_tokens=default, worst_case_tokens=WORST
    )


@pytest.mark.parametrize(
    ("method", "path", "work"),
    [
        ("POST", "/v1/chat/completions", Work.GENERATES),
        ("POST", "/v1/embeddings", Work.PROMPT_ONLY),
        ("POST", "/tokenize", Work.NONE),
        ("GET", "/v1/models", Work.NONE),
        ("HEAD", "/v1/chat/completions", Work.NONE),
        ("POST", "/v1/audio/speech", Work.UNKNOWN),
        ("PUT", "/v1/chat/completions", Work.UNKNOWN),
        ("POST", "/v1/completions/", Work.UNKNOWN),
    ],
)
def test_work_is_known_by_method_and_path(method: str, path: str, work: Work) -> None:
    assert work_of(method, path) is work


@pytest.mark.parametrize(
    ("body", "prompts", "output", "choices"),
    [
        ({"prompt": [1, 2, 3], "max_tokens": 7}, (3,), 7, 1),
        ({"prompt": [[1, 2], [3]], "max_tokens": 7, "n": 2}, (2, 1), 7, 2),
        ({"prompt": [1], "max_tokens": 3, "max_completion_tokens": 9}, (1,), 9, 1),
        ({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 5, "n": 3}}, (2,), 5, 3),
        ({"prompt": [1], "n_predict": -1}, (1,), WORST - 1, 1),
        ({"prompt": [1], "max_tokens": "7", "n": " 3 "}, (1,), 7, 3),  # as lenient engines read it
        ({"prompt": [1], "max_tokens": "7e", "n": "nan"}, (1,), WORST - 1, 1),
        ({"prompt": [1], "max_tokens": True, "best_of": 4, "n": 2}, (1,), WORST - 1, 4),
    ],
)
def test_what_is_exact(body: Any, prompts: tuple[int, ...], output: int, choices: int) -> None:
    made = charged(body)
    assert made.prompts == prompts
    assert set(made.max_new_tokens) == {output}
    assert made.choices == choices
    assert made.basis is ChargeBasis.EXACT


def test_texts_are_charged_by_their_bytes_until_something_is_learned() -> None:
    assert charged({"prompt": "é" * 10, "max_tokens": 1}).prompts == (20 + MESSAGE_TOKENS,)
    made = charged({"prompt": ["a", "bc"], "max_tokens": 1})
    assert made.prompts == (1 + MESSAGE_TOKENS, 2 + MESSAGE_TOKENS)
    assert made.text_bytes is None, "one usage tells nothing of each"
    chat = charged({"messages": [{"role": "user", "content": "hey"}], "max_tokens": 1})
    assert chat.prompts == (len("rolecontentuserhey") + TEMPLATE_TOKENS + MESSAGE_TOKENS,)
    assert chat.basis is ChargeBasis.NOTHING_LEARNED


def test_an_estimate_alone_makes_no_request_too_long() -> None:
    made = charged({"prompt": "x" * 100_000, "max_tokens": 10})
    assert made.prompts[0] + made.max_new_tokens[0] == WORST
    assert charged({"prompt": "x", "max_tokens": 10**30}).max_new_tokens[0] > WORST


def test_a_request_that_names_no_length_gets_the_engines_or_all_there_is() -> None:
    assert charged({"prompt": [1, 2]}, default=16).max_new_tokens == (16,)
    assert charged({"prompt": [1, 2]}).max_new_tokens == (WORST - 2,)
    assert charged({"input": [1, 2], "max_tokens": 9}, Work.PROMPT_ONLY).max_new_tokens == (0,)


@pytest.mark.parametrize(
    ("body", "basis"),
    [
        (b"", ChargeBasis.UNREADABLE_BODY),
        (b"[1]", ChargeBasis.UNREADABLE_BODY),
        (b"[" * 100_000, ChargeBasis.UNREADABLE_BODY),
        (b"\xff\xfe", ChargeBasis.UNREADABLE_BODY),
        (b'{"max_tokens": 1}', ChargeBasis.UNREADABLE_BODY),
        # A few bytes each, and a hundred when parsed.
        (b'{"prompt": [' + b"[]," * 300_000 + b"[]]}", ChargeBasis.UNREADABLE_BODY),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", ChargeBasis.UNREADABLE_BODY),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 1},
            ChargeBasis.UNKNOWN_CONTENT,
        ),
        ({"input": "x", "previous_response_id": "r1"}, ChargeBasis.UNKNOWN_CONTENT),
    ],
)
def test_what_cannot_be_computed_is_the_worst_case_under_every_policy(
    body: Any, basis: ChargeBasis
) -> None:
    made = charged(body)
    assert (made.prompts, made.max_new_tokens, made.basis) == ((WORST,), (0,), basis)
    unknown = charge(
        UNKNOWN_ENDPOINT, Work.UNKNOWN, LearnedTokens(),
        default_output_tokens=None, worst_case_tokens=WORST,
    )  # fmt: skip
    assert unknown.prompts == (WORST,)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["prompt", "messages", "input", "n", "max_tokens", "type", "text"])
                | st.text(),
                inner,
                max_size=5,
            )
        ),
        max_leaves=20,
    )
)
def test_any_json_is_charged_something_that_fits_or_is_exact(body: Any) -> None:
    made = charged(body)
    assert made.choices >= 1
    assert len(made.prompts) == len(made.max_new_tokens) >= 1
    assert all(tokens >= 1 for tokens in made.prompts)
    assert all(output >= 0 for output in made.max_new_tokens)


@given(st.binary(max_size=200))
def test_any_bytes_are_charged(body: bytes) -> None:
    assert all(tokens >= 1 for tokens in charged(body).prompts)
