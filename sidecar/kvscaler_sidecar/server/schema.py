"""What a request may say: OpenAI's fields that this engine honours, and every other by name.

The engine never ignores a field silently. A field is honoured, or it is on the short list of
metadata that changes no answer (`METADATA_FIELDS`), or its value is the one that asks for nothing
(`NO_EFFECT_VALUES`), or the request is refused with the field's name.
"""

import json
import sys
from collections import Counter
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from kvscaler.protocol.refusals import RefusalReason
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvscaler_sidecar.server.errors import Refusal, quoted

METADATA_FIELDS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Accepted and unused: they label a request for the vendor's dashboards and change no answer."""

NO_EFFECT_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "prompt_logprobs": (0,),
}
"""Values of unsupported fields that ask for nothing; `null` does too, for each field."""

MAX_VALUES = 1 << 18
"""JSON values in one body; as token ids, several times the context of the largest models here."""
NUMBER_BYTES = 32
MESSAGE_BYTES = 1024
"""An object of a message or of a part of one, without its text."""
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20

Temperature = Annotated[float, Field(ge=0, le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0)]

Item = TypeVar("Item")
ListOf: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is judged by its first wrong item: an error apiece for each of a million wrong items
takes minutes and gigabytes."""


class StreamOptions(BaseModel):
    """`stream_options`: only `include_usage`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class _Common(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 takes all tokens; not in OpenAI's API, as in other engines."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False
    """Generate on after the end-of-sequence token; for load tests, as in other engines."""
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    """Requests share cached prefixes only with those of the same salt."""

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_default(cls, value: Any, info: Any) -> Any:
        """OpenAI's clients send `null` for what is not set."""
        if value is None and info.field_name is not None:
            field = cls.model_fields[info.field_name]
            if not field.is_required():
                return field.get_default(call_default_factory=True)
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def held_bytes(self) -> int:
        """Memory of the prompt, about."""
        raise NotImplementedError


Body = TypeVar("Body", bound=_Common)


class CompletionRequest(_Common):
    """Body of `POST /v1/completions`."""

    prompt: str | ListOf[str] | ListOf[TokenId] | ListOf[ListOf[TokenId]]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt: a text, or a list of token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [[int(token) for token in prompt if isinstance(token, int)]]
        return prompt  # type: ignore[return-value]

    @property
    def held_bytes(self) -> int:
        """Memory of the prompts, about."""
        return sys.getsizeof(self.prompt) + sum(
            sys.getsizeof(prompt) + (0 if isinstance(prompt, str) else NUMBER_BYTES * len(prompt))
            for prompt in self.prompts
        )


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | ListOf[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    @property
    def content_bytes(self) -> int:
        """Memory of the content, about."""
        if isinstance(self.content, str):
            return sys.getsizeof(self.content)
        return sum(MESSAGE_BYTES + sys.getsizeof(part.text) for part in self.content)


class ChatRequest(_Common):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def output_limit(self) -> int | None:
        """The newer name wins where both are given; `None` is all that the context leaves."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def held_bytes(self) -> int:
        """Memory of the messages, about."""
        return sum(MESSAGE_BYTES + message.content_bytes for message in self.messages)


def parse_completion(body: bytes) -> CompletionRequest:
    """A completion request, or a `Refusal` that names what is wrong with it."""
    return _parse(body, CompletionRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """A chat request, or a `Refusal` that names what is wrong with it."""
    request = _parse(body, ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise Refusal(
            RefusalReason.INVALID_REQUEST,
            "top_logprobs needs logprobs to be true.",
            param="top_logprobs",
        )
    for position, message in enumerate(request.messages):
        if message.name is not None:
            raise Refusal(
                RefusalReason.UNSUPPORTED_FIELD,
                "The field 'name' of a message is not supported by this engine: chat templates "
                "have no place for it. Leave it out, or name the speaker in the content.",
                param=f"messages.{position}.name",
            )
    return request


def _parse(body: bytes, model: type[Body]) -> Body:
    try:
        _check_values(body)
        # Of text, since bytes would let halves of surrogate pairs through.
        data = json.loads(body.decode("utf-8-sig"), object_pairs_hook=_object)
        if b"\\ud" in body or b"\\uD" in body:
            json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise Refusal(
            RefusalReason.INVALID_REQUEST,
            f"The request body is not valid JSON: {error}. Send one JSON object.",
        ) from None
    if not isinstance(data, dict):
        raise Refusal(
            RefusalReason.INVALID_REQUEST,
            f"The request body is a JSON {type(data).__name__}; send one JSON object.",
        )
    known = model.model_fields
    for name, value in list(data.items()):
        if name in known:
            continue
        if (
            name in METADATA_FIELDS
            or value is None
            or any(value == same and type(value) is type(same) for same in _no_effect(name))
        ):
            del data[name]
            continue
        raise Refusal(
            RefusalReason.UNSUPPORTED_FIELD,
            f"The field {quoted(name)} is not supported by this engine. Leave it out.",
            param=name[:100],
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _refusal_of(error) from None


def _check_values(body: bytes) -> None:
    """Refuse a body of very many values: each takes up to 30 times its text as objects.

    Counted in small steps, since the parser proper lets no other thread run until it is done.
    """
    if len(body) <= MAX_VALUES:
        return
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    values = at = 0
    while values <= MAX_VALUES:
        quote = text.find(b'"', at)
        end = len(text) if quote < 0 else quote
        for mark in (b",", b"[", b"{"):
            values += text.count(mark, at, end)
        closing = text.find(b'"', quote + 1)
        if quote < 0 or closing < 0:
            break
        values += 1
        at = closing + 1
    if values > MAX_VALUES:
        raise Refusal(
            RefusalReason.BODY_TOO_LARGE,
            f"The request body has more than {MAX_VALUES} values. Send text instead of token ids, "
            "or fewer prompts at a time.",
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose fields are each given once; which of two would count is for no one to guess."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(
            name for name, count in Counter(name for name, _ in pairs).items() if count > 1
        )
        raise Refusal(
            RefusalReason.INVALID_REQUEST,
            f"The field {quoted(twice)} is given twice. Send it once.",
            param=twice[:100],
        )
    return found


def _no_effect(name: str) -> tuple[Any, ...]:
    return NO_EFFECT_VALUES.get(name, ())


def _refusal_of(error: ValidationError) -> Refusal:
    """The first problem, with its path; pydantic's names of union members are left out."""
    first = error.errors(include_url=False, include_context=False)[0]
    parts = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    path = ".".join(str(part) for part in parts)[:200]
    if first["type"] == "extra_forbidden":
        return Refusal(
            RefusalReason.UNSUPPORTED_FIELD,
            f"The field {path!r} is not supported by this engine. Leave it out.",
            param=path,
        )
    if first["type"] == "missing":
        message = f"The field {path!r} is required."
    else:
        message = f"The field {path!r} can't be used: {first['msg']}."
    return Refusal(RefusalReason.INVALID_REQUEST, message, param=path)
