"""How a quantized checkpoint stores its weights: bytes per weight, and what it leaves alone.

Scales are part of the size: one 16-bit scale per group of 128 makes "4 bits" 4.125. Sources of the
layouts: vLLM `model_executor/layers/quantization/` (awq, gptq, fp8, modelopt, mxfp4, bitsandbytes),
compressed-tensors' `quant_args`, and llama.cpp `tools/quantize/README.md` (bits per weight of whole
files of Llama 3.1 8B, embeddings included).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from kvscaler.models.errors import ModelNotUnderstood

GGUF_BITS: Mapping[str, float] = {
    "f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5008, "q6_k": 6.5633, "q5_k_m": 5.7036,
    "q5_k_s": 5.5704, "q5_0": 5.5, "q5_1": 6.0, "q4_k_m": 4.8944, "q4_k_s": 4.6672, "q4_0": 4.6606,
    "q4_1": 5.1259, "iq4_nl": 4.6818, "iq4_xs": 4.4597, "q3_k_l": 4.2979, "q3_k_m": 3.9960,
    "q3_k_s": 3.6429, "iq3_m": 3.7628, "iq3_s": 3.6606, "iq3_xs": 3.4977, "iq3_xxs": 3.2548,
    "q2_k": 3.1593, "q2_k_s": 2.9697, "iq2_m": 2.9294, "iq2_s": 2.7403, "iq2_xs": 2.5882,
    "iq2_xxs": 2.3824, "iq1_m": 2.1460, "iq1_s": 2.0042, "mxfp4": 4.25,
}  # fmt: skip
"""Average bits per weight of a file of this type."""

LINEAR_ATTENTION = "re:.*linear_attn.*"
"""Linear attention, which llm-compressor's recipes for NVFP4 leave alone (examples/quantization_w4a4_fp4)."""

_KNOWN = "fp8, int8, int4, int4-int8, awq, gptq, nvfp4, mxfp4, bnb-4bit, bnb-8bit, gguf-<type>"
"""`int4-int8`: 4-bit experts, everything else 8 bits (ModelSlim's `w4a8` of DeepSeek)."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """`bytes_per_weight` of quantized matrices, scales and zero points included."""

    name: str
    """Canonical, as `parse_name` reads it back: `int4-g128`, `fp8`, `nvfp4`, `gguf-q4_k_m`."""
    bytes_per_weight: float
    skips: tuple[str, ...] = ()
    """Module patterns that stay in 16 bits: `re:` expressions, globs, or dotted prefixes."""
    usual_skips: tuple[str, ...] = ()
    """What the format's recipes skip; a stated list replaces it."""
    experts_only: bool = False
    whole_file: bool = False
    """Embeddings, head and norms are in the average too (GGUF)."""
    other_bytes: float | None = None
    """Mixed schemes: bytes of matrices that are no routed experts (`nvfp4-mixed`: fp8)."""

    @property
    def stated(self) -> bool:
        """Whether it is told what stays in 16 bits, by a list or by the format."""
        return bool(self.skips) or self.whole_file or self.name == "mxfp4"

    def leaves(self, path: str) -> bool:
        """Whether the module at `path` stays in 16 bits."""
        return skipped(path, self.skips or self.usual_skips)


def parse_name(name: str) -> Quantization:
    """The scheme called `name`. Raises `ModelNotUnderstood` with the known names."""
    text = name.strip().lower().replace("_", "-")
    if text.startswith("gguf"):
        kind = name.strip().lower()[4:].strip(" -:").replace("-", "_")
        if kind in GGUF_BITS:
            return Quantization(f"gguf-{kind}", GGUF_BITS[kind] / 8, whole_file=True)
        raise ModelNotUnderstood(
            f"GGUF type {name[:40]!r} is not known; known are {', '.join(sorted(GGUF_BITS))}"
        )
    if text == "int4-int8":
        return Quantization("int4-int8", 0.5 + 4 / 4096, experts_only=True, other_bytes=1.0)
    match = re.fullmatch(
        r"(int4|awq|gptq|int8|w8a8|w4a16|w4a8|w8a16)(?:-g(\d{1,5}))?(.{0,20})", text
    )
    if match:
        group = int(match[2]) if match[2] else 128
        four = match[1] in ("int4", "awq", "gptq", "w4a16", "w4a8")
        if four:
            zeros = 4 if match[1] in ("awq", "gptq") else 0
            return Quantization(
                f"{'awq' if zeros else 'int4'}-g{group}", (4 + (16 + zeros) / max(1, group)) / 8
            )
        return Quantization("int8", 1.0 + 2 / 4096)
    if text.startswith("fp8") or text in ("float8", "float-quantized"):
        return Quantization("fp8", 1.0 + 4 / 16384)
    if text == "nvfp4-mixed":
        return Quantization("nvfp4-mixed", 4.5 / 8, experts_only=True, other_bytes=1.0)
    if text.startswith("nvfp4"):
        return Quantization("nvfp4", 4.5 / 8, usual_skips=(LINEAR_ATTENTION,))
    if text == "mxfp4-mixed":
        return Quantization("mxfp4-mixed", 4.25 / 8, experts_only=True, other_bytes=1.0)
    if text.startswith("mxfp4"):
        return Quantization("mxfp4", 4.25 / 8, experts_only=True)
    if text in ("bnb-4bit", "bitsandbytes", "nf4"):
        # 4 bits and one 8-bit scale per 64 weights, scales of scales in 32 bits per 256 (QLoRA).
        return Quantization("bnb-4bit", (4 + 8 / 64 + 32 / 64 / 256) / 8)
    if text == "bnb-8bit":
        return Quantization("bnb-8bit", 1.0 + 2 / 4096)
    raise ModelNotUnderstood(f"quantization {name[:40]!r} is not known; known are {_KNOWN}")


