"""What status tells about the model and the memory budget of one replica."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvscaler_api.base import ApiModel, as_map
from kvscaler_api.quantities import DecimalText, Quantity

Bytes = Annotated[int, Quantity(zero=True)]
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(max_length=1024)]


class FactsSource(StrEnum):
    """Where facts of a model came from."""

    INLINE = "Inline"
    CATALOGUE = "Catalogue"
    REPLICA = "Replica"


class ModelStatus(ApiModel):
    """Facts of the model as they are used now."""

    source: FactsSource = Field(
        description="Inline (spec.model.architecture), Catalogue, or Replica (read by a sidecar)."
    )
    digest: Annotated[str, Field(max_length=128)] = Field(
        description="Digest over the facts; it changes when the model does."
    )
    name: Text | None = Field(None, description="Name of the model in the catalogue.")
    layers: Count | None = Field(None, description="Number of layers.")
    kv_heads: Count | None = Field(None, description="Key-value heads per layer.")
    head_dim: Count | None = Field(None, description="Values per head.")
    weight_bytes: Bytes | None = Field(None, alias="weights", description="Bytes of all weights.")
    kv_bytes_per_token: Count | None = Field(
        None, description="Bytes of KV cache that one token takes over all layers."
    )
    max_context_tokens: Count | None = Field(
        None, description="Longest sequence that is served, in tokens."
    )
    facts: Annotated[str, Field(max_length=4096)] | None = Field(
        None, description="The facts as JSON, so that a restarted operator need not ask again."
    )


class BudgetLine(ApiModel):
    """One use of the accelerator's memory."""

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(
        description="What the memory is for, such as weights or activations."
    )
    predicted_bytes: Bytes | None = Field(
        None, alias="predicted", description="Bytes that the budget gives it."
    )
    observed_bytes: Bytes | None = Field(
        None, alias="observed", description="Bytes that a replica reported."
    )
    basis: Annotated[str, Field(max_length=63)] | None = Field(
        None, description="Computed, Default or Observed: how the prediction was made."
    )


class BudgetStatus(ApiModel):
    """The memory budget of one replica, predicted and observed."""

    lines: tuple[BudgetLine, ...] = Field(
        (),
        max_length=32,
        json_schema_extra=as_map("name"),
        description="The budget line by line.",
    )
    block_tokens: Count | None = Field(None, description="Tokens per KV block.")
    block_bytes: Count | None = Field(None, description="Bytes per KV block.")
    predicted_blocks: Count | None = Field(
        None, description="KV blocks that the budget predicted for a replica."
    )
    observed_blocks: Count | None = Field(
        None, description="KV blocks that the smallest replica reported."
    )
    deviation_percent: Annotated[float, DecimalText()] | None = Field(
        None, description="Observed against predicted blocks, in percent; negative is fewer."
    )
    message: Text | None = Field(
        None, description="Why it does not fit, by how much, and what would; or what is assumed."
    )
