"""What of a model's architecture decides its memory: layers, KV heads, widths, weights.

Facts keep the names of a Hugging Face `config.json`, because that is what users, catalogues and
replicas all have. An architecture that is not understood is refused with the fields that are
missing or strange: a guessed KV size ends in an out-of-memory hours later.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvscaler.models.kv_formats import index_token_bytes, kv_format, layer_token_bytes
from kvscaler.models.layers import LayerGroup, LayerKind
from kvscaler.models.parse import parse
from kvscaler.models.quantization import Quantization
from kvscaler.models.tensors import TensorKind
from kvscaler.models.weights import Split, rank_bytes, total_bytes

Scalar = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """Facts of a decoder: what its layers keep of the past, and its weights by kind."""

    model_type: str
    groups: tuple[LayerGroup, ...]
    hidden_size: int
    intermediate_size: int
    attention_heads: int
    vocab_size: int
    max_context_tokens: int
    tensors: tuple[TensorKind, ...]
    tied_embeddings: bool
    native_dtype: str
    facts: Mapping[str, Scalar]
    """The configuration fields that this was made from, by their own names."""
    quantization: Quantization | None = None
    """How the checkpoint stores its weights; `None` for weights in `native_dtype`."""
    draft: tuple[TensorKind, ...] = ()
    """Weights of multi-token-prediction layers, loaded only when they speculate."""
    rotary_dim: int = 0
    """Elements of a head that carry positions, the width of an engine's table of angles."""
    experts_per_token: int = 0
    expert_width: int = 0
    """Inner width of one expert; both are 0 for dense models."""
    stored_bytes: int | None = None
    """Bytes of the weight files, where an index or a header told them."""
    overrides: tuple[str, ...] = ()
    """Fields that a user set against the configuration."""

    @property
    def layers(self) -> int:
        """All layers that keep something."""
        return sum(group.layers for group in self.groups)

    @property
    def kv_heads(self) -> int:
        """KV heads of the first group (all groups are alike for uniform attention)."""
        return self.groups[0].kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a key in the first group."""
        return self.groups[0].key_dim

    @property
    def uniform(self) -> bool:
        """Whether all layers keep keys and values of every token in one layout."""
        return len(self.groups) == 1 and self.groups[0].kind is LayerKind.FULL

    @property
    def parameters(self) -> int:
        """Parameters as stored once: tied embeddings count once, untied twice."""
        return sum(kind.elements for kind in self.tensors)

    @property
    def has_vision(self) -> bool:
        """Whether a vision or audio tower is loaded too."""
        return any(kind.name == "vision" for kind in self.tensors)

    @property
    def prediction_layers(self) -> int:
        """Layers for multi-token prediction, which draft where the model speculates by itself."""
        for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
            if found := self.facts.get(name):
                return int(found)
        return 0

    def tensor(self, name: str) -> TensorKind | None:
        """The kind of weights called `name`, if the model has any."""
        return next((kind for kind in self.tensors if kind.name == name), None)

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """`sum over groups of layers * kv_heads * (key_dim + value_dim) * bytes`, one rank.

        Windowed layers count in full: it is what a token adds until a window is full. Source: the
        GQA line of every engine's start-up log (`2 * L * kv_heads * head_dim * bytes`).
        """
        form = kv_format(kv_dtype)
        total = 0.0
        for group in self.groups:
            total += group.layers * layer_token_bytes(group, form)
            total += group.index_layers * index_token_bytes(group) / group.tokens_per_state
        return round(total)

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights: `dtype`, but for what the checkpoint quantizes."""
        return total_bytes(self.tensors, self.quantization, dtype)

    def rank_weight_bytes(
        self, dtype: str, split: Split | None = None, *, draft: bool = False
    ) -> int:
        """Bytes of weights on the fullest rank; `draft` adds the multi-token-prediction layers."""
        split = replace(split or Split(), kv_heads=self.kv_heads, vocab_size=self.vocab_size)
        kinds = self.tensors + (self.draft if draft else ())
        computed = rank_bytes(kinds, self.quantization, dtype, split)
        if self.stored_bytes is None:
            return computed
        # Files hold prediction layers too, in the checkpoint's own type.
        whole = total_bytes(self.tensors + self.draft, self.quantization, self.native_dtype)
        return round(computed * self.stored_bytes / max(1, whole))

    def rank_expert_bytes(self, dtype: str, tensor: int) -> int:
        """Bytes of routed experts on one rank."""
        experts = self.tensor("experts")
        if experts is None:
            return 0
        return rank_bytes((experts,), self.quantization, dtype, Split(tensor))

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of SHA-256 over the canonical JSON of the facts."""
        canonical = json.dumps(dict(self.facts), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> Self:
        """Read a `config.json` (as a mapping), or the facts of an earlier reading.

        `overrides` replace fields of the text model and are kept in `overrides` for display.
        Raises `ModelNotUnderstood` naming every field that is missing, of a wrong type, or that
        changes the memory in a way that is not computed yet.
        """
        return cls(**parse(config, overrides or {}))
