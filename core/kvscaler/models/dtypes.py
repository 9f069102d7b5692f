"""Element types by the names that model configurations and engines use, with their sizes."""

from kvscaler.models.errors import ModelNotUnderstood

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1}
"""Bytes per element. Scales of quantized caches are charged where the cache is laid out."""

_ALIASES = {"fp32": "float32", "float": "float32", "f32": "float32", "bf16": "bfloat16",
            "fp16": "float16", "f16": "float16", "half": "float16", "fp8": "fp8_e4m3",
            "fp8_e5m2": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3"}  # fmt: skip


def canonical_dtype(name: str) -> str:
    """The canonical name of `name` (case and a `torch.` prefix do not matter).

    Raises `ModelNotUnderstood` for a type whose size is not known here.
    """
    short = name.strip().lower().removeprefix("torch.")
    short = _ALIASES.get(short, short)
    if short not in DTYPE_BYTES:
        raise ModelNotUnderstood(
            f"element type {name[:40]!r} is not known; known are {', '.join(sorted(DTYPE_BYTES))}"
        )
    return short


def dtype_bytes(name: str) -> int:
    """Bytes of one element of type `name`."""
    return DTYPE_BYTES[canonical_dtype(name)]
