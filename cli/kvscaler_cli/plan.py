"""`kvscaler plan`: what a replica of this model on this card with this engine can hold."""

import json
from pathlib import Path
from typing import Any

import click
from kvscaler import hardware
from kvscaler.budget import (
    AdmissionPolicy,
    BudgetUnknown,
    EngineSettings,
    Footprint,
    KVBudget,
    UnknownEngine,
    admission_limits,
    compute_budget,
    gib,
    profile_for,
)
from kvscaler.models import (
    ModelArchitecture,
    ModelNotUnderstood,
    UnknownModel,
    canonical_dtype,
    catalogue,
)

from kvscaler_cli.output import FORMATS, format_table, print_document
from kvscaler_cli.quantities import MEMORY

EXAMPLES = """
\b
Examples:
  # How much KV cache does Llama-3.1-8B leave on an H100 under vLLM?
  kvscaler plan llama-3.1-8b --accelerator h100 --engine vllm

\b
  # How many chats of 1,200 prompt and 300 output tokens fit on a 4090?
  kvscaler plan llama-3.1-8b --accelerator rtx-4090 --max-context 8192 \\
    --prompt-tokens 1200 --output-tokens 300

\b
  # A model that is not in the catalogue, from its own config.json, for a script
  kvscaler plan ./config.json --accelerator l40s -o json
"""


@click.command(epilog=EXAMPLES)
@click.argument("model")
@click.option("--accelerator", required=True, help="Name or alias: h100, l40s, rtx-4090, cpu.")
@click.option("--memory", type=MEMORY, help="Memory of the device, or a CPU's limit: 80Gi.")
@click.option("--engine", default="Kvscaler", show_default=True, help="Kvscaler or VLLM.")
@click.option("--utilization", type=click.FloatRange(1, 100), help="Percent of memory to use.")
@click.option("--max-context", type=click.IntRange(1), help="Longest request in tokens.")
@click.option("--max-sequences", type=click.IntRange(1), help="Sequences at once.")
@click.option("--step-tokens", type=click.IntRange(1), help="Tokens computed in one step.")
@click.option("--block-tokens", type=click.IntRange(1), help="Tokens in one KV block.")
@click.option("--compute-dtype", help="Element type of weights and activations.")
@click.option("--kv-dtype", help="Element type of the KV cache.")
@click.option("--prompt-tokens", type=click.IntRange(1), help="Prompt of a typical request.")
@click.option("--output-tokens", type=click.IntRange(0), help="Output of a typical request.")
@click.option("-o", "--output", type=click.Choice(FORMATS), default="table", show_default=True)
@click.pass_context
def plan(
    context: click.Context,
    model: str,
    accelerator: str,
    memory: int | None,
    engine: str,
    utilization: float | None,
    max_context: int | None,
    max_sequences: int | None,
    step_tokens: int | None,
    block_tokens: int | None,
    compute_dtype: str | None,
    kv_dtype: str | None,
    prompt_tokens: int | None,
    output_tokens: int | None,
    output: str,
) -> None:
    """Show the memory budget of one replica of MODEL, and the requests that it holds.

    MODEL is a name or URI of the catalogue, or the path of a config.json (or of its folder).
    The exit code is 1 when the model does not fit.
    """
    try:
        architecture = _architecture(model)
        device = hardware.find(accelerator)
        if memory is not None:
            device = device.with_memory(memory)
        budget = compute_budget(
            architecture,
            device,
            profile_for(engine, device),
            EngineSettings(
                memory_utilization_percent=utilization,
                max_context_tokens=max_context,
                max_sequences=max_sequences,
                step_tokens=step_tokens,
                block_tokens=block_tokens,
                compute_dtype=canonical_dtype(compute_dtype) if compute_dtype else "Auto",
                kv_dtype=canonical_dtype(kv_dtype) if kv_dtype else "Auto",
            ),
        )
    except (
        ModelNotUnderstood,
        UnknownModel,
        UnknownEngine,
        BudgetUnknown,
        hardware.UnknownAccelerator,
    ) as error:
        raise click.UsageError(str(error)) from error
    request = None
    if prompt_tokens is not None:
        request = _request(budget, prompt_tokens, output_tokens or 0)
    elif output_tokens is not None:
        raise click.UsageError("--output-tokens needs --prompt-tokens")
    if output == "table":
        click.echo(_table(model, budget, request))
    else:
        print_document(_document(model, budget, request), output)
    if not budget.fit.fits:
        context.exit(1)


