"""Reads along with an answer: how much output has come, what `usage` says, whether it ended well.

It sees the bytes that pass, as they pass, and changes none. In a stream each event that carries
output counts as a token, until a `usage` says how many there were; asking the engine for one would
change the client's request, so the gate does not. Memory is bounded whatever the engine sends.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

MAX_EVENT_BYTES = 1024 * 1024
TAIL_BYTES = 64 * 1024
EVENT_STREAM = b"text/event-stream"
JSON_TYPES = (b"application/json",)
_USAGE = re.compile(rb'"usage"\s*:\s*')
_OUTPUT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call")


@dataclass(frozen=True, slots=True)
class Usage:
    """What the engine counted, as far as it says."""

    prompt_tokens: int | None
    output_tokens: int | None


class Meter:
    """Of one answer."""

    def __init__(self, content_type: bytes | None, content_encoding: bytes | None) -> None:
        kind = (content_type or b"").split(b";", 1)[0].strip().lower()
        plain = content_encoding is None or content_encoding.strip().lower() == b"identity"
        self.streams = plain and kind == EVENT_STREAM
        """Whether it is a stream of events that can be read."""
        self._whole = plain and kind in JSON_TYPES
        self._rest = b""
        self._skipping = False
        self.output_tokens = 0
        """Events with output so far."""
        self.failed = False
        """Whether the stream itself said that the engine failed."""
        self.usage: Usage | None = None

    def feed(self, data: bytes) -> None:
        """Bytes that pass."""
        if self.streams:
            self._events(data)
        elif self._whole:
            self._rest = (self._rest + data)[-TAIL_BYTES:]

    def end(self) -> None:
        """The answer is complete."""
        if self._whole:
            self._find_usage(self._rest)

    def _events(self, data: bytes) -> None:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            self._rest, self._skipping = b"", True
        for line in lines:
            if self._skipping:
                self._skipping = False  # the rest of a line that was too long to be kept
            elif line.startswith(b"data:"):
                self._event(line[5:].strip())

    def _event(self, payload: bytes) -> None:
        if not payload.startswith(b"{"):
            return
        usage_only = b'"usage"' in payload and self._find_usage(payload)
        if b'"error"' in payload and self._tells_error(payload):
            self.failed = True
            return
        # The first events may carry a role and no output yet; once output comes, each event is
        # taken for a token without a closer look.
        if usage_only or not self.output_tokens:
            self.output_tokens += self._has_output(payload)
        else:
            self.output_tokens += 1

    def _find_usage(self, data: bytes) -> bool:
        """Whether there is a usage; of what several tell, the last counts."""
        places = [found.end() for found in _USAGE.finditer(data)]
        if not places:
            return False
        try:
            text = data[places[-1] :].decode(errors="replace")
            value, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return False
        if not isinstance(value, dict):
            return False
        prompt = _first_count(value, "prompt_tokens", "input_tokens")
        output = _first_count(value, "completion_tokens", "output_tokens")
        if self.usage is not None:
            prompt = self.usage.prompt_tokens if prompt is None else prompt
            output = self.usage.output_tokens if output is None else output
        self.usage = Usage(prompt, output)
        return True

    @staticmethod
    def _tells_error(payload: bytes) -> bool:
        event = _parsed(payload)
        return isinstance(event, dict) and bool(event.get("error")) and "choices" not in event

    @staticmethod
    def _has_output(payload: bytes) -> bool:
        event = _parsed(payload)
        if not isinstance(event, dict):
            return False
        choices = event.get("choices")
        if not isinstance(choices, list):
            return "usage" not in event  # not OpenAI's shape: an event is taken for a token
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            delta = choice.get("delta")
            if choice.get("text") or (
                isinstance(delta, dict) and any(delta.get(key) for key in _OUTPUT_KEYS)
            ):
                return True
        return False


def _parsed(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        return None


def _first_count(value: dict[str, Any], *names: str) -> int | None:
    for name in names:
        count = value.get(name)
        if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
            return count
    return None
