"""Buffers that every step reuses, made once and as large as the largest step.

A step allocates little, so the process's memory is what the budget said from the first request on,
and no step pays for fresh pages. What is allocated here is what `kvscaler.budget.profiles.own`
predicts, byte for byte; a test holds them equal.
"""

from dataclasses import dataclass, fields
from typing import Self

import torch
from kvscaler.budget.profiles.own import LOGIT_ROWS, PREFILL_ROWS
from kvscaler_kernels.paged_attention import causal_template

from kvscaler_sidecar.weights.llama_config import LlamaConfig


@dataclass(frozen=True, slots=True)
class Workspace:
    """`t` step tokens, `h` hidden, `q`/`k` query/KV heads x head_dim, `i` inner, `c` context."""

    hidden: torch.Tensor  # [t, h]: the residual stream
    normed: torch.Tensor  # [t, h]
    inverse: torch.Tensor  # [t, 1], fp32
    qkv: torch.Tensor  # [t, q + 2k]
    attention: torch.Tensor  # [t, q]
    gate_up: torch.Tensor  # [t, 2i]
    inner: torch.Tensor  # [t, i]
    rotated: torch.Tensor  # [t, q + k], fp32; empty if computing in fp32
    rotation: torch.Tensor  # [t, 1, head_dim / 2], complex: of each row's position
    rotations: torch.Tensor  # [c, head_dim / 2], complex: of every position
    gathered: torch.Tensor  # flat: blocks gathered for one call of attention
    causal: torch.Tensor  # [PREFILL_ROWS, c + PREFILL_ROWS]
    logits: torch.Tensor  # [LOGIT_ROWS, vocabulary]

    @classmethod
    def make(
        cls,
        config: LlamaConfig,
        *,
        step_tokens: int,
        max_sequences: int,
        max_context_tokens: int,
        gathered_elements: int,
        dtype: torch.dtype,
        device: str,
    ) -> Self:
        """Allocate for steps of at most `step_tokens` rows."""

        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        q_width = config.attention_heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        pairs = config.head_dim // 2
        frequencies = torch.tensor(config.rotary_frequencies, dtype=torch.float32, device=device)
        angles = torch.arange(max_context_tokens, device=device)[:, None] * frequencies
        return cls(
            hidden=empty(step_tokens, config.hidden_size),
            normed=empty(step_tokens, config.hidden_size),
            inverse=empty(step_tokens, 1, dtype=torch.float32),
            qkv=empty(step_tokens, q_width + 2 * kv_width),
            attention=empty(step_tokens, q_width),
            gate_up=empty(step_tokens, 2 * config.intermediate_size),
            inner=empty(step_tokens, config.intermediate_size),
            rotated=empty(
                0 if dtype == torch.float32 else step_tokens,
                q_width + kv_width,
                dtype=torch.float32,
            ),
            rotation=empty(step_tokens, pairs, dtype=torch.complex64),
            rotations=torch.polar(torch.ones_like(angles), angles),
            gathered=empty(gathered_elements),
            causal=causal_template(PREFILL_ROWS, max_context_tokens, dtype, device),
            logits=empty(min(LOGIT_ROWS, max_sequences), config.vocab_size),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, counted from them."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))
