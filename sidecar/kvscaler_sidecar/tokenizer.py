"""Text to token ids and back: the tokenizer file of a Hugging Face folder, and its chat template.

Output is turned into text as it comes. A token may hold a part of a character's bytes, so text is
given out only up to the last whole character; what is incomplete at the very end becomes U+FFFD,
exactly as decoding all tokens at once would have it.
"""

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from kvscaler_sidecar.chat_template import ChatTemplate
from kvscaler_sidecar.executors.seam import TextStream


class TokenizerError(Exception):
    """Tokenizer files are missing or damaged; the words name the file and what is wrong."""


def _byte_of_character() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table).

    Printable bytes stand for themselves; the others, in order, for U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in printable]
    return table | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_of_character()


class HuggingFaceTokenizer:
    """See `seam.Tokenizer`. Methods may be called from any thread; streams belong to one."""

    def __init__(
        self, backend: Backend, eos_token_ids: frozenset[int], template: ChatTemplate | None
    ) -> None:
        self._backend = backend
        self._template = template
        self._added = backend.get_added_tokens_decoder()
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        self._byte_level = decoder.get("type") == "ByteLevel"
        self._longest_token_bytes = _longest_token_bytes(backend) if self._byte_level else None
        known = backend.get_vocab()
        self._unknown = bytes(byte for character, byte in _BYTES.items() if character not in known)
        """Bytes that the vocabulary lacks: encoding leaves them out."""
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = eos_token_ids

    @classmethod
    def from_folder(cls, folder: Path) -> "HuggingFaceTokenizer":
        """Read `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.

        Raises:
            TokenizerError: a file is missing or damaged.
        """
        path = folder / "tokenizer.json"
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path} can't be read as a tokenizer: {error}") from error
        config = _json_object(folder / "tokenizer_config.json")
        ends = _eos_ids(_json_object(folder / "generation_config.json"))
        ends = ends or _eos_ids(_json_object(folder / "config.json"))
        if not ends and (end := _token_string(config.get("eos_token"))):
            ends = frozenset(i for i in [backend.token_to_id(end)] if i is not None)
        return cls(backend, ends, ChatTemplate.from_folder(folder, config))

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; special tokens that the text spells out are understood."""
        # By the batch, since only that lets other threads run meanwhile.
        ids: list[int] = self._backend.encode_batch_fast([text])[0].ids
        return ids

    def least_tokens(self, text: str) -> int:
        """At least so many tokens `encode` gives: as if each were the longest that there is.

        Encoding takes some 200 bytes of memory for each byte of text; this takes none.
        """
        if self._longest_token_bytes is None:
            return min(1, len(text))
        return -(-len(text.encode().translate(None, self._unknown)) // self._longest_token_bytes)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; special tokens as they are spelled.

        An id outside the vocabulary stands for nothing.
        """
        added = self._added.get(token_id)
        if added is not None:
            return str(added.content).encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token is markup that is not part of the text."""
        added = self._added.get(token_id)
        return added is not None and bool(added.special)

    def stream(self, prompt_ids: Sequence[int]) -> TextStream:
        """A stream for the output that follows `prompt_ids`."""
        if self._byte_level:
            return ByteStream(self)
        return LibraryStream(self._backend, prompt_ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that the model's chat template makes, generation prompt included.

        Raises:
            ChatTemplateError: the model has no template, or it refuses these messages.
        """
        template = self._template or ChatTemplate.absent()
        return template.render(messages)


class ByteStream:
    """Text of a byte-level tokenizer: bytes of tokens through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that became complete with this token; special tokens have none."""
        if self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """U+FFFD for what is left of an incomplete character."""
        return self._decoder.decode(b"", final=True)


class LibraryStream:
    """Text of any other tokenizer, by the library's own stream.

    It is told the prompt, because such decoders treat the first word of a text differently.
    """

    def __init__(self, backend: Backend, prompt_ids: Sequence[int]) -> None:
        self._backend = backend
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that became complete with this token."""
        self._pending.append(token_id)
        text: str | None = self._stream.step(self._backend, token_id)
        if text is None:
            return ""
        self._pending.clear()
        return text

    def finish(self) -> str:
        """What the stream still held back, decoded by itself."""
        text: str = self._backend.decode(self._pending, skip_special_tokens=True)
        self._pending.clear()
        return text


def _longest_token_bytes(backend: Backend) -> int | None:
    """Most bytes of text that one token of a byte-level tokenizer stands for.

    `None` where text may vanish before it is made tokens, so that there is no such bound.
    """
    parts = json.loads(backend.to_str())
    vanishes = (
        parts.get("normalizer") is not None
        or parts.get("truncation") is not None
        or '"Removed"' in json.dumps(parts.get("pre_tokenizer"))
        or any(added["lstrip"] or added["rstrip"] for added in parts["added_tokens"])
    )
    if vanishes:
        return None
    # A character of a token stands for one byte; added tokens are spelled out.
    learned = max(map(len, backend.get_vocab(with_added_tokens=False)), default=1)
    return max([learned, *(len(added["content"].encode()) for added in parts["added_tokens"])])


def _json_object(path: Path) -> dict[str, Any]:
    """The object in `path`; a file that is not there is an empty one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return content


def _eos_ids(config: Mapping[str, Any]) -> frozenset[int]:
    found = config.get("eos_token_id")
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])


def _token_string(token: object) -> str | None:
    """A special token as configurations write it: a string, or an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
