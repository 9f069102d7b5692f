"""Requests of some length, so many at once: whether a deployment holds them, and the fewest devices that do."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvscaler.budget.compute import BudgetUnknown
from kvscaler.budget.deployment import Deployment
from kvscaler.budget.lines import KVBudget
from kvscaler.budget.questions import sequences_at
from kvscaler.budget.rounding import ceil_div
from kvscaler.models import ModelNotUnderstood

LARGEST_NODE = 8
"""Ranks of tensor parallelism within one node; beyond, stages of a pipeline."""
MOST_DEVICES = 64
SPLIT_BY_LAYER = ("llama.cpp",)
"""Engines that give whole layers to each device (llama.cpp `--split-mode layer`, its default)."""
ONE_CONTEXT = ("llama.cpp",)
"""Engines whose context is that of all their sequences together (llama.cpp `--ctx-size`)."""
ONE_DEVICE = ("kvscaler-cpu", "kvscaler-cuda")
"""Engines that run on one device only."""


@dataclass(frozen=True, slots=True)
class Demand:
    """`concurrency` requests at once of `prompt_tokens` and up to `output_tokens` each."""

    prompt_tokens: int
    output_tokens: int = 0
    concurrency: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of one request at its end."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Fleet:
    """`replicas` alike, and how many requests one of them holds."""

    deployment: Deployment
    budget: KVBudget
    replicas: int
    held_each: int

    @property
    def devices(self) -> int:
        """Accelerators of all replicas."""
        return self.replicas * self.deployment.devices


def held(deployment: Deployment, budget: KVBudget, demand: Demand) -> int:
    """Requests of the demand's lengths that all pools of `deployment` hold at once.

    Within the engine's own limit of sequences; none where a request is longer than the longest
    context, or where the budget does not fit.
    """
    if not budget.fit.fits or demand.tokens > budget.max_context_tokens:
        return 0
    one = sequences_at(
        budget,
        demand.prompt_tokens,
        demand.output_tokens,
        deployment.settings.speculative_tokens,
    )
    return deployment.pools * one


def with_room_for(deployment: Deployment, demand: Demand) -> Deployment:
    """`deployment` with its limits of context and sequences raised to what `demand` needs.

    Only limits that are in the way change; memory is another matter.
    """
    settings = deployment.profile.resolve(
        deployment.model, deployment.accelerator, deployment.settings
    )
    changes: dict[str, object] = {}
    each = ceil_div(demand.concurrency, deployment.pools)
    needed = 0 if demand.tokens > deployment.model.max_context_tokens else demand.tokens
    if deployment.profile.name in ONE_CONTEXT:
        needed *= each
    if settings.max_context_tokens is not None and settings.max_context_tokens < needed:
        changes["max_context_tokens"] = needed
    if settings.max_sequences < each:
        changes["max_sequences"] = each
    return deployment.changed(**changes) if changes else deployment


def smallest_group(deployment: Deployment, demand: Demand) -> Fleet | None:
    """One replica on the fewest devices that holds `demand`; `None` when `MOST_DEVICES` do not.

    Powers of two: tensor parallelism within a node, then pipeline stages; what an engine can't do is
    left out.
    """
    for grown in groups(deployment):
        fleet = _fleet(grown, demand)
        if fleet is not None and fleet.replicas == 1:
            return fleet
    return None


def smallest_fleet(deployment: Deployment, demand: Demand) -> Fleet | None:
    """The fewest devices that hold `demand`, in replicas of one size; `None` when none holds one.

    Of two fleets of as many devices, the one of the smaller replicas: they start and fail apart.
    """
    found = [fleet for grown in groups(deployment) if (fleet := _fleet(grown, demand))]
    return min(found, key=lambda fleet: fleet.devices, default=None)


def groups(deployment: Deployment) -> Iterator[Deployment]:
    """The deployment as one replica of 1, 2, 4 … devices, the fewest first."""
    for tensor, pipeline in _shapes(deployment):
        pools = min(deployment.pools, tensor) if deployment.shares_group else 1
        yield deployment.changed(
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            data_parallel=pools,
            context_parallel=min(tensor, deployment.settings.context_parallel),
        )


def _fleet(deployment: Deployment, demand: Demand) -> Fleet | None:
    """As many replicas as hold `demand`, `None` where one holds no request at all."""
    try:
        grown = with_room_for(deployment, demand)
        budget = grown.budget()
        each = held(grown, budget, demand)
        if each < demand.concurrency and grown is not deployment:
            # More sequences cost memory too: what one replica can't hold is left to others.
            alone = with_room_for(deployment, replace(demand, concurrency=1))
            usual = alone.budget()
            if held(alone, usual, demand) > each:
                grown, budget, each = alone, usual, held(alone, usual, demand)
    except (BudgetUnknown, ModelNotUnderstood):
        return None
    if not each:
        return None
    return Fleet(grown, budget, ceil_div(demand.concurrency, each), each)


def _shapes(deployment: Deployment) -> Iterator[tuple[int, int]]:
    """Tensor and pipeline sizes; attention heads have to divide among the ranks."""
    devices = 1
    node = 1 if deployment.profile.name in SPLIT_BY_LAYER else LARGEST_NODE
    most = 1 if deployment.profile.name in ONE_DEVICE else MOST_DEVICES
    while devices <= most:
        tensor = min(devices, node)
        if deployment.model.attention_heads % tensor == 0:
            yield tensor, devices // tensor
        devices *= 2
