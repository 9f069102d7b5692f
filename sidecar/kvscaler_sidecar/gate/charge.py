"""What a request is charged before anybody has counted its tokens.

A gate does not tokenize. It knows the text of a prompt, learns from answers how many tokens such
texts have, and reads how much output is asked for, under every name that engines know. What it
can't compute (a picture, a body that it does not understand, an endpoint that it has never heard
of) is charged the longest request that the limits admit, with that reason. The body itself is
never changed, and whether it is right is the engine's to say.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvscaler.engine.token_estimate import TEMPLATE_TOKENS, ChargeBasis, LearnedTokens

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
MESSAGE_TOKENS = 16
"""What is taken to be added to each message or plain prompt, at most."""
NUMBER_BYTES = 8
MAX_PARTS = 200_000
"""Brackets, braces and commas of a body that is looked into: each may take a hundred times its bytes
once parsed, and a prompt of token ids has one for each."""


class Work(StrEnum):
    """What a request does to the engine's KV cache."""

    NONE = "None"
    GENERATES = "Generates"
    PROMPT_ONLY = "PromptOnly"  # keys and values are gone when it is answered
    UNKNOWN = "Unknown"


_GENERATES = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
    | {"/generate", "/generate_stream", "/completion", "/completions", "/chat/completions"}
)
_PROMPT_ONLY = frozenset(
    {"/v1/embeddings", "/embeddings", "/v2/embed", "/embed", "/pooling", "/classify"}
    | {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/messages/count_tokens"}
)
_NONE = frozenset({"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"})

OUTPUT_FIELDS = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"),
    *("n_predict", "max_length"),
)
"""Names under which engines take the longest output; where several are given, the largest counts."""
NESTED_FIELDS = ("parameters", "sampling_params")
CHOICE_FIELDS = ("n", "best_of", "num_return_sequences")
PROMPT_FIELDS = (
    *("prompt", "input", "inputs", "text", "texts", "messages", "system", "instructions", "tools"),
    *("query", "documents", "text_1", "text_2", "queries", "suffix", "input_ids", "functions"),
)
STATEFUL_FIELDS = ("previous_response_id", "conversation", "prompt_embeds", "image_data")
"""With these the prompt is more than the body says."""
MEDIA_WORDS = ("image", "audio", "video", "file")


def work_of(method: str, path: str) -> Work:
    """By method and path alone."""
    if method in SAFE_METHODS or path in _NONE:
        return Work.NONE
    if method == "POST":
        if path in _GENERATES:
            return Work.GENERATES
        if path in _PROMPT_ONLY:
            return Work.PROMPT_ONLY
    return Work.UNKNOWN


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for, as far as it says."""

    prompts: tuple[int, ...]
    """Token counts where they are exact, else bytes of text; one for each prompt."""
    basis: ChargeBasis | None
    """`EXACT`, a reason for the worst case, or `None` for texts to be estimated."""
    template_tokens: int = 0
    """Most tokens that a template adds to each prompt."""
    output_tokens: int | None = None
    choices: int = 1
    streams: bool = False


UNREADABLE = Asked((), ChargeBasis.UNREADABLE_BODY)
UNKNOWN_ENDPOINT = Asked((), ChargeBasis.UNKNOWN_ENDPOINT)


def read_body(body: bytes) -> Asked:
    """What a JSON body asks for; never raises for what is in it."""
    if sum(body.count(mark) for mark in (b"[", b"{", b",")) > MAX_PARTS:
        return UNREADABLE
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return UNREADABLE
    if not isinstance(data, dict):
        return UNREADABLE
    streams = data.get("stream") is True
    output, choices = _numbers(data)
    if any(data.get(name) not in (None, "", [], {}) for name in STATEFUL_FIELDS):
        return Asked((), ChargeBasis.UNKNOWN_CONTENT, 0, output, choices, streams)
    given = [data[name] for name in PROMPT_FIELDS if data.get(name) is not None]
    if not given:
        return Asked((), ChargeBasis.UNREADABLE_BODY, 0, output, choices, streams)
    exact = _token_ids(given[0]) if len(given) == 1 else None
    if exact is not None:
        return Asked(exact, ChargeBasis.EXACT, 0, output, choices, streams)
    if "messages" not in data and len(given) == 1 and _is_list_of_texts(given[0]):
        sizes = tuple(len(text.encode(errors="replace")) for text in given[0])
        return Asked(sizes, None, MESSAGE_TOKENS, output, choices, streams)
    size = _text_bytes(given)
    if size is None:
        return Asked((), ChargeBasis.UNKNOWN_CONTENT, 0, output, choices, streams)
    messages = data.get("messages")
    added = MESSAGE_TOKENS
    if messages is not None:
        added = TEMPLATE_TOKENS + MESSAGE_TOKENS * (
            len(messages) if isinstance(messages, list) else 1
        )
    return Asked((size,), None, added, output, choices, streams)


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request is charged, in tokens."""

    prompts: tuple[int, ...]
    max_new_tokens: tuple[int, ...]
    choices: int
    basis: ChargeBasis
    text_bytes: int | None
    """Of the only prompt, whose tokens can be learned from the answer; else `None`."""
    streams: bool


