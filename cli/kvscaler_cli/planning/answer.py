"""The answer to a question, computed once for every form in which it is shown."""

from dataclasses import dataclass, replace

import click
from kvscaler.budget import (
    BudgetUnknown,
    Change,
    Demand,
    Deployment,
    Fleet,
    Footprint,
    KVBudget,
    Observation,
    Waste,
    calibrate,
    cheapest_changes,
    dtype_changes,
    held,
    largest_context,
    smallest_fleet,
    smallest_group,
    waste,
)
from kvscaler.budget.bandwidth import decode_step_floor_seconds
from kvscaler.models import ModelNotUnderstood

from kvscaler_cli.planning.question import OWN_ENGINES, Question


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that any output shows."""

    question: Question
    deployment: Deployment
    """The deployment that was asked about, with what an observation taught."""
    budget: KVBudget
    predicted: KVBudget
    """Before an observation; the same without one."""
    request_blocks: int | None
    held: int | None
    """Requests of the demand's lengths at once, over all pools."""
    context_at_concurrency: int | None
    alternatives: tuple[Change, ...]
    """Other types of cache and weights."""
    changes: tuple[Change, ...]
    """The cheapest that make it fit, or hold what is asked."""
    group: Fleet | None
    fleet: Fleet | None
    waste: Waste | None
    decode_floor_seconds: float | None

    @property
    def holds(self) -> bool:
        """Whether the answer is yes: it fits, and holds what was asked for."""
        if not self.budget.fit.fits:
            return False
        demand = self.question.demand
        if demand is None:
            return self.context_at_concurrency != 0
        return (self.held or 0) >= demand.concurrency

    @property
    def pool_bound_context(self) -> bool:
        """Whether the pool, and neither a person nor the model, decides the longest context."""
        asked = self.deployment
        settled = asked.profile.resolve(asked.model, asked.accelerator, asked.settings)
        own = asked.model.max_context_tokens
        return settled.max_context_tokens is None and self.budget.max_context_tokens < own

    @property
    def running(self) -> int:
        """Requests that a decode step is told for: those asked for, or all that are held."""
        return _running(self.question, self.held or 0)

    @property
    def as_is(self) -> Change:
        """No change at all, to compare others with."""
        return Change("as it is", self.deployment, self.budget, {})

    def at_once(self, change: Change) -> float:
        """Requests at once after `change`: of the demand's lengths, or of its own longest context."""
        demand = self.question.demand
        if demand is None:
            return _longest_at_once(change, change.budget.max_context_tokens)
        return held(change.deployment, change.budget, demand) * change.replicas

    def context_after(self, change: Change) -> int | None:
        """Tokens that each request may have after `change` at the concurrency asked for."""
        if self.question.concurrency is None:
            return None
        each = -(-self.question.concurrency // change.replicas)
        return _context_at(each, change.deployment, change.budget)

    def gain(self, change: Change) -> float | None:
        """How many times as many requests, or tokens of each, `change` holds; `None` of nothing."""
        if self.question.demand is not None:
            now = self.at_once(self.as_is)
            return self.at_once(change) / now if now else None
        if self.question.concurrency is not None:
            each = self.context_at_concurrency
            return (self.context_after(change) or 0) / each if each else None
        tokens = self.budget.max_context_tokens
        now = _longest_at_once(self.as_is, tokens)
        return _longest_at_once(change, tokens) / now if now else None


def _context_at(concurrency: int, deployment: Deployment, budget: KVBudget) -> int:
    """Tokens that each of `concurrency` requests may have; 0 where the engine runs fewer."""
    each = -(-concurrency // deployment.pools)
    if each > budget.max_sequences:
        return 0
    return min(largest_context(budget, deployment.model, each), budget.max_context_tokens)


def _longest_at_once(change: Change, tokens: int) -> float:
    pools = change.deployment.pools * change.replicas
    return pools * change.budget.layout.concurrency(change.budget.blocks, tokens)


def answer_of(question: Question) -> Answer:
    """Compute the answer. Raises `UsageError` for what can't be computed."""
    deployment, demand = question.deployment, question.demand
    try:
        predicted = deployment.budget()
        budget, deployment = _observed(question, predicted)
    except (BudgetUnknown, ModelNotUnderstood) as error:
        hint = " (--engine vllm)" if deployment.profile.name in OWN_ENGINES else ""
        raise click.UsageError(f"--engine {deployment.profile.name}: {error}{hint}") from error
    fits = budget.fit.fits
    request_blocks = count = None
    if demand is not None:
        speculative = deployment.settings.speculative_tokens
        footprint = Footprint(budget.block_tokens, budget.layout)
        request_blocks = footprint.blocks(demand.prompt_tokens, demand.output_tokens, speculative)
        count = held(deployment, budget, demand)
    context = None
    if question.concurrency is not None and fits:
        context = _context_at(question.concurrency, deployment, budget)
    wants = demand is not None and question.concurrency is not None
    typical = demand.tokens if demand else budget.max_context_tokens
    return Answer(
        question=question,
        deployment=deployment,
        budget=budget,
        predicted=predicted,
        request_blocks=request_blocks,
        held=count,
        context_at_concurrency=context,
        alternatives=dtype_changes(deployment),
        changes=cheapest_changes(deployment, demand or _any_length(question)),
        group=smallest_group(deployment, demand) if demand and wants else None,
        fleet=smallest_fleet(deployment, demand) if demand and wants else None,
        waste=waste(deployment, budget, typical) if fits else None,
        decode_floor_seconds=_decode_floor(question, deployment, budget, count),
    )


def _any_length(question: Question) -> Demand | None:
    """Where only a concurrency is asked for, requests of any length will do."""
    return None if question.concurrency is None else Demand(1, 0, question.concurrency)


def _observed(question: Question, predicted: KVBudget) -> tuple[KVBudget, Deployment]:
    """The budget as the engine reported it, and the deployment that learned from it."""
    deployment, observation = question.deployment, question.observation
    if observation is None:
        return predicted, deployment
    if observation.tokens is not None:
        blocks = _blocks_printed_as(deployment, predicted, observation.tokens)
        observation = Observation(blocks=blocks)
    try:
        budget, learned = calibrate(predicted, observation)
    except ValueError as error:
        raise click.UsageError(f"--observed: {error}") from error
    return budget, replace(deployment, calibration=learned)


def _blocks_printed_as(deployment: Deployment, budget: KVBudget, tokens: int) -> int:
    """The fewest blocks for which the engine prints a pool of `tokens`."""
    low, high = 1, max(2, 2 * tokens)
    while low < high:
        middle = (low + high) // 2
        printed = deployment.profile.printed_tokens(
            budget.layout, middle, budget.max_context_tokens
        )
        low, high = (low, middle) if printed >= tokens else (middle + 1, high)
    return low


def _decode_floor(
    question: Question, deployment: Deployment, budget: KVBudget, count: int | None
) -> float | None:
    if question.demand is None or not count:
        return None
    each = -(-_running(question, count) // deployment.pools)
    return decode_step_floor_seconds(deployment, budget, each, question.demand.tokens)


def _running(question: Question, count: int) -> int:
    return count if question.concurrency is None else min(count, question.concurrency)
