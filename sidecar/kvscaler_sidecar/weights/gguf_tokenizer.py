"""The tokenizer inside a GGUF file as Hugging Face tokenizer files.

GGUF stores vocabulary, merges and token kinds, but only a *name* for how text is cut before the
merges (`tokenizer.ggml.pre`). A wrong cut still yields tokens, only not those the model was trained
on, so a name that is not known here is an error.
"""

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvscaler_sidecar.weights.builtin import BuiltinModelError
from kvscaler_sidecar.weights.gguf_llama import field

# Token kinds of the GGUF specification.
_CONTROL, _USER_DEFINED = 3, 4


def tokenizer_json(reader: Any) -> str:
    """The content of `tokenizer.json`: byte-level BPE with the cut that the file names.

    Raises:
        BuiltinModelError: another tokenizer kind, or a cut that is not known here.
    """
    kind, cut = field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre")
    if (kind, cut) != ("gpt2", "smollm"):
        raise BuiltinModelError(
            f"GGUF tokenizer: model {kind!r} with pre-tokenizer {cut!r}; only 'gpt2' with 'smollm' "
            "is known here, and a guess would give other tokens than the model was trained on"
        )
    tokens: list[str] = field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_kind in zip(tokens, kinds, strict=True):
        if token_kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1) + "\n"


def tokenizer_config(reader: Any) -> dict[str, Any]:
    """The content of `tokenizer_config.json`, chat template included."""
    tokens: list[str] = field(reader, "tokenizer.ggml.tokens")
    return {
        "add_bos_token": bool(field(reader, "tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "bos_token": tokens[field(reader, "tokenizer.ggml.bos_token_id")],
        "chat_template": field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[field(reader, "tokenizer.ggml.eos_token_id")],
        "model_max_length": field(reader, "llama.context_length"),
        "pad_token": tokens[field(reader, "tokenizer.ggml.padding_token_id")],
        # The class that takes tokenizer.json as it is; GPT2Tokenizer would rebuild it and lose
        # the cut at digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[field(reader, "tokenizer.ggml.unknown_token_id")],
    }
