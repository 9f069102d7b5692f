"""Executor `Modelled`: steps take the time of a named card, and nothing is computed.

Server, scheduler, block pool and admission are the real ones, so blocks, queues, refusals and
streams are exact for the card's memory; only the arithmetic is replaced by a wait of the step-time
model (`kvscaler.performance`) and the tokens by synthetic ones. No tensor exists, so a replica of
an 80 GB card fits in some 100 MB of a laptop. `time_scale` stretches every wait, so that
client and proxies on a small machine are no bottleneck; whoever shows the executor shows it too.
"""

from kvscaler.budget import KVBudget
from kvscaler.engine.request import EngineRequest
from kvscaler.engine.step import StepPlan
from kvscaler.performance import StepTimeModel
from kvscaler.protocol.state import ExecutorReport, ExecutorType, StepCosts

from kvscaler_sidecar.executors.pace import Pace
from kvscaler_sidecar.executors.plan_check import ExecutorError, check_plan
from kvscaler_sidecar.executors.seam import SampledToken, SamplingParams
from kvscaler_sidecar.executors.synthetic import SyntheticTokens


class Modelled:
    """Runs steps; see `seam.Executor`. The pool has the blocks that the card's budget gives."""

    weight_bytes = 0
    """Nothing is loaded; what the card would hold is in the budget."""
    pool_bytes = 0

    def __init__(
        self,
        budget: KVBudget,
        model: StepTimeModel,
        tokens: SyntheticTokens,
        *,
        time_scale: float = 1.0,
        pace: Pace | None = None,
    ) -> None:
        self.model = model
        self.time_scale = time_scale
        self.block_tokens = budget.block_tokens
        self.block_bytes = budget.block_bytes
        self.kv_blocks = budget.blocks
        self._step_tokens = budget.step_tokens
        self._max_context_tokens = budget.max_context_tokens
        self._tokens = tokens
        self._pace = Pace() if pace is None else pace
        self.report = ExecutorReport(
            type=ExecutorType.MODELLED,
            device=budget.accelerator,
            compute_dtype=budget.compute_dtype,
            kv_dtype=budget.kv_dtype,
            time_scale=time_scale,
            reason=f"step times: {model.source}",
        )

    def add(self, request: EngineRequest, params: SamplingParams) -> None:
        """Learn how to sample a request."""
        self._tokens.add(request, params)

    def remove(self, request: EngineRequest) -> None:
        """Forget a request; unknown ones are ignored. Without any, the clock of steps rests."""
        self._tokens.remove(request)
        if not len(self._tokens):
            self._pace.rest()

    def step_seconds(self, plan: StepPlan) -> float:
        """How long the step takes here: the card's time, stretched."""
        return self.time_scale * self.model.step_seconds(
            plan.decode_sequences, plan.context_tokens, plan.prefill_tokens, plan.prefill_pairs
        )

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """Wait as long as the card would compute: one token per sampling chunk, in their order.

        Raises:
            ExecutorError: the plan exceeds the budget, or samples an unknown request.
        """
        check_plan(
            plan,
            block_tokens=self.block_tokens,
            step_tokens=self._step_tokens,
            max_context_tokens=self._max_context_tokens,
        )
        if not plan.chunks:
            return []
        sampled: list[SampledToken] = []
        for chunk in plan.chunks:
            if not chunk.samples:
                continue
            if chunk.request not in self._tokens:
                raise ExecutorError(
                    f"request {chunk.request.request_id} samples but is unknown here; call add() "
                    "first"
                )
            sampled.append(self._tokens.next(chunk.request))
        self._pace.step(self.step_seconds(plan))
        return sampled

    def measure(self) -> StepCosts:
        """The model's constants as they show here, stretched."""
        return self.model.costs(self.time_scale)
