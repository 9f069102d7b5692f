"""Which model a service serves, and how its facts are known before a Pod has read its files."""

import re
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvscaler_api.base import AS_ATOMIC, AS_SET, ApiModel, Rule, Ruled
from kvscaler_api.metadata import SecretReference
from kvscaler_api.quantities import Quantity


class LayerKind(StrEnum):
    """How a group of layers keeps the past of a sequence."""

    FULL = "Full"
    SLIDING = "Sliding"
    MLA = "MLA"
    RECURRENT = "Recurrent"


class LayerGroup(ApiModel):
    """Layers that keep the same amount of state for each sequence."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(self.kind in ['Full', 'Sliding']) || (has(self.kvHeads) && has(self.headDim))",
            "layers of kind Full or Sliding need kvHeads and headDim",
            lambda group: (
                group.kind not in (LayerKind.FULL, LayerKind.SLIDING)
                or None not in (group.kv_heads, group.head_dim)
            ),
        ),
        Rule(
            "self.kind != 'Sliding' || has(self.windowTokens)",
            "layers of kind Sliding need windowTokens",
            lambda group: group.kind != LayerKind.SLIDING or group.window_tokens is not None,
        ),
        Rule(
            "self.kind != 'MLA' || has(self.latentDim)",
            "layers of kind MLA need latentDim",
            lambda group: group.kind != LayerKind.MLA or group.latent_dim is not None,
        ),
        Rule(
            "self.kind != 'Recurrent' || has(self.state)",
            "layers of kind Recurrent need state",
            lambda group: group.kind != LayerKind.RECURRENT or group.state_bytes is not None,
        ),
    )

    kind: LayerKind = Field(
        LayerKind.FULL,
        description=(
            "Full keeps every token, Sliding the last windowTokens, MLA one compressed vector per"
            " token, Recurrent a fixed state per sequence."
        ),
    )
    count: Annotated[int, Field(ge=1, le=10_000)] = Field(
        description="Number of layers of this kind."
    )
    kv_heads: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="Key-value heads per layer (fewer than query heads under GQA)."
    )
    head_dim: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        None, description="Values per head."
    )
    window_tokens: Annotated[int, Field(ge=1, le=100_000_000)] | None = Field(
        None, description="Tokens that a sliding window keeps."
    )
    latent_dim: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        None, description="Values per token and layer of the compressed vector, RoPE part included."
    )
    state_bytes: Annotated[int, Quantity()] | None = Field(
        None,
        alias="state",
        description="Bytes of recurrent state per sequence and layer, such as 2Mi.",
    )


class ArchitectureSpec(ApiModel):
    """Facts of a model that neither the catalogue nor a public config.json tells."""

    layers: tuple[LayerGroup, ...] = Field(
        min_length=1,
        max_length=16,
        json_schema_extra=AS_ATOMIC,
        description="Groups of layers by how they keep the past; one entry for a uniform model.",
    )
    weights_bytes: Annotated[int, Quantity()] = Field(
        alias="weights",
        description="Bytes of all weights as they are loaded, such as 15Gi.",
    )
    hidden_size: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        description="Values of the residual stream, which the activation peak scales with."
    )
    attention_heads: Annotated[int, Field(ge=1, le=4096)] = Field(
        description="Query heads per layer."
    )
    intermediate_size: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        description="Values between the two halves of a feed-forward block."
    )
    vocabulary_size: Annotated[int, Field(ge=1, le=100_000_000)] = Field(
        description="Entries of the vocabulary, which the size of the logits scales with."
    )
    max_context_tokens: Annotated[int, Field(ge=1, le=100_000_000)] = Field(
        description="Longest sequence, prompt and output together, that the model was made for."
    )


_SOURCE_PATTERN = (
    "^(hf://[A-Za-z0-9._-]+/[A-Za-z0-9._-]+"
    "|builtin://[a-z0-9]([a-z0-9._-]*[a-z0-9])?"
    "|pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/[A-Za-z0-9._-]+)*"
    "|s3://[a-z0-9][a-z0-9.-]+[a-z0-9](/[A-Za-z0-9._=-]+)*)$"
)
_KNOWN_SOURCE = Rule(
    f"self.matches('{_SOURCE_PATTERN}') && !self.matches('/[.][.]?(/|$)')",
    "must be hf://owner/name, builtin://name, pvc://claim/path or s3://bucket/path, without . or"
    " .. as a path segment",
    lambda uri: (
        re.fullmatch(_SOURCE_PATTERN, uri) is not None and re.search("/[.][.]?(/|$)", uri) is None
    ),
)


class ModelSpec(ApiModel):
    """The model and the names under which it answers."""

    uri: Annotated[str, Ruled(_KNOWN_SOURCE)] = Field(
        min_length=1,
        max_length=512,
        description=(
            "Where the engine finds the model: hf://owner/name (Hugging Face Hub), builtin://name"
            " (a folder of the engine's image), pvc://claim/path (a PersistentVolumeClaim, mounted"
            " read-only) or s3://bucket/path. The operator itself never fetches it."
        ),
    )
    revision: str = Field(
        "main",
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        description=(
            "Branch, tag or commit of an hf:// model. Pin a commit so that a rollout cannot change"
            " the model."
        ),
    )
    credentials_secret_ref: SecretReference | None = Field(
        None,
        description=(
            "Secret with the credentials for the model's source, mounted into the Pod. The"
            " operator never reads it."
        ),
    )
    served_names: tuple[
        Annotated[
            str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*)$")
        ],
        ...,
    ] = Field(
        (),
        max_length=16,
        json_schema_extra=AS_SET,
        description=(
            "Names that clients may send as `model`; the first one is reported back. Empty means"
            " the name of this object."
        ),
    )
    max_context_tokens: Annotated[int, Field(ge=1, le=100_000_000)] | None = Field(
        None,
        description=(
            "Longest sequence in tokens, prompt and output together. A longer request is refused"
            " with 413. Absent means the model's own limit; a lower one bounds what a single"
            " request can take from the KV cache."
        ),
    )
    architecture: ArchitectureSpec | None = Field(
        None,
        description=(
            "Facts of a model that is in no catalogue, for planning before the first Pod runs."
            " What the engine reads from the model's files is compared with them."
        ),
    )

    @property
    def scheme(self) -> str:
        """What stands before `://` in the URI."""
        return self.uri.partition("://")[0]
