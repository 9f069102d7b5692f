"""Output in kubectl's habit: a table for people, JSON and YAML for machines."""

import json
from collections.abc import Collection, Sequence
from typing import Any

import click

FORMATS = ("table", "wide", "json", "yaml")


def print_document(document: dict[str, Any], output: str) -> None:
    """Print `document` as `json` or `yaml`."""
    if output == "json":
        click.echo(json.dumps(document, indent=2))
        return
    import yaml  # noqa: PLC0415  a third of a table's start-up, which needs none

    click.echo(yaml.safe_dump(document, sort_keys=False), nl=False)


def format_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()
) -> str:
    """Columns three spaces apart, as kubectl prints them; columns in `right` are right-aligned."""
    cells = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = []
    for row in cells:
        parts = [
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ]
        lines.append("   ".join(parts).rstrip())
    return "\n".join(lines)
