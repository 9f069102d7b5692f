"""A model's chat template: Jinja from the model's files, so it runs in Jinja's sandbox.

The environment is the one that templates on the Hub are written for (trimmed blocks, loop
controls, `raise_exception`, `strftime_now`, `tojson` that keeps characters).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class ChatTemplateError(ValueError):
    """Messages can't be made a prompt; the words are the template's own or name the cause."""


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            autoescape=False,  # prompts are plain text
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = None if source is None else environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is damaged: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path, config: Mapping[str, Any]) -> "ChatTemplate":
        """From `chat_template.jinja`, or `chat_template` of the tokenizer's configuration.

        Raises:
            ChatTemplateError: the template is no valid Jinja.
        """
        file = folder / "chat_template.jinja"
        found = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(found, list):  # several, by name
            found = next((t.get("template") for t in found if t.get("name") == "default"), None)
        tokens = {}
        for name in _SPECIAL_TOKENS:
            token = config.get(name)
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str):
                tokens[name] = token
        return cls(found if isinstance(found, str) else None, tokens)

    @classmethod
    def absent(cls) -> "ChatTemplate":
        """The template of a model that has none: it refuses all messages."""
        return cls(None, {})

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for `messages`, ending where the assistant's answer begins.

        Raises:
            ChatTemplateError: there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise ChatTemplateError(
                "this model has no chat template; use /v1/completions with a prompt of your own"
            )
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except ChatTemplateError:
            raise
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ChatTemplateError(f"the model's chat template failed: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise ChatTemplateError(f"the model's chat template refuses these messages: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
