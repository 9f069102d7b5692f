"""The questions that people ask of a budget: how many requests, how long, on how many cards.

All are answered by the same budget, computed again under other settings; nothing here has a formula of
its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvscaler.budget.compute import BudgetUnknown, compute_budget
from kvscaler.budget.lines import KVBudget, gib
from kvscaler.budget.profile import EngineProfile
from kvscaler.budget.settings import EngineSettings
from kvscaler.hardware import Accelerator
from kvscaler.models import LayerKind, ModelArchitecture, ModelNotUnderstood
from kvscaler.models.quantization import parse_name

LARGEST_NODE = 8
"""Ranks of tensor parallelism within one node; beyond, stages of a pipeline."""
MOST_DEVICES = 64
HIGHEST_UTILIZATION_PERCENT = 95.0
FEW_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is served, on what, by what."""

    model: ModelArchitecture
    accelerator: Accelerator
    profile: EngineProfile
    settings: EngineSettings

    def budget(self, **changes: object) -> KVBudget:
        """The budget with some settings changed."""
        settings = replace(self.settings, **changes)  # type: ignore[arg-type]
        return compute_budget(self.model, self.accelerator, self.profile, settings)


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a deployment and what it leads to."""

    name: str
    budget: KVBudget

    @property
    def sequences(self) -> float:
        """Sequences of the longest context that the changed pool holds."""
        return self.budget.layout.concurrency(self.budget.blocks, self.budget.max_context_tokens)


@dataclass(frozen=True, slots=True)
class Waste:
    """Bytes of a full pool that hold no token, on one rank, by cause."""

    rounding_bytes: int
    """Last blocks of sequences, half empty on average, at the given length and number."""
    padding_bytes: int
    """Pages grown to a common size and layers that pad groups."""
    replication_bytes: int
    """Copies of KV heads where there are more ranks than heads."""


def sequences_at(budget: KVBudget, prompt_tokens: int, output_tokens: int) -> int:
    """Requests of these lengths that run at once, within the engine's own limit."""
    each = budget.layout.sequence_blocks(prompt_tokens + output_tokens)
    return min(budget.max_sequences, budget.blocks // each) if each else budget.max_sequences


def largest_context(budget: KVBudget, model: ModelArchitecture, concurrency: int) -> int:
    """Tokens that each of `concurrency` sequences may have; at most the model's own context."""
    return budget.layout.longest(budget.blocks // max(1, concurrency), model.max_context_tokens)


def waste(budget: KVBudget, model: ModelArchitecture, tokens: int) -> Waste:
    """What of a pool full of sequences of `tokens` holds nothing."""
    layout = budget.layout
    sequences = budget.blocks // max(1, layout.sequence_blocks(tokens))
    rounding = 0
    for group in layout.groups:
        if group.kind is not LayerKind.RECURRENT:
            held = group.blocks(tokens, layout.step_tokens) * group.block_tokens
            empty = max(0, held - min(tokens, group.window_tokens or tokens))
            rounding += sequences * empty * layout.block_bytes // group.block_tokens
    copies = 0
    for kind in model.groups:
        if kind.kind in (LayerKind.FULL, LayerKind.SLIDING) and budget.ranks > kind.kv_heads > 0:
            share = 1 - kind.kv_heads / budget.ranks
            copies += int(budget.pool_bytes * share * kind.layers / max(1, model.layers))
    return Waste(rounding, layout.padding_bytes * budget.blocks, copies)


def smallest_group(
    deployment: Deployment, context_tokens: int, concurrency: int = 1
) -> KVBudget | None:
    """The budget of the fewest devices that hold `concurrency` sequences of `context_tokens`.

    Powers of two: tensor parallelism within a node, then pipeline stages. `None` when even
    `MOST_DEVICES` do not.
    """
    for tensor, pipeline in _groups(deployment.model):
        budget = deployment.budget(
            tensor_parallel=tensor, pipeline_parallel=pipeline, max_context_tokens=context_tokens
        )
        needed = budget.layout.sequence_blocks(context_tokens) * concurrency
        if budget.blocks >= needed:
            return budget
    return None


def _groups(model: ModelArchitecture) -> Iterator[tuple[int, int]]:
    devices = 1
    while devices <= MOST_DEVICES:
        tensor = min(devices, LARGEST_NODE)
        if model.attention_heads % tensor == 0:
            yield tensor, devices // tensor
        devices *= 2


def dtype_changes(deployment: Deployment) -> tuple[Change, ...]:
    """What other types of the cache and of the weights would give; none is chosen by itself."""
    found = []
    for kv_dtype in ("fp8_e4m3", "int8_per_token_head"):
        if change := _attempt(deployment, f"KV cache in {kv_dtype}", kv_dtype=kv_dtype):
            found.append(change)
    if deployment.model.quantization is None:
        for scheme in ("fp8", "int4-g128"):
            if change := _attempt(_quantized(deployment, scheme), f"weights in {scheme}"):
                found.append(change)
    return tuple(found)


def cheapest_changes(deployment: Deployment, most: int = 3) -> tuple[Change, ...]:
    """Up to `most` single changes that make the deployment fit, the cheapest first.

    Order of cost: settings that cost nothing, the cache's precision, the weights' precision, more
    devices. Nothing is listed when it fits already.
    """
    if deployment.budget().fit.fits:
        return ()
    found: list[Change] = []
    for change in _candidates(deployment):
        if change is not None and change.budget.fit.fits:
            found.append(change)
        if len(found) == most:
            break
    return tuple(found)


def _candidates(deployment: Deployment) -> Iterator[Change | None]:
    settings, model = deployment.settings, deployment.model
    present = deployment.budget()
    percent = HIGHEST_UTILIZATION_PERCENT
    if present.utilization_percent < percent and settings.kv_cache_bytes is None:
        yield _attempt(
            deployment, f"memory utilization {percent:g}%", memory_utilization_percent=percent
        )
    if (settings.max_sequences or present.max_sequences) > FEW_SEQUENCES:
        yield _attempt(
            deployment, f"at most {FEW_SEQUENCES} sequences", max_sequences=FEW_SEQUENCES
        )
    longest = largest_context(present, model, 1)
    longest -= longest % present.block_tokens
    if longest >= 256:
        yield _attempt(deployment, f"context of {longest} tokens", max_context_tokens=longest)
    yield _attempt(deployment, "KV cache in fp8_e4m3", kv_dtype="fp8_e4m3")
    if model.quantization is None:
        for scheme in ("fp8", "int4-g128"):
            yield _attempt(_quantized(deployment, scheme), f"weights in {scheme}")
    for tensor, pipeline in _groups(model):
        if tensor * pipeline > settings.tensor_parallel * settings.pipeline_parallel:
            words = f"{tensor * pipeline} devices"
            yield _attempt(deployment, words, tensor_parallel=tensor, pipeline_parallel=pipeline)
    memory = deployment.accelerator.memory_bytes or 0
    larger = memory + present.fit.shortfall_bytes * 100 // max(1, int(present.utilization_percent))
    grown = replace(deployment, accelerator=deployment.accelerator.with_memory(larger * 21 // 20))
    yield _attempt(grown, f"an accelerator of {gib(larger * 21 // 20)}")


def _attempt(deployment: Deployment, words: str, **changes: object) -> Change | None:
    """The change, unless the engine or the model can't be computed under it."""
    try:
        return Change(words, deployment.budget(**changes))
    except (BudgetUnknown, ModelNotUnderstood):
        return None


def _quantized(deployment: Deployment, scheme: str) -> Deployment:
    model = replace(deployment.model, quantization=parse_name(scheme), stored_bytes=None)
    return replace(deployment, model=model)
