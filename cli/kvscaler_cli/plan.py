"""`kvscaler plan`: what a replica of this model on this card with this engine can hold."""

import shutil
import sys
from typing import Any

import click

from kvscaler_cli.output import FORMATS, print_document
from kvscaler_cli.planning.answer import answer_of
from kvscaler_cli.planning.bars import marks_for
from kvscaler_cli.planning.document import document
from kvscaler_cli.planning.question import question_of
from kvscaler_cli.planning.table import Paper, table
from kvscaler_cli.quantities import BANDWIDTH, COUNT, COUNT_OR_NONE, MEMORY, OBSERVATION, SHARE

EXAMPLES = """
\b
Examples:
  # How much KV cache does Llama-3.1-8B leave on an H100 under vLLM?
  kvscaler plan llama-3.1-8b --accelerator h100 --engine vllm

\b
  # How many chats of 1,200 prompt and 300 output tokens run at once?
  kvscaler plan llama-3.1-8b --accelerator h100 --engine vllm \\
    --prompt-tokens 1200 --output-tokens 300

\b
  # Do 500 of them? Exits 1 when not, and says on how many devices
  kvscaler plan llama-3.1-8b --accelerator h100 --engine vllm \\
    --prompt-tokens 1200 --output-tokens 300 --concurrency 500

\b
  # How long may each be when 64 run at once, with the cache in fp8?
  kvscaler plan qwen3-32b --accelerator h100 --engine vllm@0.20.0 \\
    --tensor-parallel 2 --kv-dtype fp8 --concurrency 64

\b
  # A model of your own on a card of your own, for a script
  kvscaler plan ./config.json --memory 79.3GiB --engine sglang -o json

\b
  # The engine printed what it has: correct the plan, and all that follows
  kvscaler plan llama-3.1-8b --accelerator h100 --engine vllm@0.20.0 \\
    --observed 51.38GiB --concurrency 100

\b
Exit codes: 0 it fits and holds what was asked, 1 it does not,
            2 the question can't be answered as it was put.
"""


@click.command(epilog=EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("model_argument", metavar="[MODEL]", required=False)
@click.option("--model", metavar="FILE|NAME", help="The same as MODEL.")
@click.option("--accelerator", metavar="NAME", help="Name or alias: h100, l40s, rtx-4090, cpu.")
@click.option("--memory", type=MEMORY, help="Memory of the device, or a CPU's limit: 79.3GiB.")
@click.option("--bandwidth", type=BANDWIDTH, help="Memory bandwidth of the device: 3.35TB/s.")
@click.option(
    "--engine", metavar="NAME[@VERSION]", default="kvscaler", show_default=True,
    help="kvscaler, vllm, sglang, tensorrtllm, lmdeploy, tgi or llama.cpp.",
)  # fmt: skip
@click.option("--tensor-parallel", type=COUNT, default=1, help="Ranks that share each layer.")
@click.option("--pipeline-parallel", type=COUNT, default=1, help="Stages of layers.")
@click.option(
    "--data-parallel", type=COUNT, default=1,
    help="Replicas with a pool each; in SGLang they share the ranks (dp-attention).",
)  # fmt: skip
@click.option(
    "--context-parallel", type=COUNT, default=1, help="Ranks that share a sequence's tokens."
)
@click.option("--memory-utilization", type=SHARE, help="Share of memory to use: 0.9 or 90%.")
@click.option("--kv-dtype", metavar="TYPE", help="Type of the KV cache: fp8, int8_per_token_head.")
@click.option(
    "--weight-dtype", metavar="TYPE",
    help="Type of the weights: bfloat16, fp8, awq, int4-g128, gguf-q4_k_m.",
)  # fmt: skip
@click.option("--max-model-len", type=COUNT, help="Longest request in tokens.")
@click.option("--max-num-seqs", type=COUNT, help="Sequences at once, at most.")
@click.option("--max-num-batched-tokens", type=COUNT, help="Tokens computed in one step.")
@click.option("--block-size", type=COUNT, help="Tokens in one KV block.")
@click.option(
    "--speculative-tokens", type=COUNT_OR_NONE, default=0,
    help="Draft tokens a step, by the model's own prediction layers.",
)  # fmt: skip
@click.option("--max-loras", type=COUNT, help="LoRA adapters kept on the device.")
@click.option("--max-lora-rank", type=COUNT, help="Largest rank of an adapter.")
@click.option("--enforce-eager", is_flag=True, help="No CUDA graphs.")
@click.option("--kv-bytes", type=MEMORY, help="The size of the KV cache given outright: 40GiB.")
@click.option(
    "--observed", type=OBSERVATION,
    help="What the engine printed of its pool: 51.38GiB, 27000blocks, 432000tokens.",
)  # fmt: skip
@click.option(
    "--override", metavar="FIELD=VALUE", multiple=True,
    help="Replace a field of the model's configuration. Repeatable; shown in the output.",
)  # fmt: skip
@click.option("--prompt-tokens", type=COUNT, help="Prompt of a typical request.")
@click.option("--output-tokens", type=COUNT_OR_NONE, help="Output of a typical request.")
@click.option("--concurrency", type=COUNT, help="Requests that have to run at once.")
@click.option("--limits", is_flag=True, help="Add the admission limits that follow (JSON, YAML).")
@click.option("-o", "--output", type=click.Choice(FORMATS), default="table", show_default=True)
@click.pass_context
def plan(context: click.Context, /, output: str, limits: bool, **flags: Any) -> None:
    """Show where a replica's memory goes, and what it holds.

    MODEL is a name or URI of the catalogue, or the path of a config.json, of its folder, or of a
    GGUF file. Flags have vLLM's names where it has them, and mean the same for every engine.
    """
    if limits and output not in ("json", "yaml"):
        raise click.UsageError("--limits are for machines: add -o json or -o yaml")
    answer = answer_of(question_of(flags))
    if output in ("json", "yaml"):
        print_document(document(answer, limits=limits), output)
    else:
        columns = shutil.get_terminal_size((80, 24)).columns
        click.echo(table(answer, Paper(columns, marks_for(sys.stdout.encoding), output == "wide")))
    if not answer.holds:
        context.exit(1)
