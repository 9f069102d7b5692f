"""Learning from engines: what one reported replaces its prediction and improves those of its kin.

An observation says how far the lines were off together, not which one. The difference is shared among them
by how uncertain each was, and kept as a ratio of each line: so it carries over to other tensor-parallel
sizes, utilizations and lengths of the same model, card and engine, and to nothing else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvscaler.budget.fit import fitted
from kvscaler.budget.lines import Basis, BudgetLine, KVBudget, gib

TRUST = 0.5
"""Share of its interval that a line keeps after a sibling was observed."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an engine printed or exports of its pool on one rank; one of the three is enough."""

    kv_bytes: int | None = None
    blocks: int | None = None
    tokens: int | None = None

    def pool_bytes(self, budget: KVBudget) -> int:
        """The observed KV bytes. Raises `ValueError` when nothing, or nonsense, was observed."""
        if self.kv_bytes is not None:
            found = self.kv_bytes
        elif self.blocks is not None:
            found = self.blocks * budget.block_bytes + budget.layout.fixed_bytes
        elif self.tokens is not None:
            blocks = budget.layout.sequence_blocks(self.tokens)
            found = blocks * budget.block_bytes + budget.layout.fixed_bytes
        else:
            raise ValueError("an observation needs KV bytes, blocks or tokens")
        if not 0 <= found <= budget.device_bytes:
            raise ValueError(
                f"an observed pool of {found} bytes does not lie within the device's "
                f"{budget.device_bytes}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one observation taught about a (model, accelerator, engine)."""

    model_digest: str
    accelerator: str
    engine: str
    deviation: float
    """Observed KV bytes over predicted ones, minus 1."""
    ratios: Mapping[str, float]
    """By line: what it must have been, over what was predicted."""

    def fits(self, budget: KVBudget) -> bool:
        """Whether `budget` is of the same kind."""
        mine = (self.model_digest, self.accelerator, self.engine)
        return mine == (budget.model_digest, budget.accelerator, budget.engine)

    def applied_to(self, budget: KVBudget) -> KVBudget:
        """A sibling's budget with its lines corrected; others, and corrected ones, as they are."""
        if not self.fits(budget) or any(x.basis is Basis.OBSERVED for x in budget.lines):
            return budget
        lines = tuple(self._corrected(line) for line in budget.lines)
        return _with_lines(budget, lines, None)

    def _corrected(self, line: BudgetLine) -> BudgetLine:
        ratio = self.ratios.get(line.name, 1.0)
        size = round(line.bytes * ratio)
        if size == line.bytes:
            return line
        return BudgetLine(
            line.name,
            size,
            Basis.OBSERVED,
            max(0, size - int(TRUST * (line.bytes - line.low_bytes))),
            size + int(TRUST * (line.high_bytes - line.bytes)),
            f"{line.note}; corrected by a sibling's pool",
        )


def calibrate(budget: KVBudget, observation: Observation) -> tuple[KVBudget, Calibration]:
    """The budget as observed, and what was learned. Raises `ValueError` for what can't have been.

    The pool becomes the observed one; the lines take up the difference, each in proportion to the
    square of its uncertainty, so that they still add up. Calibrating the result again with the same
    observation changes nothing.
    """
    observed = observation.pool_bytes(budget)
    if observed > budget.usable_bytes:
        raise ValueError(
            f"an observed pool of {gib(observed)} is more than the {gib(budget.usable_bytes)} that may "
            f"be used at a utilization of {budget.utilization_percent:g}%"
        )
    difference = budget.kv_bytes - observed
    shares = _shares(budget.lines, difference)
    lines = tuple(
        replace(
            line,
            bytes=line.bytes + share,
            low_bytes=line.bytes + share,
            high_bytes=line.bytes + share,
            basis=Basis.OBSERVED if share else line.basis,
        )
        for line, share in zip(budget.lines, shares, strict=True)
    )
    ratios = {
        line.name: (line.bytes + share) / line.bytes
        for line, share in zip(budget.lines, shares, strict=True)
        if line.bytes
    }
    deviation = observed / budget.kv_bytes - 1 if budget.kv_bytes > 0 else math.inf
    learned = Calibration(budget.model_digest, budget.accelerator, budget.engine, deviation, ratios)
    return _with_lines(budget, lines, observation.blocks), learned


def _shares(lines: tuple[BudgetLine, ...], difference: int) -> list[int]:
    """`difference` divided among `lines`, none of which falls below zero.

    What a line can't give up is divided among the others; where none of them is uncertain, by size.
    """
    shares = [0] * len(lines)
    free = set(range(len(lines)))
    while difference and free:
        weights = {i: float(lines[i].high_bytes - lines[i].low_bytes) ** 2 for i in free}
        if not any(weights.values()):
            weights = {i: float(lines[i].bytes) for i in free}
        total = sum(weights.values()) or 1.0
        parts = {i: int(difference * weight / total) for i, weight in weights.items()}
        parts[max(weights, key=lambda i: weights[i])] += difference - sum(parts.values())
        spent = {i for i, part in parts.items() if lines[i].bytes + part < 0}
        if not spent:
            for i, part in parts.items():
                shares[i] = part
            break
        for i in spent:
            shares[i] = -lines[i].bytes
        difference += sum(lines[i].bytes for i in spent)
        free -= spent
    return shares


def _with_lines(budget: KVBudget, lines: tuple[BudgetLine, ...], blocks: int | None) -> KVBudget:
    kv_bytes = budget.usable_bytes - sum(line.bytes for line in lines)
    down = math.hypot(*(line.high_bytes - line.bytes for line in lines))
    up = math.hypot(*(line.bytes - line.low_bytes for line in lines))
    held = budget.layout.blocks_in(kv_bytes) if blocks is None else blocks
    changed = replace(
        budget,
        lines=lines,
        kv_bytes=kv_bytes,
        kv_low_bytes=int(kv_bytes - down),
        kv_high_bytes=int(kv_bytes + up),
        blocks=held,
        max_sequences=max(1, min(budget.max_sequences, held)),
    )
    fit, context = fitted(changed)
    return replace(changed, fit=fit, max_context_tokens=context)
