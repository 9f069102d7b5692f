"""OpenAI's response objects for both endpoints, whole and in chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvscaler.engine.request import FinishReason

from kvscaler_sidecar.engine.job import Finished, Produced

TokenText = Callable[[int], str]


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request: a prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, finished: Finished, *, first_choice: bool) -> None:
        """Count one finished sequence."""
        self.output_tokens += finished.output_tokens
        if first_choice:
            self.prompt_tokens += finished.prompt_tokens
            self.cached_tokens += finished.cached_tokens

    def body(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class ChoiceText:
    """What one sequence has produced so far, for a response that is sent whole."""

    parts: list[str] = field(default_factory=list)
    tokens: list[Produced] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.parts)


class Shape(Protocol):
    """How one endpoint words its answers."""

    object: str
    chunk_object: str

    def choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        """A whole choice."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk's choice, before any token; `None` when there is none."""
        ...

    def piece(self, index: int, text: str, tokens: Sequence[Produced]) -> dict[str, Any]:
        """A chunk's choice with new text."""
        ...

    def ending(self, index: int, text: str, reason: FinishReason) -> dict[str, Any]:
        """The last chunk's choice of a sequence."""
        ...


class CompletionShape:
    """`/v1/completions`."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, logprobs: bool, token_text: TokenText) -> None:
        self._logprobs = logprobs
        self._token_text = token_text
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        """`{"index", "text", "logprobs", "finish_reason"}`."""
        return {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprob_lists(index, choice.tokens),
            "finish_reason": str(choice.reason) if choice.reason else None,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """A completion's stream opens with its first text."""
        return None

    def piece(self, index: int, text: str, tokens: Sequence[Produced]) -> dict[str, Any]:
        """The same shape as a whole choice, with the new text only."""
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprob_lists(index, tokens),
            "finish_reason": None,
        }

    def ending(self, index: int, text: str, reason: FinishReason) -> dict[str, Any]:
        """Text that had been held back, and the reason."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": str(reason)}

    def _logprob_lists(self, index: int, tokens: Sequence[Produced]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        lists: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            if token.logprobs is None:
                continue
            text = self._token_text(token.token_id)
            offset = self._offsets.get(index, 0)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(token.logprobs.logprob)
            lists["top_logprobs"].append(
                {self._token_text(other): value for other, value in token.logprobs.top}
            )
            lists["text_offset"].append(offset)
            self._offsets[index] = offset + len(text)
        return lists


class ChatShape:
    """`/v1/chat/completions`."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, logprobs: bool, token_text: TokenText) -> None:
        self._logprobs = logprobs
        self._token_text = token_text

    def choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        """`{"index", "message", "logprobs", "finish_reason"}`."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._content(choice.tokens),
            "finish_reason": str(choice.reason) if choice.reason else None,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role, before any content."""
        return self._delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, tokens: Sequence[Produced]) -> dict[str, Any]:
        """New content."""
        return self._delta(index, {"content": text}, logprobs=self._content(tokens))

    def ending(self, index: int, text: str, reason: FinishReason) -> dict[str, Any]:
        """Text that had been held back, and the reason."""
        return self._delta(index, {"content": text} if text else {}, reason=str(reason))

    @staticmethod
    def _delta(
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _content(self, tokens: Sequence[Produced]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {
            "content": [
                {
                    **self._entry(token.token_id, token.logprobs.logprob),
                    "top_logprobs": [
                        self._entry(other, value) for other, value in token.logprobs.top
                    ],
                }
                for token in tokens
                if token.logprobs is not None
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
