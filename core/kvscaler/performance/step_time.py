"""Linear step time of an engine, and the steady state of a replica that follows from it.

A step of a continuous-batching engine costs

    seconds = base + per_sequence · decodes + per_context_token · context + per_prefill_token · prefill

With λ requests a second on a replica, prompt P and output O tokens, a request adds this work:

    w_p = per_prefill · E[P] + per_context · E[P²]/2          prefill seconds
    M   = E[P·O] + E[O²]/2                                    KV token-steps
    w_d = per_sequence · E[O] + per_context · M               decode seconds

so ρ = λ (w_p + w_d) of every second is spent on requests and the rest on base costs, one per step:
a token is produced each  t0 / (1 - ρ)  seconds, in closed form, because batch and context both grow
with the time that a token takes.
"""

from dataclasses import dataclass

from kvscaler.protocol.state import StepCosts


@dataclass(frozen=True, slots=True)
class RequestWork:
    """Moments of the requests that a replica serves, in tokens."""

    prompt_mean_tokens: float
    prompt_second_moment: float
    output_mean_tokens: float
    output_second_moment: float
    prompt_output_mean: float

    @property
    def kv_token_steps(self) -> float:
        """M: context tokens read, summed over the decode steps of one request."""
        return self.prompt_output_mean + self.output_second_moment / 2


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Costs of a step in seconds, and where they come from."""

    base_seconds: float
    per_sequence_seconds: float
    per_context_token_seconds: float
    per_prefill_token_seconds: float
    source: str

    @classmethod
    def from_costs(
        cls, costs: StepCosts, source: str = "measured by the replica"
    ) -> "StepTimeModel":
        """The model of a replica that measured its own steps."""
        return cls(
            costs.base_seconds,
            costs.per_sequence_seconds,
            costs.per_context_token_seconds,
            costs.per_prefill_token_seconds,
            source,
        )

    def step_seconds(self, decodes: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        """Seconds of one step over `decodes` sequences that read `context_tokens` in all."""
        return (
            self.base_seconds
            + self.per_sequence_seconds * decodes
            + self.per_context_token_seconds * context_tokens
            + self.per_prefill_token_seconds * prefill_tokens
        )

    def prefill_work_seconds(self, work: RequestWork, hit_share: float = 0.0) -> float:
        """w_p: step seconds that one request's prefill costs, `hit_share` of it being cached."""
        computed = 1.0 - hit_share
        return computed * (
            self.per_prefill_token_seconds * work.prompt_mean_tokens
            + self.per_context_token_seconds * work.prompt_second_moment / 2
        )

    def decode_work_seconds(self, work: RequestWork) -> float:
        """w_d: step seconds that one request's decode costs, without base costs."""
        return (
            self.per_sequence_seconds * work.output_mean_tokens
            + self.per_context_token_seconds * work.kv_token_steps
        )

    def work_seconds(self, work: RequestWork, hit_share: float = 0.0) -> float:
        """w_p + w_d."""
        return self.prefill_work_seconds(work, hit_share) + self.decode_work_seconds(work)

    def time_per_output_token_seconds(self, utilization: float) -> float:
        """t0 / (1 - ρ); raises at ρ ≥ 1, where there is no steady state."""
        if not 0.0 <= utilization < 1.0:
            raise ValueError(f"no steady state at a utilization of {utilization:.2f}")
        return self.base_seconds / (1.0 - utilization)

    def time_alone_per_token_seconds(self, work: RequestWork) -> float:
        """Time per output token of a request that has a replica to itself."""
        mine = self.decode_work_seconds(work) / max(1.0, work.output_mean_tokens)
        return self.base_seconds + mine

    def residence_seconds(
        self, work: RequestWork, utilization: float, hit_share: float = 0.0
    ) -> float:
        """Seconds that a request holds KV: its prefill among the others' work, then its decode."""
        tpot = self.time_per_output_token_seconds(utilization)
        prefill = self.prefill_work_seconds(work, hit_share) / (1.0 - utilization) + tpot
        return prefill + work.output_mean_tokens * tpot

    def kv_token_seconds(
        self, work: RequestWork, utilization: float, hit_share: float = 0.0
    ) -> float:
        """E∫ context dt of one request: M · tpot, and its prompt held while prefilling."""
        tpot = self.time_per_output_token_seconds(utilization)
        prefill = self.prefill_work_seconds(work, hit_share) / (1.0 - utilization) + tpot
        return work.kv_token_steps * tpot + work.prompt_mean_tokens * prefill

    def rate_for(
        self, work: RequestWork, time_per_output_token_seconds: float, hit_share: float = 0.0
    ) -> float | None:
        """Most requests per second with t0/(1-ρ) within the target and ρ < 0.97.

        `None` when the target can't be met even by an idle replica.
        """
        if self.base_seconds >= time_per_output_token_seconds:
            return None
        utilization = min(MAX_UTILIZATION, 1.0 - self.base_seconds / time_per_output_token_seconds)
        seconds = self.work_seconds(work, hit_share)
        return utilization / seconds if seconds > 0 else float("inf")


MAX_UTILIZATION = 0.97
"""ρ above which the steady state is too far away to be a plan."""

LLAMA_3_1_8B_H100 = StepTimeModel(
    base_seconds=6.342e-3,
    per_sequence_seconds=12.15e-6,
    per_context_token_seconds=41.563e-9,
    per_prefill_token_seconds=20.884e-6,
    source=(
        "Llama-3.1-8B bf16, one H100 SXM, vLLM 0.24: least-squares fit to the step latencies of the "
        "aiconfigurator-core 0.12.0 silicon database (NVIDIA, Apache-2.0); mean relative error "
        "2.5 % on decode, 4 % on prefill, 7.3 % on mixed steps"
    ),
)
"""Its prefill attention (0.78 ns per token pair against 0.04 here) is left out: it matters above
about 10,000 prompt tokens. Mixed steps are overstated, which errs towards more replicas."""
