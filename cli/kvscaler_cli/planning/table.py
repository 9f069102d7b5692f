"""The answer for people: a picture of the card's memory, the answer in a sentence, and what to know."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from kvscaler.budget import Change, Deployment, gib

from kvscaler_cli.output import format_table
from kvscaler_cli.planning.answer import Answer
from kvscaler_cli.planning.bars import Marks, Scale
from kvscaler_cli.planning.flags import flags_of
from kvscaler_cli.planning.warnings import warnings_of

NARROWEST_BAR = 24
WIDEST_BAR = 48
NOTE_COLUMNS = 44
"""Room for notes; a terminal that has less shows none, `-o wide` always does."""


@dataclass(frozen=True, slots=True)
class Paper:
    """What the output is drawn on."""

    columns: int
    marks: Marks
    wide: bool = False


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    start_bytes: int
    bytes: int
    basis: str
    note: str
    mark: str
    range: str = ""


def table(answer: Answer, paper: Paper) -> str:
    """The whole output, its lines at most `paper.columns` wide but for `wide`."""
    parts = [_title(answer, paper), _picture(answer, paper), _wrap(sentence(answer), paper)]
    if facts := _facts(answer, paper):
        parts.append(facts)
    if not answer.holds and answer.changes:
        words = "What would make it fit, the cheapest first:"
        if answer.budget.fit.fits:
            words = "What would hold them, the cheapest first:"
        parts.append(f"{words}\n{_changes(answer, answer.changes, paper)}")
    elif not answer.holds:
        parts.append("No single change that is known here would make it so.")
    elif answer.alternatives:
        words = "What smaller types would give (none is chosen by itself):"
        parts.append(f"{_wrap(words, paper)}\n{_changes(answer, answer.alternatives, paper)}")
    if warnings := warnings_of(answer):
        parts.append("\n".join(_wrap(f"! {text}.", paper, "  ") for text in warnings))
    return "\n\n".join(parts)


def _title(answer: Answer, paper: Paper) -> str:
    question, budget = answer.question, answer.budget
    devices = answer.deployment.devices
    many = f"{devices} x " if devices > 1 else ""
    return _wrap(
        f"{question.model_name} on {many}{budget.accelerator} ({gib(budget.device_bytes)}) "
        f"with {question.engine_words}",
        paper,
    )


def _picture(answer: Answer, paper: Paper) -> str:
    rows = list(_rows(answer, paper.marks))
    total = max(answer.budget.device_bytes, *(row.start_bytes + row.bytes for row in rows))
    head = "LINE" if answer.deployment.devices == 1 else "EACH DEVICE"
    headers, right = [head, "SIZE", "SHARE", "BASIS"], {1, 2}
    cells = [
        [row.name, gib(row.bytes), _share(row.bytes, answer.budget.device_bytes), row.basis]
        for row in rows
    ]
    width = sum(max(len(x[i]) for x in (headers, *cells)) for i in range(4)) + 12
    notes = paper.wide or paper.columns >= width + NARROWEST_BAR + 3 + NOTE_COLUMNS
    room = paper.columns - width - (NOTE_COLUMNS + 3 if notes else 0)
    scale = Scale(total, answer.budget.device_bytes, min(WIDEST_BAR, max(NARROWEST_BAR, room)))
    headers.append(scale.ruler(gib(answer.budget.device_bytes)))
    for row, line in zip(rows, cells, strict=True):
        line.append(scale.bar(row.start_bytes, row.bytes, row.mark, paper.marks))
        if paper.wide:
            line += [row.range, row.note]
        elif notes:
            line.append(textwrap.shorten(row.note, NOTE_COLUMNS, placeholder=" …"))
    headers += ["RANGE", "NOTE"] if paper.wide else ["NOTE"] if notes else []
    return format_table(headers, cells, right)


def _share(size_bytes: int, device_bytes: int) -> str:
    share = size_bytes / device_bytes
    return f"{share:.1%}" if share < 10 else f"{share:,.0f}x"


def _rows(answer: Answer, marks: Marks) -> Iterator[_Row]:
    budget, settings = answer.budget, answer.deployment.settings
    at = 0
    for line in budget.lines:
        span = f"{gib(line.low_bytes)} to {gib(line.high_bytes)}"
        exact = line.low_bytes == line.high_bytes
        yield _Row(
            line.name, at, line.bytes, line.basis.value, line.note, marks.used,
            "" if exact else span,
        )  # fmt: skip
        at += line.bytes
    stated = settings.kv_cache_bytes is not None
    observed = answer.question.observation is not None
    pool = max(0, budget.kv_bytes)
    span = f"{gib(max(0, budget.kv_low_bytes))} to {gib(max(0, budget.kv_high_bytes))}"
    yield _Row(
        "kv cache", at, pool, "stated" if stated else "observed" if observed else "computed",
        f"{budget.block_bytes:,} B a block ({budget.kv_dtype})", marks.pool,
        "" if budget.kv_low_bytes == budget.kv_high_bytes else span,
    )  # fmt: skip
    if budget.unused_bytes > 0:
        asked = settings.memory_utilization_percent is not None
        yield _Row(
            "left unused", budget.usable_bytes, budget.unused_bytes,
            "stated" if asked or stated else "default",
            f"memory utilization {budget.utilization_percent:g}%", marks.free,
        )  # fmt: skip
    if not budget.fit.fits:
        yield _Row(
            "missing", budget.usable_bytes, budget.fit.shortfall_bytes, "computed",
            "for one request of the longest context", marks.missing,
        )  # fmt: skip


def sentence(answer: Answer) -> str:
    """The answer in one sentence, or two."""
    budget, demand = answer.budget, answer.question.demand
    if not budget.fit.fits:
        return _misfit(answer)
    pools = answer.deployment.pools
    longest = budget.layout.concurrency(budget.blocks, budget.max_context_tokens) * pools
    whole = f"{longest:,.2f} requests of the longest context ({budget.max_context_tokens:,} tokens)"
    if demand is None:
        wanted = answer.question.concurrency
        own = answer.deployment.model.max_context_tokens
        if wanted is None and answer.pool_bound_context:
            return (
                f"It fits, but the longest request that it holds has {budget.max_context_tokens:,} of "
                f"the model's {own:,} tokens."
            )
        if wanted is None:
            return f"It fits, and holds {whole} at once."
        if answer.context_at_concurrency:
            return (
                f"With {wanted:,} requests at once, each may have "
                f"{answer.context_at_concurrency:,} tokens."
            )
        most = pools * budget.max_sequences
        return f"No: it runs at most {most:,} of the {wanted:,} requests at once."
    lengths = f"{demand.prompt_tokens:,}"
    lengths += f" + {demand.output_tokens:,} tokens" if demand.output_tokens else " tokens"
    if answer.question.concurrency is None:
        return f"It fits, and holds {answer.held:,} requests of {lengths} at once."
    verdict = "Yes: it" if answer.holds else "No: it"
    count = f"{answer.held:,} of the {demand.concurrency:,}" if not answer.holds else (
        f"the {demand.concurrency:,}"
    )  # fmt: skip
    more = f", and up to {answer.held:,}" if answer.holds else ""
    return f"{verdict} holds {count} requests of {lengths} at once{more}."


def _misfit(answer: Answer) -> str:
    budget = answer.budget
    missing = f"It does not fit: {gib(budget.fit.shortfall_bytes)} are missing."
    usable = f"{gib(budget.usable_bytes)} that may be used"
    if budget.usable_bytes > budget.device_bytes:
        return (
            f"{missing} Weights and overhead take {gib(budget.overhead_bytes)} beside "
            f"{gib(budget.kv_bytes)} of KV cache, and the device has {gib(budget.device_bytes)}."
        )
    if budget.kv_bytes <= 0:
        return f"{missing} Weights and overhead alone take {gib(budget.overhead_bytes)} of the {usable}."
    return (
        f"{missing} One request of {budget.fit.needed_tokens:,} tokens needs {gib(budget.fit.needed_bytes)} of KV cache, "
        f"and {gib(budget.kv_bytes)} of the {usable} are left after weights and overhead."
    )


def _facts(answer: Answer, paper: Paper) -> str:
    rows = list(_fact_rows(answer))
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(
        textwrap.fill(
            f"{name.ljust(width)}   {value}",
            max(40, paper.columns),
            subsequent_indent=" " * (width + 3),
            break_on_hyphens=False,
        )
        for name, value in rows
    )


def _fact_rows(answer: Answer) -> Iterator[tuple[str, str]]:
    budget, demand, deployment = answer.budget, answer.question.demand, answer.deployment
    for text in answer.question.overrides:
        yield "Overridden", text
    if answer.question.observation is not None:
        before = answer.predicted.kv_bytes
        change = budget.kv_bytes / before - 1 if before > 0 else 0.0
        yield (
            "Observed",
            f"{gib(budget.kv_bytes)} of KV cache where {gib(before)} were predicted ({change:+.1%})",
        )
    elif budget.kv_low_bytes != budget.kv_high_bytes and budget.kv_bytes > 0:
        low, high = max(0, budget.kv_low_bytes), max(0, budget.kv_high_bytes)
        yield "Expected", f"{gib(low)} to {gib(high)} of KV cache"
    if budget.fit.fits:
        groups = len(budget.layout.groups)
        pools = f"{deployment.pools} x " if deployment.pools > 1 else ""
        pool = f"{pools}{budget.blocks:,} blocks"
        block = f"{_tokens(budget.block_tokens)}, {gib(budget.block_bytes)} ({budget.kv_dtype})"
        if groups == 1:
            pool += f" = {pools}{budget.pool_tokens:,} tokens"
        else:
            block += f", in each of {groups} groups of layers"
        yield "KV pool", pool
        yield "KV block", block
        each = budget.layout.concurrency(budget.blocks, budget.max_context_tokens)
        yield (
            "Longest request",
            f"{budget.max_context_tokens:,} tokens, {each * deployment.pools:,.2f} at once",
        )
    if demand is not None and budget.fit.fits:
        yield "Each request", f"{answer.request_blocks:,} blocks for {demand.tokens:,} tokens"
    if answer.context_at_concurrency:
        yield (
            f"{answer.question.concurrency:,} at once",
            f"up to {answer.context_at_concurrency:,} tokens each",
        )
    if budget.fit.fits:
        yield "Sequences", f"at most {deployment.pools * budget.max_sequences:,} at once"
    if answer.fleet is not None:
        yield "Fewest devices", _fleet_words(answer)
    if answer.decode_floor_seconds is not None:
        yield (
            "Decode step",
            f"{1e3 * answer.decode_floor_seconds:.1f} ms at least with {answer.running:,} at once "
            "(weights and KV read once)",
        )


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


def _fleet_words(answer: Answer) -> str:
    fleet, group = answer.fleet, answer.group
    if fleet is None:
        return "no number of them holds one such request"
    if fleet.devices == 1:
        return "1"
    single = fleet if fleet.replicas == 1 else group
    words = []
    if fleet.replicas > 1:
        each = fleet.deployment.devices
        words.append(
            f"{fleet.devices} as {fleet.replicas} replicas of {each}, {fleet.held_each:,} requests each"
        )
    if single is not None:
        shape = " ".join(flags_of(_shape(single.deployment)))
        words.append(f"{single.devices} as one replica ({shape})")
    return "; ".join(words)


def _shape(deployment: Deployment) -> dict[str, object]:
    settings = deployment.settings
    sizes = {
        "tensor_parallel": settings.tensor_parallel,
        "pipeline_parallel": settings.pipeline_parallel,
    }
    return {name: size for name, size in sizes.items() if size > 1}


def _changes(answer: Answer, changes: tuple[Change, ...], paper: Paper) -> str:
    """A row for each change, its flags one below the other where they need more room."""
    demand, concurrency = answer.question.demand, answer.question.concurrency
    headers = ["DEVICES", "KV CACHE", "CONTEXT", "AT ONCE", "GAIN"]
    if demand is not None:
        headers.remove("CONTEXT")
    elif concurrency is not None:
        headers[2:4] = [f"EACH OF {concurrency:,}"]
    gains = [answer.gain(change) if answer.holds else None for change in changes]
    if not any(gains):
        headers.remove("GAIN")
    if all(change.devices == answer.deployment.devices for change in changes):
        headers.remove("DEVICES")
    values = []
    for change, gain in zip(changes, gains, strict=True):
        count = answer.at_once(change)
        shown = {
            "DEVICES": str(change.devices),
            "KV CACHE": gib(change.budget.kv_bytes),
            "CONTEXT": f"{change.budget.max_context_tokens:,}",
            "AT ONCE": f"{count:,.0f}" if demand else f"{count:,.2f}",
            f"EACH OF {concurrency or 0:,}": f"{answer.context_after(change) or 0:,}",
            "GAIN": f"{gain:.2f}x" if gain else "",
        }
        values.append([shown[name] for name in headers])
    others = sum(
        max(len(name), *(len(row[i]) for row in values)) + 3 for i, name in enumerate(headers)
    )
    rows = []
    for change, row in zip(changes, values, strict=True):
        words = flags_of(change.settings)
        if change.replicas > 1:
            words += (f"in {change.replicas} replicas",)
        first, *rest = _packed(words, paper.columns - others)
        rows.append([first, *row])
        rows += [[f"  {line}", *[""] * len(row)] for line in rest]
    return format_table(["CHANGE", *headers], rows, range(1, len(headers) + 1))


def _packed(words: tuple[str, ...], room: int) -> list[str]:
    """`words` in lines of at most `room` where that is possible, none broken."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word) <= room - 2:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines or [""]


def _wrap(text: str, paper: Paper, indent: str = "") -> str:
    return textwrap.fill(
        text,
        max(40, paper.columns),
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
