"""`kvscaler list`: the names that `kvscaler plan` knows, with the facts that tell them apart."""

from typing import Any

import click
from kvscaler import hardware
from kvscaler.budget import gib
from kvscaler.models import catalogue

from kvscaler_cli.output import format_table, print_document

FORMATS = ("table", "json", "yaml")


@click.command("list")
@click.argument("what", type=click.Choice(("accelerators", "models")))
@click.option("-o", "--output", type=click.Choice(FORMATS), default="table", show_default=True)
def list_names(what: str, output: str) -> None:
    """Show the accelerators or the models that are known by name."""
    items = _accelerators() if what == "accelerators" else _models()
    if output != "table":
        print_document({what: items}, output)
    elif what == "accelerators":
        rows = [
            [
                item["name"],
                gib(item["memoryBytes"]) if item["memoryBytes"] else "",
                f"{item['bandwidthBytesPerSecond'] / 1e9:,.0f} GB/s"
                if item["bandwidthBytesPerSecond"]
                else "",
                ",".join(item["aliases"]),
            ]
            for item in items
        ]
        click.echo(format_table(["NAME", "MEMORY", "BANDWIDTH", "ALIASES"], rows, {1, 2}))
    else:
        rows = [
            [
                item["name"],
                f"{item['parameters'] / 1e9:,.1f} B",
                f"{item['maxContextTokens']:,}",
                ",".join(item["uris"]),
            ]
            for item in items
        ]
        click.echo(format_table(["NAME", "PARAMETERS", "CONTEXT", "URI"], rows, {1, 2}))


def _accelerators() -> list[dict[str, Any]]:
    return [
        {
            "name": device.name,
            "aliases": list(device.aliases),
            "memoryBytes": device.memory_bytes,
            "bandwidthBytesPerSecond": device.bandwidth_bytes_per_second,
            "source": device.source,
        }
        for device in hardware.accelerators()
    ]


def _models() -> list[dict[str, Any]]:
    return [
        {
            "name": entry.name,
            "parameters": entry.architecture.parameters,
            "maxContextTokens": entry.architecture.max_context_tokens,
            "uris": list(entry.uris),
            "source": entry.source,
        }
        for entry in catalogue.entries()
    ]
