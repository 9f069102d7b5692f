"""Executor `Torch`: computes a Llama-type model with plain torch over a paged KV pool.

Every number format, head shape and depth goes through the same few operations; what they make is
in reused buffers, and only rows that sample reach the head. The same code runs on CUDA, where kernels of its own can replace attention later.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from kvscaler.budget.profiles.own import BUCKET_BYTES
from kvscaler.engine.request import EngineRequest
from kvscaler.engine.step import StepPlan
from kvscaler.protocol.state import ExecutorReport, ExecutorType, StepCosts
from kvscaler_kernels.block_copy import copy_blocks
from kvscaler_kernels.kv_write import write_kv
from kvscaler_kernels.paged_attention import decode_attention, gather_blocks, prefill_attention

from kvscaler_sidecar.draws import seed_of
from kvscaler_sidecar.executors.dtype import ComputeDtype
from kvscaler_sidecar.executors.layout import StepLayout, lay_out
from kvscaler_sidecar.executors.plan_check import ExecutorError, check_plan
from kvscaler_sidecar.executors.seam import SampledToken, SamplingParams
from kvscaler_sidecar.executors.step_costs import measure_step_costs
from kvscaler_sidecar.executors.views import StepViews
from kvscaler_sidecar.executors.workspace import Workspace
from kvscaler_sidecar.sampling import SamplingRow, sample
from kvscaler_sidecar.weights.llama import LlamaWeights, load_llama
from kvscaler_sidecar.weights.llama_config import LlamaConfig


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """What a Torch executor is built for; all of it enters the budget."""

    block_tokens: int
    step_tokens: int
    max_sequences: int
    max_context_tokens: int
    compute: ComputeDtype
    device: str = "cpu"


class Torch:
    """Runs steps; see `seam.Executor`. Make it with `load`, then call `allocate` once."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, settings: TorchSettings) -> None:
        self.config = config
        self.settings = settings
        self.block_tokens = settings.block_tokens
        self._weights = weights
        self._dtype = settings.compute.dtype
        self._epsilon = torch.full((1,), config.norm_epsilon, device=settings.device)
        self._pool: list[LayerPool] = []
        self._rows: dict[str, SamplingRow] = {}
        block = settings.block_tokens * 2 * config.kv_heads * config.head_dim
        element = self._dtype.itemsize
        longest = -(-settings.max_context_tokens // settings.block_tokens)
        self._bucket_blocks = max(1, BUCKET_BYTES // (block * element))
        self.block_bytes = block * element * config.layers
        self._workspace = Workspace.make(
            config,
            step_tokens=settings.step_tokens,
            max_sequences=settings.max_sequences,
            max_context_tokens=settings.max_context_tokens,
            gathered_elements=max(self._bucket_blocks, longest) * block,
            dtype=self._dtype,
            device=settings.device,
        )
        self.report = ExecutorReport(
            type=ExecutorType.TORCH,
            device=settings.device,
            compute_dtype=settings.compute.name,
            kv_dtype=settings.compute.name,
            threads=torch.get_num_threads(),
            reason=settings.compute.reason,
        )

    @classmethod
    def load(cls, folder: Path, settings: TorchSettings) -> "Torch":
        """An executor of the model in `folder` (a Hugging Face folder with safetensors).

        Raises:
            ModelNotUnderstood: `config.json` asks for something that is not computed here.
            WeightsError: weight files are missing, damaged or of another shape.
        """
        config = LlamaConfig.read(folder)
        return cls(
            config,
            load_llama(folder, config, settings.compute.dtype, settings.device),
            settings,
        )

    @property
    def kv_blocks(self) -> int:
        """Blocks of the pool; 0 before `allocate`."""
        return self._pool[0].blocks.shape[0] if self._pool else 0

    @property
    def pool_bytes(self) -> int:
        """Counted from the pool's tensors."""
        return sum(layer.blocks.nbytes for layer in self._pool)

    @property
    def weight_bytes(self) -> int:
        """Counted from the loaded tensors."""
        return self._weights.nbytes

    @property
    def workspace_bytes(self) -> int:
        """Counted from the buffers that every step reuses."""
        return self._workspace.nbytes

    def allocate(self, num_blocks: int) -> None:
        """Make the pool and write zeros to all of it, so that its memory is really there.

        Zeros also make every block finite, on which masked attention relies.

        Raises:
            ExecutorError: there is a pool already, or no block was asked for.
        """
        if self._pool or num_blocks < 1:
            raise ExecutorError(
                f"can't allocate {num_blocks} blocks: at least one is needed, and a pool is made "
                f"once (this executor has {self.kv_blocks} blocks)"
            )
        slot = 2 * self.config.kv_heads * self.config.head_dim
        shape = (num_blocks, self.block_tokens * slot)
        for _ in range(self.config.layers):
            blocks = torch.empty(shape, dtype=self._dtype, device=self.settings.device).zero_()
            self._pool.append(LayerPool(blocks, blocks.view(-1, slot)))

    def add(self, request: EngineRequest, params: SamplingParams) -> None:
        """Learn how to sample a request."""
        self._rows[request.request_id] = SamplingRow(params, seed_of(params))

    def remove(self, request: EngineRequest) -> None:
        """Forget a request; unknown ones are ignored."""
        self._rows.pop(request.request_id, None)

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """Compute a step: one token per sampling chunk, in the order of the chunks.

        Raises:
            ExecutorError: the plan exceeds what was allocated, or samples an unknown request.
        """
        self._check(plan)
        with torch.inference_mode():
            copy_blocks(
                [layer.blocks for layer in self._pool],
                [copy.source for copy in plan.copies],
                [copy.target for copy in plan.copies],
            )
            if not plan.chunks:
                return []
            layout = self._lay_out(plan)
            hidden = self._forward(layout)
            tokens: list[SampledToken] = []
            rows = [self._row(chunk.request) for chunk in layout.sampled]
            height = self._workspace.logits.shape[0]
            for first in range(0, len(rows), height):
                part = slice(first, first + height)
                logits = self._logits(hidden, layout.sampled_rows[part])
                tokens += sample(logits, rows[part])
            return tokens

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Compute a step and return fp32 logits `[sampling chunks, vocabulary]`, unsampled."""
        self._check(plan)
        with torch.inference_mode():
            layout = self._lay_out(plan)
            hidden = self._forward(layout)
            height = self._workspace.logits.shape[0]
            parts = torch.split(layout.sampled_rows, height)
            return torch.cat([self._logits(hidden, part).clone() for part in parts])

    def measure(self) -> StepCosts:
        """Time a few steps on the allocated, still unused pool."""
        settings = self.settings
        return measure_step_costs(self, settings.max_context_tokens, settings.step_tokens)

    def _check(self, plan: StepPlan) -> None:
        check_plan(
            plan,
            block_tokens=self.block_tokens,
            step_tokens=self.settings.step_tokens,
            max_context_tokens=self.settings.max_context_tokens,
        )

    def _row(self, request: EngineRequest) -> SamplingRow:
        row = self._rows.get(request.request_id)
        if row is None:
            raise ExecutorError(
                f"request {request.request_id} samples but is unknown here; call add() first"
            )
        row.generated = request.token_ids[request.prompt_tokens :]
        return row

    def _lay_out(self, plan: StepPlan) -> StepLayout:
        return lay_out(
            plan, self.block_tokens, self._bucket_blocks, self._dtype, self.settings.device
        )

    def _forward(self, layout: StepLayout) -> torch.Tensor:
        """Hidden states `[rows, hidden]` after the last layer, before the final norm."""
        space = self._workspace
        views = StepViews.of(space, layout, self.config, self.block_tokens)
        hidden, normed, inner = views.hidden, views.normed, views.inner
        torch.index_select(self._weights.embedding, 0, layout.token_ids, out=hidden)
        torch.index_select(space.rotations, 0, layout.positions, out=space.rotation[: layout.rows])
        for layer, pool in zip(self._weights.layers, self._pool, strict=True):
            self._norm(hidden, layer.attention_norm, views.inverse, normed)
            layer.qkv.multiply(normed, views.qkv)
            _rotate(views)
            write_kv(pool.slots, layout.slots, views.kv)
            _attend(pool.blocks, views, space.causal)
            layer.output.add_product(views.attention, hidden)
            self._norm(hidden, layer.mlp_norm, views.inverse, normed)
            layer.gate_up.multiply(normed, views.gate_up)
            torch.ops.aten.silu.out(views.gate, out=inner)
            inner.mul_(views.up)
            layer.down.add_product(inner, hidden)
        return hidden

    def _norm(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        inverse: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """`out = hidden / sqrt(mean(hidden ** 2) + epsilon) * weight`, the mean in fp32."""
        torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32, out=inverse)
        torch.addcmul(self._epsilon, inverse, inverse, value=1 / hidden.shape[1], out=inverse)
        torch.mul(hidden, inverse.rsqrt_(), out=out)
        out.mul_(weight)

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """fp32 logits of at most `LOGIT_ROWS` rows."""
        last = hidden.index_select(0, rows)
        inverse = torch.empty(rows.shape[0], 1, device=last.device)
        self._norm(last, self._weights.norm, inverse, last)
        logits = self._workspace.logits[: rows.shape[0]]
        return torch.mm(last, self._weights.head, out=logits).float()


@dataclass(frozen=True, slots=True)
class LayerPool:
    """One layer's keys and values, by blocks `[blocks, width]` and by slots, one memory."""

    blocks: torch.Tensor
    slots: torch.Tensor


def _rotate(views: StepViews) -> None:
    """Rotary embedding in place: neighbours of a row are one complex number."""
    if views.exact is None:
        views.pairs.mul_(views.rotation)
        return
    views.exact.copy_(views.heads)
    views.pairs.mul_(views.rotation)
    views.heads.copy_(views.exact)


def _attend(blocks: torch.Tensor, views: StepViews, causal: torch.Tensor) -> None:
    """Fill `views.attention` from one layer's pool. Buckets and runs share one buffer, by turns."""
    for bucket in views.buckets:
        gather_blocks(blocks, bucket.table, bucket.gathered)
        bucket.target.copy_(decode_attention(bucket.query, bucket.keys, bucket.values, bucket.mask))
    for run in views.runs:
        gather_blocks(blocks, run.table, run.gathered)
        run.target.copy_(prefill_attention(run.query, run.keys, run.values, run.start, causal))
