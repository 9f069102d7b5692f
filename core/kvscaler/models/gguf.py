"""The header of a GGUF file: architecture facts and the exact bytes of its tensors.

Layout: llama.cpp `ggml/include/gguf.h` (magic, version, counts, typed key-value pairs, tensor infos).
Everything is bounded: a hostile header ends in an error, not in gigabytes of strings.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvscaler.models.errors import ModelNotUnderstood
from kvscaler.models.quantization import GGUF_BITS

MAGIC = b"GGUF"
_SIXTEEN = 15.5
"""Files with fewer bits per weight on average are quantized."""
VERSIONS = (2, 3)
MOST_PAIRS = 4096
MOST_TENSORS = 100_000
LONGEST_STRING = 1 << 20
MOST_ITEMS = 4_000_000
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_BLOCKS: Mapping[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 36), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 39: (32, 17),
}  # fmt: skip
"""Elements and bytes of a block by tensor type (`ggml/src/ggml-common.h`)."""

_FAMILIES: Mapping[str, str] = {
    "llama": "llama", "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "phi3": "phi3", "starcoder2": "starcoder2", "command-r": "cohere", "cohere2": "cohere2",
    "deepseek2": "deepseek_v2", "gpt-oss": "gpt_oss", "falcon": "falcon", "granite": "granite",
    "mistral3": "mistral", "internlm2": "internlm2", "minicpm3": "minicpm3", "glm4": "glm4",
}  # fmt: skip
"""llama.cpp's architecture names and the families that they are."""

_FIELDS: Mapping[str, str] = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.sliding_window": "sliding_window",
    "attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length":
    "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace", "vocab_size": "vocab_size",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a header tells: fields as a `config.json` names them, and bytes of all tensors."""

    config: dict[str, Any]
    tensor_bytes: int
    architecture: str


def read_gguf(path: Path) -> GgufHeader:
    """The header of the file at `path`. Raises `ModelNotUnderstood` with what is wrong."""
    try:
        with path.open("rb") as stream:
            return _read(stream, str(path))
    except (OSError, struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ModelNotUnderstood(f"{path} has no readable GGUF header: {error}") from error


def _read(stream: BinaryIO, name: str) -> GgufHeader:
    if stream.read(4) != MAGIC:
        raise ModelNotUnderstood(f"{name} is no GGUF file")
    version, tensors, pairs = _unpack(stream, "<IQQ")
    if version not in VERSIONS or tensors > MOST_TENSORS or pairs > MOST_PAIRS:
        raise ModelNotUnderstood(
            f"{name}: GGUF version {version} with {tensors} tensors and {pairs} fields is not read"
        )
    fields: dict[str, Any] = {}
    for _ in range(pairs):
        key = _string(stream, name)
        (kind,) = _unpack(stream, "<I")
        fields[key] = _value(stream, kind, name)
    total, tied, bits = _tensors(stream, tensors, name)
    architecture = str(fields.get("general.architecture", ""))
    return GgufHeader(_config(fields, architecture, tied, bits, name), total, architecture)


def _config(
    fields: Mapping[str, Any], architecture: str, tied: bool, bits: float, name: str
) -> dict[str, Any]:
    family = _FAMILIES.get(architecture)
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelNotUnderstood(
            f"{name}: architecture {architecture[:40]!r} is not one of {known}"
        )
    config: dict[str, Any] = {"model_type": family, "tie_word_embeddings": tied}
    for key, field in _FIELDS.items():
        value = fields.get(f"{architecture}.{key}")
        if value is not None and not isinstance(value, _Items):
            config[field] = value
    tokens = fields.get("tokenizer.ggml.tokens")
    if isinstance(tokens, _Items):
        config.setdefault("vocab_size", tokens.count)
    if family not in ("deepseek_v2", "minicpm3"):
        config.pop("qk_rope_head_dim", None)
    if not config.get("num_experts"):
        config.pop("num_experts", None)
    if bits < _SIXTEEN:
        nearest = min(GGUF_BITS, key=lambda kind: abs(GGUF_BITS[kind] - bits))
        config["quantization"] = f"gguf-{nearest}"
    config["torch_dtype"] = "float16"
    return config


@dataclass(frozen=True, slots=True)
class _Items:
    """An array that was skipped; only its length matters."""

    count: int


def _tensors(stream: BinaryIO, count: int, name: str) -> tuple[int, bool, float]:
    """Bytes of all tensors, whether the head is tied, and bits per weight on average."""
    total, weights, tied = 0, 0, True
    for _ in range(count):
        tensor = _string(stream, name)
        (dimensions,) = _unpack(stream, "<I")
        if dimensions > 8:
            raise ModelNotUnderstood(f"{name}: tensor {tensor[:40]!r} has {dimensions} dimensions")
        elements = 1
        for size in _unpack(stream, f"<{dimensions}Q"):
            elements *= size
        kind, _offset = _unpack(stream, "<IQ")
        if kind not in _BLOCKS or elements > 1 << 50:
            raise ModelNotUnderstood(f"{name}: tensor {tensor[:40]!r} of type {kind} is not known")
        per_block, size = _BLOCKS[kind]
        total += -(-elements // per_block) * size
        weights += elements
        tied = tied and tensor != "output.weight"
    return total, tied, 8 * total / max(1, weights)


def _value(stream: BinaryIO, kind: int, name: str) -> Any:
    if kind in _SCALARS:
        return _unpack(stream, f"<{_SCALARS[kind]}")[0]
    if kind == _STRING:
        return _string(stream, name)
    if kind != _ARRAY:
        raise ModelNotUnderstood(f"{name}: GGUF value of type {kind} is not known")
    inner, count = _unpack(stream, "<IQ")
    if count > MOST_ITEMS:
        raise ModelNotUnderstood(f"{name}: a GGUF array of {count} items is not read")
    if inner in _SCALARS:
        size = struct.calcsize(f"<{_SCALARS[inner]}")
        stream.seek(size * count, 1)
    elif inner == _STRING:
        for _ in range(count):
            (length,) = _unpack(stream, "<Q")
            if length > LONGEST_STRING:
                raise ModelNotUnderstood(f"{name}: a GGUF string of {length} bytes is not read")
            stream.seek(length, 1)
    else:
        raise ModelNotUnderstood(f"{name}: GGUF arrays of type {inner} are not read")
    return _Items(count)


def _string(stream: BinaryIO, name: str) -> str:
    (length,) = _unpack(stream, "<Q")
    if length > LONGEST_STRING:
        raise ModelNotUnderstood(f"{name}: a GGUF string of {length} bytes is not read")
    return _exactly(stream, length).decode("utf-8", "replace")


def _unpack(stream: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, _exactly(stream, struct.calcsize(form)))


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise struct.error("the file ends within its header")
    return data
