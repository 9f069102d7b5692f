"""The tokenizer: round trips, text that arrives whole character by whole character, templates."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvscaler_sidecar.chat_template import ChatTemplate, ChatTemplateError
from kvscaler_sidecar.tokenizer import HuggingFaceTokenizer, TokenizerError
from kvscaler_sidecar.weights import builtin
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FOLDER = builtin.ensure("builtin://smollm2-135m")
TOKENIZER = HuggingFaceTokenizer.from_folder(FOLDER)
END = 2

pytestmark = pytest.mark.model

MIXED = [
    "plain words",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 and 🇩🇪",
    "a\n\tb  c",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "0xDEADBEEF 12345",
]


@pytest.mark.parametrize("text", MIXED)
def test_text_survives_a_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("text", MIXED)
def test_stream_gives_the_text_and_only_whole_characters(text: str) -> None:
    stream = TOKENIZER.stream([])
    pieces = [stream.push(token) for token in TOKENIZER.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_of_several_tokens_comes_with_its_last_one() -> None:
    tokens = TOKENIZER.encode("🫠")
    assert len(tokens) > 1
    stream = TOKENIZER.stream([])
    assert [stream.push(token) for token in tokens] == [""] * (len(tokens) - 1) + ["🫠"]


def test_what_is_incomplete_at_the_end_becomes_a_replacement_character() -> None:
    tokens = TOKENIZER.encode("🫠")[:-1]
    stream = TOKENIZER.stream([])
    assert "".join(stream.push(token) for token in tokens) == ""
    assert stream.finish() == TOKENIZER.decode(tokens) == "\ufffd"


@settings(max_examples=300)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_stream_equals_decoding_at_once_for_any_tokens(tokens: list[int]) -> None:
    stream = TOKENIZER.stream([])
    text = "".join(stream.push(token) for token in tokens) + stream.finish()
    assert text == TOKENIZER.decode(tokens)


KNOWN_BYTES = frozenset(
    TOKENIZER.token_bytes(token)[0]
    for token in range(TOKENIZER.vocab_size)
    if len(TOKENIZER.token_bytes(token)) == 1
)
"""The model's vocabulary lacks a few bytes that no text of its training had."""


@settings(max_examples=200)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(
        lambda text: KNOWN_BYTES.issuperset(text.encode())
    )
)
def test_bytes_of_tokens_are_the_bytes_of_the_text(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert b"".join(TOKENIZER.token_bytes(token) for token in tokens) == text.encode()


def test_special_tokens_are_understood_in_prompts_and_absent_from_output() -> None:
    assert TOKENIZER.encode("hi<|im_end|>")[-1] == END
    assert TOKENIZER.eos_token_ids == {END}
    assert TOKENIZER.stream([]).push(END) == ""
    assert TOKENIZER.token_text(END) == "<|im_end|>"
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size + 7) == b""


def test_chat_template_equals_transformers() -> None:
    from transformers import AutoTokenizer

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße 👋"},
        {"role": "assistant", "content": "Hallo"},
        {"role": "user", "content": "<b>&amp;</b>"},
    ]
    oracle = AutoTokenizer.from_pretrained(FOLDER)
    for count in (1, 2, 4):
        expected = oracle.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=True
        )
        assert TOKENIZER.render_chat(messages[:count]) == expected


def test_template_that_refuses_says_so_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render([])


def test_template_can_not_leave_its_sandbox() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(ChatTemplateError, match="unsafe"):
        template.render([])


def test_model_without_template_refuses_chat() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate.absent().render([{"role": "user", "content": "hi"}])


def _other_tokenizer(folder: Path) -> HuggingFaceTokenizer:
    """A tokenizer of SentencePiece's kind: words start with a mark, unknown bytes fall back."""
    vocabulary = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3}
    vocabulary |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    return HuggingFaceTokenizer.from_folder(folder)


def test_tokenizer_that_is_not_byte_level_streams_too(tmp_path: Path) -> None:
    tokenizer = _other_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == {0, 3}
    emoji = [4 + byte for byte in "🫠".encode()]
    stream = tokenizer.stream([1])
    pieces = [stream.push(token) for token in [2, 3, *emoji, 1]]
    assert pieces == [" cat", "s", "", "", "", "🫠", " the"]
    stream.push(emoji[0])
    assert stream.finish() == "\ufffd"


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        HuggingFaceTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        HuggingFaceTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["", *MIXED, " " * 1000, "<|endoftext|>" * 50, "=" * 500])
def test_the_least_number_of_tokens_is_never_more_than_there_are(text: str) -> None:
    assert TOKENIZER.least_tokens(text) <= len(TOKENIZER.encode(text))


@given(st.text())
def test_no_text_has_fewer_tokens_than_the_least(text: str) -> None:
    assert TOKENIZER.least_tokens(text) <= len(TOKENIZER.encode(text))


def test_the_least_number_of_tokens_grows_with_the_text() -> None:
    assert TOKENIZER.least_tokens("a b " * 100_000) > 4000