def charge(
    asked: Asked,
    work: Work,
    learned: LearnedTokens,
    *,
    default_output_tokens: int | None,
    worst_case_tokens: int,
) -> Charge:
    """The charge, by what is learned, within `worst_case_tokens` where the count is not exact.

    An estimate alone never makes a request too long: that is for the engine to say, which counts.
    """
    output = asked.output_tokens
    if output is None:
        output = default_output_tokens
    if work is Work.PROMPT_ONLY:
        output = 0
    sequences = asked.choices
    if asked.basis is not None and asked.basis is not ChargeBasis.EXACT:
        # All of it as prompt: every charge policy counts that in full.
        return Charge((worst_case_tokens,), (0,), sequences, asked.basis, None, asked.streams)
    prompts: list[int] = []
    bases: list[ChargeBasis] = []
    most: list[int] = []
    for size in asked.prompts:
        if asked.basis is ChargeBasis.EXACT:
            tokens, basis = max(1, size), ChargeBasis.EXACT
        else:
            tokens, basis = learned.estimate(size)
            if basis is ChargeBasis.NOTHING_LEARNED:
                tokens = size + asked.template_tokens
            room = worst_case_tokens - (output if output is not None else 1)
            tokens = max(1, min(tokens, room))
        prompts.append(tokens)
        bases.append(basis)
        most.append(output if output is not None else max(1, worst_case_tokens - tokens))
    weakest = next((b for b in bases if b is ChargeBasis.NOTHING_LEARNED), bases[0])
    text_bytes = asked.prompts[0] if asked.basis is None and len(prompts) == 1 else None
    return Charge(tuple(prompts), tuple(most), sequences, weakest, text_bytes, asked.streams)


def _numbers(data: Mapping[str, Any]) -> tuple[int | None, int]:
    """Longest output asked for, and sequences of each prompt."""
    places = [data, *(d for n in NESTED_FIELDS if isinstance(d := data.get(n), dict))]
    outputs = [v for d in places for n in OUTPUT_FIELDS if (v := _count(d.get(n))) is not None]
    choices = [v for d in places for n in CHOICE_FIELDS if (v := _count(d.get(n))) is not None]
    return (max(outputs) if outputs else None), max(1, *choices, 1)


def _count(value: object) -> int | None:
    """A number of tokens or choices; -1 and its like mean all that there is room for.

    Lenient engines take a number in quotes for one, and it must not be cheaper in quotes.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        return None
    return int(min(value, 1 << 40))


def _token_ids(value: object) -> tuple[int, ...] | None:
    """Lengths of a prompt of token ids, or of several such; `None` for anything else."""
    if not isinstance(value, list) or not value:
        return None
    if all(type(item) is int for item in value):
        return (len(value),)
    if all(isinstance(i, list) and i and all(type(t) is int for t in i) for i in value):
        return tuple(len(item) for item in value)
    return None


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def _text_bytes(values: list[Any]) -> int | None:
    """UTF-8 bytes of everything in `values` that a template might render; `None` when there is
    something that is no text, such as an image."""
    total = 0
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, str):
            total += len(value.encode(errors="replace"))
        elif isinstance(value, list):
            left.extend(value)
        elif isinstance(value, dict):
            if _is_media(value.get("type")):
                return None
            left.extend(value.keys())
            left.extend(value.values())
        else:
            total += NUMBER_BYTES
    return total


def _is_media(kind: object) -> bool:
    """Whether a part of a message is something else than text."""
    return isinstance(kind, str) and any(word in kind for word in MEDIA_WORDS)