def _architecture(model: str) -> ModelArchitecture:
    path = Path(model)
    if not path.exists():
        return catalogue.find(model).architecture
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{file} can't be read as a config.json: {error}") from error
    if not isinstance(config, dict):
        raise click.UsageError(f"{file} holds a {type(config).__name__}, not an object")
    return ModelArchitecture.from_config(config)


def _request(budget: KVBudget, prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    blocks = Footprint(budget.block_tokens, budget.layout).blocks(prompt_tokens, output_tokens)
    return {
        "promptTokens": prompt_tokens,
        "outputTokens": output_tokens,
        "blocks": blocks,
        "concurrent": min(budget.max_sequences, budget.blocks // blocks) if blocks else 0,
    }


def _document(model: str, budget: KVBudget, request: dict[str, int] | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "model": model,
        "modelDigest": budget.model_digest,
        "accelerator": budget.accelerator,
        "engine": budget.engine,
        "deviceBytes": budget.device_bytes,
        "utilizationPercent": budget.utilization_percent,
        "usableBytes": budget.usable_bytes,
        "lines": [
            {
                "name": line.name,
                "bytes": line.bytes,
                "lowBytes": line.low_bytes,
                "highBytes": line.high_bytes,
                "basis": line.basis.value,
                "note": line.note,
            }
            for line in budget.lines
        ],
        "overheadBytes": budget.overhead_bytes,
        "kvBytes": budget.kv_bytes,
        "computeDtype": budget.compute_dtype,
        "kvDtype": budget.kv_dtype,
        "blockTokens": budget.block_tokens,
        "blockBytes": budget.block_bytes,
        "blocks": budget.blocks,
        "poolBytes": budget.pool_bytes,
        "poolTokens": budget.pool_tokens,
        "totalBytes": budget.total_bytes,
        "maxContextTokens": budget.max_context_tokens,
        "maxSequences": budget.max_sequences,
        "stepTokens": budget.step_tokens,
        "fits": budget.fit.fits,
        "message": budget.fit.message,
    }
    if budget.blocks:
        limits = admission_limits(budget, AdmissionPolicy())
        document["limits"] = {"hash": limits.content_hash, **limits.model_dump(mode="json")}
    if request is not None:
        document["request"] = request
    return document


def _table(model: str, budget: KVBudget, request: dict[str, int] | None) -> str:
    def share(size_bytes: int) -> str:
        return f"{100 * size_bytes / budget.device_bytes:.1f}%"

    unused = budget.device_bytes - budget.usable_bytes
    rows = [
        [line.name, gib(line.bytes), share(line.bytes), line.basis.value, line.note]
        for line in budget.lines
    ]
    rows.append(
        ["kv cache", gib(budget.kv_bytes), share(budget.kv_bytes), "computed", _pool_note(budget)]
    )
    rows.append(
        ["left unused", gib(unused), share(unused), "stated",
         f"utilization {budget.utilization_percent:g}%"]
    )  # fmt: skip
    head = f"{model} on {budget.accelerator} ({gib(budget.device_bytes)}) with {budget.engine}"
    parts = [head, "", format_table(["LINE", "SIZE", "SHARE", "BASIS", "NOTE"], rows, {1, 2})]
    if not budget.fit.fits:
        parts += ["", f"It {budget.fit.message}."]
        return "\n".join(parts)
    facts = [
        ["KV pool", f"{budget.blocks:,} blocks of {budget.block_tokens} tokens"
                    f" = {budget.pool_tokens:,} tokens"],
        ["Longest request", f"{budget.max_context_tokens:,} tokens"],
        ["Longest requests at once",
         f"{budget.pool_tokens / budget.max_context_tokens:.2f}"],
        ["Sequences at once", f"at most {budget.max_sequences:,}"],
    ]  # fmt: skip
    if request is not None:
        facts.append(
            [
                f"Requests of {request['promptTokens']:,} + {request['outputTokens']:,} tokens",
                f"{request['concurrent']:,} at once, {request['blocks']:,} blocks each",
            ]
        )
    width = max(len(name) for name, _ in facts)
    parts += ["", *[f"{name.ljust(width)}   {value}" for name, value in facts]]
    return "\n".join(parts)


def _pool_note(budget: KVBudget) -> str:
    return f"{budget.block_bytes:,} B a block ({budget.kv_dtype})"