def parse_config(config: Mapping[str, Any]) -> Quantization:
    """The scheme of a `quantization_config`. Raises `ModelNotUnderstood` naming what is strange."""
    method = str(config.get("quant_method") or config.get("quant_algo") or "").lower()
    bits = config.get("bits") or config.get("w_bit") or 4
    group = config.get("group_size") or config.get("q_group_size") or 128
    if method in (
        "awq",
        "gptq",
        "auto-round",
        "autoround",
        "gptq_marlin",
        "awq_marlin",
        "intel/auto-round",
    ):
        found = _integer_scheme(method, bits, group, bool(config.get("sym", method != "awq")))
    elif method in ("fp8", "fbgemm_fp8"):
        found = parse_name("fp8")
    elif method == "mxfp4":
        found = parse_name("mxfp4")
    elif method == "bitsandbytes":
        found = parse_name("bnb-8bit" if config.get("load_in_8bit") else "bnb-4bit")
    elif method in ("modelopt", "modelopt_fp4", "nvfp4") or "quant_algo" in config:
        algorithm = str(config.get("quant_algo") or "nvfp4").lower()
        # ModelOpt's mixed precision: routed experts in NVFP4, other layers in FP8.
        name = {"f": "fp8", "m": "nvfp4-mixed"}.get(algorithm[:1], "nvfp4")
        found = parse_name(name)
    elif method == "compressed-tensors":
        found = _compressed_tensors(config)
    else:
        raise ModelNotUnderstood(
            f"quantization_config with quant_method {method[:40]!r} is not computed yet; "
            f"give the scheme by name: {_KNOWN}"
        )
    return replace(found, skips=_skips(config))


def _integer_scheme(method: str, bits: Any, group: Any, symmetric: bool) -> Quantization:
    if bits not in (2, 3, 4, 8) or isinstance(group, bool) or not isinstance(group, int):
        raise ModelNotUnderstood(f"{method} with bits {bits!r:.20} and group_size {group!r:.20}")
    if bits == 8:
        return parse_name("int8")
    size = group if group > 0 else 4096
    zeros = 0 if symmetric and method not in ("awq", "gptq") else bits
    name = f"{'awq' if zeros else 'int4'}-g{size}"
    return Quantization(name, (bits + (16 + zeros) / size) / 8)


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    groups = config.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ModelNotUnderstood("quantization_config of compressed-tensors has no weights to read")
    bits, kind = weights.get("num_bits"), str(weights.get("type"))
    group = weights.get("group_size")
    if kind == "float":
        return parse_name({8: "fp8", 4: "nvfp4"}.get(bits if isinstance(bits, int) else 0, "?"))
    if bits == 8:
        return parse_name("int8")
    size = group if isinstance(group, int) and group > 0 else 4096
    return _integer_scheme("compressed-tensors", bits, size, bool(weights.get("symmetric", True)))


def _skips(config: Mapping[str, Any]) -> tuple[str, ...]:
    found: list[Any] = []
    for name in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"):
        value = config.get(name)
        if isinstance(value, (list, tuple)):
            found += value[:20_000]
    return tuple(dict.fromkeys(template(str(item)[:200]) for item in found))[:200]


def template(module: str) -> str:
    """`module` with its wrapper's prefix dropped and layer numbers replaced by `#`."""
    if module.startswith("re:"):
        return module
    short = re.sub(r"^(model\.|language_model\.)+", "", module)
    return re.sub(r"\.\d+(?=\.|$)", ".#", short)


def skipped(path: str, skips: Iterable[str]) -> bool:
    """Whether a module at `path` matches one of `skips`."""
    return any(_matches(path, template(path), skip) for skip in skips)


def _matches(path: str, short: str, skip: str) -> bool:
    if skip.startswith("re:"):
        try:
            return re.match(skip[3:], path) is not None
        except re.error:
            return False
    if fnmatchcase(short, skip) or short == skip:
        return True
    return short.startswith(f"{skip}.") or skip.startswith(f"{short}.")
