"""Views of the workspace for one step: made once, used by every layer.

A view costs about a microsecond, and a layer needs some twenty of them, all alike: made layer by
layer they were a twentieth of a decode step of one sequence.
"""

from dataclasses import dataclass

import torch
from kvscaler_kernels.paged_attention import decode_context, prefill_context

from kvscaler_sidecar.executors.layout import StepLayout
from kvscaler_sidecar.executors.workspace import Workspace
from kvscaler_sidecar.weights.llama_config import LlamaConfig


@dataclass(frozen=True, slots=True)
class BucketViews:
    """One call of decode attention; shapes as in `kvscaler_kernels.paged_attention`."""

    table: torch.Tensor
    gathered: torch.Tensor
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class RunViews:
    """One prefill run."""

    table: torch.Tensor
    gathered: torch.Tensor
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    start: int
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepViews:
    """The first `layout.rows` rows of the workspace, cut as the layers use them."""

    hidden: torch.Tensor  # [rows, h]
    normed: torch.Tensor  # [rows, h]
    inverse: torch.Tensor  # [rows, 1], fp32: of each row's root mean square
    qkv: torch.Tensor  # [rows, q + 2k]
    heads: torch.Tensor  # [rows, q + k]: what is rotated
    exact: torch.Tensor | None  # [rows, q + k], fp32, unless heads are
    pairs: torch.Tensor  # [rows, heads, head_dim / 2], complex view of heads or exact
    rotation: torch.Tensor  # [rows, 1, head_dim / 2]
    kv: torch.Tensor  # [rows, 2k]
    attention: torch.Tensor  # [rows, q]
    gate_up: torch.Tensor  # [rows, 2i]
    gate: torch.Tensor  # [rows, i]
    up: torch.Tensor  # [rows, i]
    inner: torch.Tensor  # [rows, i]
    buckets: tuple[BucketViews, ...]
    runs: tuple[RunViews, ...]

    @classmethod
    def of(
        cls, space: Workspace, layout: StepLayout, config: LlamaConfig, block_tokens: int
    ) -> "StepViews":
        """Cut `space` for `layout`."""
        rows = layout.rows
        kv_heads, head_dim = config.kv_heads, config.head_dim
        group = config.attention_heads // kv_heads
        q_width, inner = config.attention_heads * head_dim, config.intermediate_size
        qkv, gate_up, attention = space.qkv[:rows], space.gate_up[:rows], space.attention[:rows]
        heads = qkv[:, : q_width + kv_heads * head_dim]
        exact = None if heads.dtype == torch.float32 else space.rotated[:rows]
        pairs = (heads if exact is None else exact).view(rows, -1, head_dim // 2, 2)
        query = qkv[:, :q_width].view(rows, kv_heads, group, head_dim)
        target = attention.view(rows, kv_heads, group, head_dim)
        width = block_tokens * 2 * kv_heads * head_dim
        buckets = []
        for bucket in layout.buckets:
            part = slice(bucket.first, bucket.first + bucket.count)
            gathered = _gathered(space, bucket.table, width)
            keys, values = decode_context(gathered, bucket.count, bucket.tokens, kv_heads, head_dim)
            buckets.append(
                BucketViews(
                    bucket.table, gathered, query[part], keys, values, bucket.mask, target[part]
                )
            )
        runs = []
        for run in layout.prefills:
            part = slice(run.first, run.first + run.length)
            gathered = _gathered(space, run.table, width)
            keys, values = prefill_context(
                gathered, run.start + run.length, kv_heads, group, head_dim
            )
            runs.append(
                RunViews(
                    run.table,
                    gathered,
                    query[part].permute(1, 2, 0, 3),
                    keys,
                    values,
                    run.start,
                    target[part].permute(1, 2, 0, 3),
                )
            )
        return cls(
            hidden=space.hidden[:rows],
            normed=space.normed[:rows],
            inverse=space.inverse[:rows],
            qkv=qkv,
            heads=heads,
            exact=exact,
            pairs=torch.view_as_complex(pairs),
            rotation=space.rotation[:rows, None],
            kv=qkv[:, q_width:],
            attention=attention,
            gate_up=gate_up,
            gate=gate_up[:, :inner],
            up=gate_up[:, inner:],
            inner=space.inner[:rows],
            buckets=tuple(buckets),
            runs=tuple(runs),
        )


def _gathered(space: Workspace, table: torch.Tensor, width: int) -> torch.Tensor:
    blocks = table.shape[0]
    return space.gathered[: blocks * width].view(blocks, width)
