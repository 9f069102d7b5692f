"""Linear step time of an engine, and the steady state of a replica that follows from it.

A step of a continuous-batching engine costs

    seconds = base + per_sequence · decodes + per_context_token · context
            + per_prefill_token · prefill + per_prefill_pair · pairs

where `context` counts what decoding sequences read, and `pairs` are the query-key pairs of prefill:
a prompt token at position p meets p + 1 of them. A card computes a pair much faster than it reads a
token's keys and values; a CPU does not, and where no cost of a pair is known it is that of reading.

With λ requests a second on a replica, prompt P and output O tokens, a request adds this work:

    w_p = per_prefill · E[P] + per_pair · E[P²]/2             prefill seconds
    M   = E[P·O] + E[O²]/2                                    KV token-steps
    w_d = per_sequence · E[O] + per_context · M               decode seconds

so ρ = λ (w_p + w_d) of every second is spent on requests and the rest on base costs, one per step:
a token is produced each  t0 / (1 - ρ)  seconds, in closed form, because batch and context both grow
with the time that a token takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

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
    per_prefill_pair_seconds: float | None = None
    """`None` where it is not known: then a pair costs what a context token costs."""

    @property
    def pair_seconds(self) -> float:
        """Seconds of one query-key pair of prefill."""
        known = self.per_prefill_pair_seconds
        return self.per_context_token_seconds if known is None else known

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
            costs.per_prefill_pair_seconds,
        )

    @classmethod
    def mean(cls, models: Sequence["StepTimeModel"]) -> "StepTimeModel":
        """The model whose every cost is the mean of the others' (one at least)."""
        pairs = [m.pair_seconds for m in models if m.per_prefill_pair_seconds is not None]
        return cls(
            fmean(m.base_seconds for m in models),
            fmean(m.per_sequence_seconds for m in models),
            fmean(m.per_context_token_seconds for m in models),
            fmean(m.per_prefill_token_seconds for m in models),
            models[0].source,
            fmean(m.pair_seconds for m in models) if pairs else None,
        )

    def costs(self, time_scale: float = 1.0) -> StepCosts:
        """The constants as a replica reports them whose times are all `time_scale` as long."""
        pair = self.per_prefill_pair_seconds
        return StepCosts(
            base_seconds=time_scale * self.base_seconds,
            per_sequence_seconds=time_scale * self.per_sequence_seconds,
            per_context_token_seconds=time_scale * self.per_context_token_seconds,
            per_prefill_token_seconds=time_scale * self.per_prefill_token_seconds,
            per_prefill_pair_seconds=None if pair is None else time_scale * pair,
        )

    def step_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int = 0, prefill_pairs: int = 0
    ) -> float:
        """Seconds of one step.

        `decodes` sequences read `context_tokens` in all; prefill computes `prefill_tokens`, which
        meet `prefill_pairs` keys.
        """
        return (
            self.base_seconds
            + self.per_sequence_seconds * decodes
            + self.per_context_token_seconds * context_tokens
            + self.per_prefill_token_seconds * prefill_tokens
            + self.pair_seconds * prefill_pairs
        )

    def prefill_work_seconds(self, work: RequestWork, hit_share: float = 0.0) -> float:
        """w_p: step seconds that one request's prefill costs, `hit_share` of it being cached."""
        computed = 1.0 - hit_share
        return computed * (
            self.per_prefill_token_seconds * work.prompt_mean_tokens
            + self.pair_seconds * work.prompt_second_moment / 2
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
