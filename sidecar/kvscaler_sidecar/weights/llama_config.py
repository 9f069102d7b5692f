"""What the executor needs to know of a Llama-type `config.json`, or a refusal that names why not.

`kvscaler.models.ModelArchitecture` says what a model costs; this says how it computes: rotary
frequencies, norms, activation. Any field that would change the result and is not computed here is
refused by name: a model that answers nonsense is worse than one that does not start.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvscaler.models import ModelArchitecture, ModelNotUnderstood


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shapes and constants of a Llama-type model. Dimensions count elements."""

    architecture: ModelArchitecture
    hidden_size: int
    intermediate_size: int
    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    norm_epsilon: float
    tied_embeddings: bool
    rotary_frequencies: tuple[float, ...]
    """Angle per position of each pair of a head, `head_dim / 2` of them."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From `folder/config.json`.

        Raises:
            ModelNotUnderstood: the file is missing, is no JSON object, or is not computed here.
        """
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelNotUnderstood(f"{path} can't be read: {error}") from error
        if not isinstance(config, dict):
            raise ModelNotUnderstood(f"{path} holds no JSON object")
        return cls.from_config(config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From the mapping of a `config.json`.

        Raises:
            ModelNotUnderstood: a field means something that is not computed here.
        """
        architecture = ModelArchitecture.from_config(config)
        problems = [
            f"{name} is {config[name]!r}"
            for name, accepted in _ACCEPTED.items()
            if name in config and config[name] not in accepted
        ]
        if not architecture.uniform:
            kinds = sorted({group.kind.value for group in architecture.groups})
            problems.append(f"layers of kind {', '.join(kinds)}")
        if architecture.quantization is not None:
            problems.append(f"weights quantized as {architecture.quantization.name}")
        if problems:
            raise ModelNotUnderstood(
                f"the Torch executor computes Llama-type models only: {'; '.join(problems)}. "
                "Serve this model with another engine."
            )
        facts = architecture.facts
        head_dim = int(facts["head_dim"] or 0)
        return cls(
            architecture=architecture,
            hidden_size=architecture.hidden_size,
            intermediate_size=architecture.intermediate_size,
            layers=int(facts["num_hidden_layers"] or 0),
            attention_heads=architecture.attention_heads,
            kv_heads=int(facts["num_key_value_heads"] or 0),
            head_dim=head_dim,
            vocab_size=architecture.vocab_size,
            max_context_tokens=architecture.max_context_tokens,
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            tied_embeddings=architecture.tied_embeddings,
            rotary_frequencies=_rotary_frequencies(config, head_dim),
        )


_ACCEPTED: dict[str, tuple[object, ...]] = {
    "model_type": ("llama", "mistral"),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
}


def _rotary_frequencies(config: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """`theta ** (-2i / d)`, rescaled as `rope_scaling` (or `rope_parameters`, the newer name) says.

    Scalings: `linear` divides all; `llama3` divides long wavelengths, keeps short ones and
    interpolates between (the formula of the Llama 3.1 release).
    """
    newer: Mapping[str, Any] = config.get("rope_parameters") or {}
    scaling: Mapping[str, Any] = config.get("rope_scaling") or newer
    theta = float(config.get("rope_theta") or newer.get("rope_theta") or 10_000.0)
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if head_dim % 2 or float(newer.get("partial_rotary_factor") or 1) != 1:
        raise ModelNotUnderstood(f"rotary embedding of a part of head_dim {head_dim}: not computed")
    if kind == "default":
        return tuple(plain)
    if kind == "linear":
        return tuple(f / float(scaling["factor"]) for f in plain)
    if kind == "llama3":
        return tuple(_llama3(f, scaling) for f in plain)
    raise ModelNotUnderstood(
        f"rope_scaling type {kind!r} is not computed here; known are default, linear and llama3"
    )


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequency / (2 * math.pi)
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency
