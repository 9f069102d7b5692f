"""How near the budget comes to what real engines printed, on public start-up logs.

    bench/kv_truth.py [--rows FILE --configs FILE] [--rows-only] [--list-worst N] [--check]

For each row: (a) tokens (or blocks, or concurrency) from the printed KV bytes; (b) KV bytes from card,
model and flags only; (b') the same with the printed activation peak and non-torch memory; (c) tokens from card,
model and flags; (d) what we refuse; (e) starts that failed. Beside each stands the formula that
calculators use: `memory x utilization - 2 x parameters`, then `2 x L x kv_heads x head_dim x 2 B`.
A source has one vote, the median of its rows. Rows that the data's README excludes are left out.

A row may lack a flag that its source's launch command states (weights kept in the host's memory,
data-parallel attention). Such flags stand in `kv_truth_facts.json` with where they are stated; `--rows-only`
leaves them out, and `detail.completed` lists the rows.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT, Figure, arguments, progress, report
from kv_truth_errors import Errors, figures_of, quantile, votes
from kv_truth_rows import (
    GIB,
    Case,
    ModelNotUnderstood,
    case_of,
    given_outright,
    launch_flags,
    left_out,
    read,
)
from kvscaler import hardware
from kvscaler.budget import BudgetUnknown, KVBudget, UnknownEngine, compute_budget
from kvscaler.budget.profiles import VllmProfile

DATA = ROOT.parent / "shared" / "kv_truth"


def printed_kv_bytes(case: Case) -> float | None:
    """KV bytes of one rank that the engine printed, or that its blocks amount to."""
    printed = case.row["printed"]
    if printed.get("kv_bytes") is not None:
        return float(printed["kv_bytes"])
    if printed.get("kv_gib") is not None:
        return float(printed["kv_gib"]) * GIB
    if printed.get("k_gib") is not None:
        return (float(printed["k_gib"]) + float(printed["v_gib"])) * GIB
    if printed.get("kv_mib") is not None:
        return float(printed["kv_mib"]) * (1 << 20)
    return None


def implied_kv_bytes(case: Case, budget: KVBudget) -> float | None:
    """Printed KV bytes; else blocks or, for uniform models, tokens times our bytes.

    V0 prints each worker's bytes and sizes its pool by the tightest rank, so there blocks and
    tokens come first.
    """
    printed = case.row["printed"]
    found = printed_kv_bytes(case)
    if found is not None and not driver_margin(case, budget):
        return found
    if printed.get("gpu_blocks") is not None:
        return float(printed["gpu_blocks"]) * budget.block_bytes
    if printed.get("kv_tokens") and case.model.uniform:
        return printed["kv_tokens"] / budget.block_tokens * budget.block_bytes
    return None


def naive_tokens(case: Case, kv_bytes: float) -> float:
    """`kv bytes / (2 x layers x kv_heads x head_dim x 2)` over all ranks."""
    facts = case.model.facts
    layers, heads = int(facts["num_hidden_layers"] or 1), int(facts["num_key_value_heads"] or 1)
    per_token = 2 * layers * heads * int(facts["head_dim"] or 1) * 2
    return kv_bytes * (case.row.get("tp") or 1) / per_token


def naive_kv_bytes(case: Case, budget: KVBudget) -> float:
    """`memory x utilization - 2 x parameters`, per rank."""
    ranks = (case.row.get("tp") or 1) * (case.row.get("pp") or 1)
    usable = budget.device_bytes * budget.utilization_percent / 100
    return usable - 2 * case.model.parameters / ranks


def capacity(case: Case, budget: KVBudget, kv_bytes: float) -> tuple[str, float, float] | None:
    """What the row printed of the pool's size, and our figure for `kv_bytes`: name, theirs, ours."""
    printed, row = case.row["printed"], case.row
    layout = budget.layout
    blocks = layout.blocks_in(round(kv_bytes))
    if printed.get("gpu_blocks") is not None:
        return "blocks", float(printed["gpu_blocks"]), float(blocks)
    context = row.get("max_model_len") or case.model.max_context_tokens
    tokens = printed.get("max_total_num_tokens") or printed.get("kv_tokens")
    if tokens is not None:
        return "tokens", float(tokens), float(case.profile.printed_tokens(layout, blocks, context))
    if printed.get("max_concurrency") is not None:
        theirs = float(printed["max_concurrency"]) / (row.get("dp") or 1)
        return "concurrency", theirs, layout.concurrency(blocks, context)
    return None


def driver_margin(case: Case, budget: KVBudget) -> int:
    """V0 prints a worker's KV bytes; its pool is sized by the driver, which samples besides."""
    if not isinstance(case.profile, VllmProfile):
        return 0
    device = case.accelerator or hardware.find("h100")
    resolved = case.profile.resolve(case.model, device, case.settings)
    return case.profile.driver_margin_bytes(case.model, resolved)


@dataclass
class Results:
    """All errors by figure."""

    given: dict[str, Errors] = field(default_factory=lambda: defaultdict(Errors))
    device: Errors = field(default_factory=Errors)
    stated: Errors = field(default_factory=Errors)
    overheads: Errors = field(default_factory=Errors)
    end: Errors = field(default_factory=Errors)
    weights: Errors = field(default_factory=Errors)
    inside: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    width: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    refused: list[tuple[str, str]] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    calls: list[dict[str, Any]] = field(default_factory=list)
    false_calls: list[str] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    completed: list[str] = field(default_factory=list)


def measure(
    rows: Iterable[Mapping[str, Any]], configs: Mapping[str, Any], rows_only: bool = False
) -> Results:
    """Predict every row that counts."""
    results = Results()
    for row in rows:
        config = configs.get(row.get("config_key") or "")
        reason = left_out(row, config)
        if reason is not None:
            results.skipped[reason] += 1
            continue
        assert config is not None
        results.sources.add(row["source"])
        try:
            case = case_of(row, config, rows_only=rows_only)
            budget = budget_of(case)
        except (ModelNotUnderstood, UnknownEngine, BudgetUnknown) as error:
            results.refused.append((row["id"], str(error)[:160]))
            continue
        if launch_flags(row) and not rows_only:
            results.completed.append(row["id"])
        _given_kv(case, budget, results)
        if case.accelerator is not None:
            _given_card(case, budget, results)
        if row.get("error_case"):
            _error_row(case, budget, results)
    return results


def budget_of(case: Case) -> KVBudget:
    """The budget from card, model and flags; without a card that of a large one (for its layout)."""
    accelerator = case.accelerator or hardware.find("h100")
    return compute_budget(case.model, accelerator, case.profile, case.settings)


def _given_kv(case: Case, budget: KVBudget, results: Results) -> None:
    kv_bytes = printed_kv_bytes(case)
    if kv_bytes is None or kv_bytes <= 0 or case.row.get("error_case") == "kv_needed>available":
        return
    found = capacity(case, budget, kv_bytes - driver_margin(case, budget))
    if found is None:
        return
    kind, theirs, ours = found
    usual = naive_tokens(case, kv_bytes)
    if kind == "blocks":
        usual /= budget.block_tokens
    elif kind == "concurrency":
        usual /= case.row.get("max_model_len") or case.model.max_context_tokens
    note = f"{kind} {theirs:g} predicted {ours:g}"
    for name in ("all", case.row["engine"]):
        results.given[name].add(case, ours / theirs - 1, usual / theirs - 1, note)


def _given_card(case: Case, budget: KVBudget, results: Results) -> None:
    printed = case.row["printed"]
    weights = budget.line("weights").bytes
    if printed.get("weights_gib") and case.row["engine"] in ("vllm", "sglang"):
        theirs = printed["weights_gib"] * GIB
        note = f"{printed['weights_gib']} GiB predicted {weights / GIB:.2f}"
        results.weights.add(case, weights / theirs - 1, None, note)
    kv_bytes = implied_kv_bytes(case, budget)
    if not case.row.get("error_case") and not budget.fit.fits:
        results.false_calls.append(case.row["id"])
    if kv_bytes is None or given_outright(case.row) is not None:
        return
    ours, usual = float(budget.kv_bytes), naive_kv_bytes(case, budget)
    low, high = budget.kv_low_bytes / GIB, budget.kv_high_bytes / GIB
    note = f"{kv_bytes / GIB:.2f} GiB predicted {ours / GIB:.2f} [{low:.2f}, {high:.2f}] "
    note += f"({_parts(budget)})"
    device = budget.device_bytes
    results.device.add(case, (ours - kv_bytes) / device, (usual - kv_bytes) / device, note)
    source = case.row["source"]
    results.inside[source].append(float(budget.kv_low_bytes <= kv_bytes <= budget.kv_high_bytes))
    if kv_bytes <= 0:
        return
    half = (budget.kv_high_bytes - budget.kv_low_bytes) / 2
    if case.stated:
        results.stated.add(case, ours / kv_bytes - 1, usual / kv_bytes - 1, note)
        results.width[source].append(half / kv_bytes)
        if "activation_peak_gib" in printed and "non_torch_gib" in printed:
            _overheads(case, budget, results)
    found = capacity(case, budget, ours)
    if found is not None and case.stated:
        kind, theirs, predicted = found
        usual_tokens = naive_tokens(case, usual)
        if kind == "blocks":
            usual_tokens /= budget.block_tokens
        end = f"{kind} {theirs:g} predicted {predicted:g}"
        results.end.add(case, predicted / theirs - 1, usual_tokens / theirs - 1, end)


def _parts(budget: KVBudget) -> str:
    return ", ".join(f"{line.name} {line.bytes / GIB:.2f}" for line in budget.lines)


def _overheads(case: Case, budget: KVBudget, results: Results) -> None:
    """With the printed activation peak and non-torch memory in place of ours, on the same rank."""
    printed = case.row["printed"]
    kv_bytes = printed_kv_bytes(case)
    if kv_bytes is None:
        return
    ours = {line.name: line.bytes for line in budget.lines}
    stated = (printed["activation_peak_gib"] + printed["non_torch_gib"]) * GIB
    kept = ours.get("activations", 0) + ours.get("non-torch", 0)
    predicted = budget.kv_bytes + kept - stated
    note = f"{kv_bytes / GIB:.2f} GiB predicted {predicted / GIB:.2f}"
    results.overheads.add(case, predicted / kv_bytes - 1, None, note)


def _error_row(case: Case, budget: KVBudget, results: Results) -> None:
    """Whether we would have said that it does not fit, from card or from the printed KV bytes."""
    printed = case.row["printed"]
    available = printed_kv_bytes(case)
    if case.accelerator is not None and case.row.get("gpu"):
        called = not budget.fit.fits
    else:
        assert available is not None or printed.get("gpu_blocks") is not None
        blocks = printed.get("gpu_blocks")
        room = available if available is not None else float(blocks or 0) * budget.block_bytes
        called = budget.fit.needed_bytes > room
    call: dict[str, Any] = {"id": case.row["id"], "called": called}
    if printed.get("kv_needed_gib"):
        call["needed_ratio"] = budget.fit.needed_bytes / (printed["kv_needed_gib"] * GIB)
    results.calls.append(call)


def _figures(results: Results) -> list[Figure]:
    found: list[Figure] = []
    for name, errors in sorted(results.given.items()):
        bounds = {}
        if name == "all":
            bounds = {"median": ("<= 0.001", None), "p95": ("<= 0.005", "<= 0.003")}
        found += figures_of(f"tokens_given_kv_{name}", errors, bounds)
    found += figures_of(
        "kv_given_card_of_device",
        results.device,
        {"median": ("<= 0.01", None), "p90": ("<= 0.03", None)},
    )
    found += figures_of(
        "kv_given_card_of_kv",
        results.stated,
        {"median": ("<= 0.02", "<= 0.015"), "p90": ("<= 0.06", None)},
    )
    found += figures_of(
        "kv_given_overheads",
        results.overheads,
        {"median": ("<= 0.005", None), "p90": ("<= 0.015", None)},
    )
    found += figures_of("tokens_end_to_end", results.end, {"median": ("<= 0.025", "<= 0.02")})
    found += figures_of("weights", results.weights, {})
    found += _intervals(results) + _refusals(results)
    return found


def _intervals(results: Results) -> list[Figure]:
    inside = [statistics.mean(found) for found in results.inside.values()]
    widths = votes(results.width)
    share = round(statistics.mean(inside), 4) if inside else None
    median = round(statistics.median(widths), 4) if widths else None
    p90 = quantile(widths, 0.9)
    return [
        Figure("kv_given_card_interval_covers", share, "1", ">= 0.85"),
        Figure("kv_given_card_interval_half_width_median", median, "1", "<= 0.03"),
        Figure(
            "kv_given_card_interval_half_width_p90",
            None if p90 is None else round(p90, 4),
            "1",
            "<= 0.08",
        ),
    ]


def _refusals(results: Results) -> list[Figure]:
    total = len(results.sources)
    refused = len({name for name, _ in results.refused})
    share = round(refused / max(1, total), 4)
    called = [call["called"] for call in results.calls]
    ratios = [call["needed_ratio"] for call in results.calls if "needed_ratio" in call]
    spread = max((abs(ratio - 1) for ratio in ratios), default=None)
    return [
        Figure("refused_share", share, "1", "<= 0.03"),
        Figure(
            "error_rows_called",
            round(sum(called) / len(called), 4) if called else None,
            "1",
            ">= 1",
            why=f"{sum(called)} of {len(called)}",
        ),
        Figure("error_rows_needed_bytes_worst", None if spread is None else round(spread, 5)),
        Figure("good_starts_called_failures", len(results.false_calls), "rows", "<= 0"),
    ]


def _detail(results: Results, worst: int) -> dict[str, Any]:
    def listed(errors: Errors) -> list[dict[str, Any]]:
        rows = sorted(errors.rows, key=lambda item: -abs(item[0]))[:worst]
        return [{"id": name, "error": round(error, 5), "note": note} for error, name, note in rows]

    pick: Callable[[str], Errors] = lambda name: results.given[name]  # noqa: E731
    return {
        "left_out": dict(results.skipped),
        "completed": results.completed,
        "refused": [{"id": name, "why": why} for name, why in results.refused],
        "error_rows": results.calls,
        "good_starts_called_failures": results.false_calls,
        "worst": {
            "tokens_given_kv": listed(pick("all")),
            "kv_given_card_of_device": listed(results.device),
            "kv_given_card_of_kv": listed(results.stated),
            "kv_given_overheads": listed(results.overheads),
            "tokens_end_to_end": listed(results.end),
            "weights": listed(results.weights),
        },
    }


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=Path, default=DATA / "rows.jsonl")
    parser.add_argument("--configs", type=Path, default=DATA / "model_configs.jsonl")
    parser.add_argument("--rows-only", action="store_true")
    parser.add_argument("--list-worst", type=int, default=0, metavar="N")
    options = parser.parse_args()
    if not options.rows.exists() or not options.configs.exists():
        progress(f"kv_truth: no data at {options.rows}; give --rows and --configs")
        return report("kv_truth", [], {"skipped": f"no {options.rows}"})
    configs = {config["config_key"]: config for config in read(options.configs)}
    results = measure(read(options.rows), configs, options.rows_only)
    detail = _detail(results, options.list_worst)
    return report("kv_truth", _figures(results), detail, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
